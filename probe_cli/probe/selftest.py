"""Does a manifest notice when a stream of weights is altered? Replays of the engine's own loading code say so.

Each trial alters one sampled application's source in the stream, replays `load_weights` for real, and compares what
was applied with the contract: keys and counts, by name, and the header of each source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from torch import nn

from probe_cli.checkpoint import Checkpoint, Source
from probe_cli.dtypes import nbytes
from probe_cli.engines.base import Engine
from probe_cli.errors import EngineError, ManifestError
from probe_cli.manifest import ContractKey, Manifest, canonical_bytes
from probe_cli.manifest.schema import Application
from probe_cli.probe.replay import DEFAULT_VALUE_LIMIT, Recording, replay

__all__ = ["KINDS", "SelfTest", "Trial", "selftest"]

#: Sources that are replayed in a trial of a large checkpoint: those of the layers concerned.
_WHOLE_STREAM = 4000


class Trial(msgspec.Struct, frozen=True):
    """One altered stream. `detected_by` is empty if nobody noticed."""

    kind: str
    #: What was altered, for people.
    altered: str
    layer: str
    #: "missing" or "extra" (keys), "header", or "raised" (load_weights itself failed).
    detected_by: str
    #: The first difference, by name.
    difference: str


class SelfTest(msgspec.Struct, frozen=True):
    """All trials of one rank."""

    rank: int
    trials: tuple[Trial, ...]

    @property
    def undetected(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if not trial.detected_by)


@dataclass(frozen=True)
class _Item:
    """One tensor of the stream: what it is called there, and which source it really is."""

    source: Source
    name: str

    def sent(self) -> Source:
        """As the replay is to see it."""
        return self.source if self.source.name == self.name else msgspec.structs.replace(self.source, name=self.name)


@dataclass(frozen=True)
class _Sample:
    layer: str
    application: Application
    #: Another source of the same layer, or of any other layer, that takes part in a swap.
    neighbour: str | None


def selftest(
    engine: Engine,
    checkpoint: Checkpoint,
    manifest: Manifest,
    *,
    samples: int = 20,
    value_limit: int = DEFAULT_VALUE_LIMIT,
    progress: Callable[[int, int], None] | None = None,
) -> SelfTest:
    """Run trials of every kind on `samples` applications of one rank.

    Raises ManifestError if the unaltered stream does not give the manifest's contract: it is of another engine,
    checkpoint or rank, and nothing can be said.
    """
    checkpoint = engine.ordered(checkpoint)
    model = engine.materialize(checkpoint, manifest.rank)
    bench = _Bench(model, checkpoint, engine, manifest, value_limit)
    chosen = _sampled(manifest, samples)
    if not chosen:
        raise ManifestError("the manifest has no applications, so there is nothing to alter")
    trials: list[Trial] = []
    for number, sample in enumerate(chosen):
        if progress is not None:
            progress(number, len(chosen))
        trials += bench.trials(sample)
    if progress is not None:
        progress(len(chosen), len(chosen))
    return SelfTest(manifest.rank.index, tuple(trials))


def _sampled(manifest: Manifest, samples: int) -> list[_Sample]:
    """Applications of as many sorts (layer class, tensor, selectors' names) as there are, spread evenly within each."""
    sorts: dict[tuple[str, ...], list[tuple[str, Application]]] = {}
    for layer in manifest.layers:
        for application in filter(lambda a: a.sources, layer.applications):
            sort = (layer.class_name, application.tensor, *sorted(application.selectors), str(len(application.sources)))
            sorts.setdefault(sort, []).append((layer.name, application))
    per_sort = -(-samples // max(1, len(sorts)))
    spread = {sort: _spread(found, per_sort) for sort, found in sorts.items()}
    picked: list[tuple[str, Application]] = []
    for place in range(per_sort):
        picked += [found[place] for found in spread.values() if place < len(found)]
    taken = {id(application) for _, application in picked}
    picked += [item for found in sorts.values() for item in found if id(item[1]) not in taken]
    neighbours = _neighbours(manifest)
    return [_Sample(layer, a, neighbours(layer, a)) for layer, a in picked[:samples]]


def _spread(found: list[tuple[str, Application]], count: int) -> list[tuple[str, Application]]:
    count = min(count, len(found))
    return [found[index * len(found) // count] for index in range(count)]


def _neighbours(manifest: Manifest) -> Callable[[str, Application], str | None]:
    by_layer = {
        layer.name: [source for application in layer.applications for source in application.sources]
        for layer in manifest.layers
    }
    every = [source.name for source in manifest.sources]

    def find(layer: str, application: Application) -> str | None:
        own = set(application.sources)
        near = (name for names in (by_layer[layer], every) for name in names)
        return next((name for name in near if name not in own), None)

    return find


class _Bench:
    """A model, and how it answers to streams."""

    def __init__(
        self, model: nn.Module, checkpoint: Checkpoint, engine: Engine, manifest: Manifest, value_limit: int
    ) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._engine = engine
        self._value_limit = value_limit
        self._manifest = manifest
        self._headers = {source.name: (source.dtype, source.shape) for source in manifest.sources}
        self._layers = {layer.name: layer for layer in manifest.layers}
        self._layers_of: dict[str, list[str]] = {}
        for layer in manifest.layers:
            for application in layer.applications:
                for source in application.sources:
                    self._layers_of.setdefault(source, []).append(layer.name)
        unaltered = [_Item(source, source.name) for source in checkpoint.sources]
        found = self._compare(unaltered, None)
        if found is not None:
            raise ManifestError(
                f"the unaltered stream does not give the manifest's contract: {found[1]}",
                hint="use the checkpoint, engine and target that the manifest was built with",
            )

    def trials(self, sample: _Sample) -> Iterator[Trial]:
        """Every kind of alteration of one application's (first) source."""
        victim = sample.application.sources[0]
        concerned = [victim] if sample.neighbour is None else [victim, sample.neighbour]
        stream, layers = self._stream(concerned)
        place = next(index for index, item in enumerate(stream) if item.source.name == victim)
        other = next((index for index, item in enumerate(stream) if item.source.name == sample.neighbour), None)
        for kind, alter in KINDS.items():
            altered = alter(stream, place, other)
            if altered is None:
                continue
            found = self._compare(altered[0], layers)
            by, difference = found if found is not None else ("", "")
            yield Trial(kind, altered[1], sample.layer, by, difference)

    def _stream(self, concerned: Sequence[str]) -> tuple[list[_Item], frozenset[str] | None]:
        sources = self._checkpoint.sources
        if len(sources) <= _WHOLE_STREAM:
            return [_Item(source, source.name) for source in sources], None
        layers = frozenset(layer for name in concerned for layer in self._layers_of.get(name, ()))
        wanted = {s for layer in layers for a in self._layers[layer].applications for s in a.sources}
        return [_Item(source, source.name) for source in sources if source.name in wanted], layers

    def _compare(self, stream: Sequence[_Item], layers: frozenset[str] | None) -> tuple[str, str] | None:
        """How the first difference to the contract (of `layers`, or of all) was found, and what it is; None if there is
        none."""
        sent = msgspec.structs.replace(self._checkpoint, sources=tuple(item.sent() for item in stream))
        try:
            recording = replay(self._model, sent, self._engine, value_limit=self._value_limit)
        except EngineError as error:
            return "raised", str(error)
        observed = _observed(recording, stream)
        expected = _expected(self._manifest, layers)
        for key, count in expected.items():
            if observed.get(key, 0) < count:
                return "missing", f"{key}: {observed.get(key, 0)} of {count}"
        for key, count in observed.items():
            if count > expected.get(key, 0) and (layers is None or key.layer in layers):
                return "extra", f"{key}: {count} instead of {expected.get(key, 0)}"
        return self._bent(stream)

    def _bent(self, stream: Sequence[_Item]) -> tuple[str, str] | None:
        for item in stream:
            header = (item.source.dtype, item.source.shape)
            known = self._headers.get(item.source.name)
            if known is not None and known != header:
                return "header", f"{item.source.name}: {header[0]} {list(header[1])} instead of {list(known[1])}"
        return None


def _expected(manifest: Manifest, layers: frozenset[str] | None) -> dict[ContractKey, int]:
    return {key: count for key, count in manifest.keys().items() if layers is None or key.layer in layers}


def _observed(recording: Recording, stream: Sequence[_Item]) -> dict[ContractKey, int]:
    """What was applied, under the names that the sources really have."""
    counts: dict[ContractKey, int] = {}
    for layer, entries in recording.contracts.items():
        for entry in entries.values():
            names = tuple(stream[index].source.name for index in entry.sources)
            selectors = canonical_bytes(entry.selectors).decode() if entry.selectors else "{}"
            key = ContractKey(names, layer, entry.owned.name, selectors)
            counts[key] = counts.get(key, 0) + entry.count
    return counts


_Altered = tuple[list[_Item], str]


def _drop(stream: list[_Item], place: int, other: int | None) -> _Altered | None:
    return [*stream[:place], *stream[place + 1 :]], f"{stream[place].name} left out"


def _double(stream: list[_Item], place: int, other: int | None) -> _Altered | None:
    return [*stream[: place + 1], stream[place], *stream[place + 1 :]], f"{stream[place].name} sent twice"


def _stand_in(stream: list[_Item], place: int, other: int | None) -> _Altered | None:
    """A neighbour sent twice in the place of the one that is missing: as many tensors as there should be."""
    if other is None:
        return None
    altered = list(stream)
    altered[place] = stream[other]
    return altered, f"{stream[other].name} sent twice, {stream[place].name} not at all"


def _rename(stream: list[_Item], place: int, other: int | None) -> _Altered | None:
    item = stream[place]
    head, _, tail = item.name.rpartition(".")
    name = f"{head}.renamed_{tail}" if head else f"renamed_{tail}"
    return [*stream[:place], _Item(item.source, name), *stream[place + 1 :]], f"{item.name} sent as {name}"


def _reshape(stream: list[_Item], place: int, other: int | None) -> _Altered | None:
    item = stream[place]
    source = item.source
    # One row more: what a loader that cuts its part from the front does not see.
    shape = (source.shape[0] + 1, *source.shape[1:]) if source.shape else (2,)
    size = nbytes(source.dtype, shape)
    bent = msgspec.structs.replace(source, shape=shape, nbytes=size or source.nbytes, file=None)
    text = f"{item.name} sent as {list(shape)} instead of {list(source.shape)}"
    return [*stream[:place], _Item(bent, item.name), *stream[place + 1 :]], text


def _swap(stream: list[_Item], place: int, other: int | None) -> _Altered | None:
    """Two tensors sent under each other's names: each is routed to where the other belongs."""
    if other is None:
        return None
    altered = list(stream)
    altered[place] = _Item(stream[place].source, stream[other].name)
    altered[other] = _Item(stream[other].source, stream[place].name)
    return altered, f"{stream[place].name} and {stream[other].name} sent under each other's names"


#: Kind of alteration -> what makes it of a stream, None where it cannot be made.
KINDS: dict[str, Callable[[list[_Item], int, int | None], _Altered | None]] = {
    "drop": _drop,
    "double": _double,
    "stand-in": _stand_in,
    "rename": _rename,
    "reshape": _reshape,
    "swap": _swap,
}
