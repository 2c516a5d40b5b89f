"""The contract of one rank, compiled for ticking off: from a loader call to the expectation it fulfils."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from probe_cli.manifest import ContractKey, Manifest
from probe_cli.manifest.keys import application_key
from probe_cli.manifest.schema import Application, SourceEntry

__all__ = ["Contract", "Expectation", "frozen_selectors"]


@dataclass(frozen=True, eq=False)
class Expectation:
    """One key of the contract. `index` is its place in the progress of an update."""

    index: int
    key: ContractKey
    count: int
    direct: bool
    #: Full names (`layer.tensor`) of all tensors that the application writes; the key's own first.
    written: tuple[str, ...]

    @property
    def layer(self) -> str:
        return self.key.layer


def frozen_selectors(selectors: Mapping[str, Any]) -> Any:
    """A hashable form of selectors: equal for equal selectors, whatever their order."""
    if not selectors:
        return None
    if len(selectors) == 1:
        ((name, value),) = selectors.items()
        return (name, value) if type(value) in (str, int) else (name, _frozen(value))
    return tuple(sorted((name, _frozen(value)) for name, value in selectors.items()))


def _frozen(value: Any) -> Any:
    # The type stands beside the value: True, 1 and 1.0 are different selectors.
    kind = type(value)
    if kind is str:
        return value
    if kind is list or kind is tuple:
        return tuple(_frozen(item) for item in value)
    if kind is dict:
        return tuple(sorted((name, _frozen(item)) for name, item in value.items()))
    return (kind.__name__, value)


class Contract:
    """All expectations of a manifest, by destination and by source. Immutable; serves any number of updates."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.expectations: list[Expectation] = []
        self.sources: dict[str, SourceEntry] = {source.name: source for source in manifest.sources}
        #: Full tensor name -> selectors -> the keys that differ in their sources only.
        self._by_destination: dict[str, dict[Any, list[Expectation]]] = {}
        self.by_layer: dict[str, list[Expectation]] = {}
        self.by_source: dict[str, list[Expectation]] = {}
        #: Sources that are joined before they are loaded: name -> all that belong together, in the order of joining.
        self.joined: dict[str, tuple[str, ...]] = {}
        #: Full names of tensors that `load_weights` writes itself.
        self.direct_tensors: set[str] = set()
        #: Full names of tensors that a source is added to: what they held before the load is part of the result.
        self.accumulating: dict[str, None] = {}
        #: Index of an expectation -> those (itself too, in the order of the cold load) that write the same elements:
        #: they are applied in that order, whatever the order of arrival.
        self.queues: dict[int, tuple[Expectation, ...]] = {}
        for layer in manifest.layers:
            for application in layer.applications:
                self._add(layer.name, application)
        self._line_up(manifest)

    def _line_up(self, manifest: Manifest) -> None:
        overlapped = {
            f"{layer.name}.{tensor.name}" if layer.name else tensor.name
            for layer in manifest.layers
            for tensor in layer.tensors
            if tensor.coverage is not None and tensor.coverage.overlap_elements
        }
        if not overlapped:
            return
        for expectations in self.by_layer.values():
            queue = tuple(e for e in expectations if not e.direct and overlapped.intersection(e.written))
            if len(queue) > 1:
                self.queues.update((e.index, queue) for e in queue)

    def _add(self, layer: str, application: Application) -> None:
        key = application_key(layer, application)
        written = dict.fromkeys([key.full_tensor, *(w.tensor for w in application.writes if w.tensor is not None)])
        self.accumulating.update(
            (key.full_tensor if write.tensor is None else write.tensor, None)
            for write in application.writes
            if write.accumulates
        )
        index = len(self.expectations)
        expectation = Expectation(index, key, application.count, application.direct, tuple(written))
        self.expectations.append(expectation)
        slots = self._by_destination.setdefault(key.full_tensor, {})
        slots.setdefault(frozen_selectors(application.selectors), []).append(expectation)
        self.by_layer.setdefault(layer, []).append(expectation)
        for source in application.sources:
            self.by_source.setdefault(source, []).append(expectation)
        if len(application.sources) > 1:
            members = dict.fromkeys(application.sources)
            for source in application.sources:
                members.update(dict.fromkeys(self.joined.get(source, ())))
            group = tuple(members)
            self.joined.update(dict.fromkeys(group, group))
        if application.direct:
            self.direct_tensors.update(written)

    def candidates(self, full_tensor: str, selectors: Mapping[str, Any]) -> list[Expectation]:
        """The keys with this destination and these selectors; they differ in their sources."""
        slots = self._by_destination.get(full_tensor)
        return [] if slots is None else slots.get(frozen_selectors(selectors), [])

    def find(
        self, full_tensor: str, selectors: Mapping[str, Any], sources: Iterable[str], current: str | None
    ) -> Expectation | None:
        """The key that a call fulfils.

        `sources` are those that the storages of its tensors tell of; where storage cannot tell (a joined or computed
        tensor), `current`, what `load_weights` is consuming, must be one of the key's.
        """
        found = self.candidates(full_tensor, selectors)
        if not found:
            return None
        known = tuple(sources)
        for expectation in found:
            if known == expectation.key.sources:
                return expectation
        if known:
            # A tensor may stand for the one of several joined sources that is loaded as a view of the joint tensor.
            within = [e for e in found if len(e.key.sources) > 1 and set(known) <= set(e.key.sources)]
            return within[0] if len(within) == 1 else None
        within = [e for e in found if current in e.key.sources]
        return within[0] if within else None
