"""The manifest of one rank, from an engine or from a live model; and whether it depends on chance or order."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, field

from torch import nn

from probe_cli.checkpoint import Checkpoint
from probe_cli.engines.base import Engine
from probe_cli.errors import EngineError, ProbeError
from probe_cli.manifest import Manifest
from probe_cli.probe.document import manifest_of
from probe_cli.probe.live import LiveEngine
from probe_cli.probe.replay import DEFAULT_VALUE_LIMIT, Progress, Recording, replay
from probe_cli.topology import Rank

__all__ = ["RankResult", "build_rank", "probe"]


@dataclass(frozen=True)
class RankResult:
    """What building one rank gives. `unused`: source -> "declined", "skipped" or "unread". `peak_rss` in bytes."""

    manifest: Manifest
    unused: dict[str, str]
    peak_rss: int = 0
    #: Seconds by phase: materialize, replay, verify, document.
    seconds: dict[str, float] = field(default_factory=dict)


def build_rank(
    engine: Engine,
    checkpoint: Checkpoint,
    rank: Rank,
    *,
    value_limit: int = DEFAULT_VALUE_LIMIT,
    verify: bool = False,
    progress: Progress | None = None,
) -> RankResult:
    """Materialize one rank's model, replay its load, and write down the contract.

    `verify` replays twice more, once with the sources in reversed order, and raises ProbeError if the contract differs.
    """
    clock = _Clock()
    checkpoint = engine.ordered(checkpoint)
    model = engine.materialize(checkpoint, rank)
    clock.lap("materialize")
    return _build(model, checkpoint, engine, rank, value_limit, verify, progress, clock, throwaway=True)


def probe(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    rank: Rank | None = None,
    engine: Engine | None = None,
    value_limit: int = DEFAULT_VALUE_LIMIT,
    verify: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """The manifest of a model that is at hand, live or on meta: which sources its `load_weights` needs, and what for.

    No tensor of the model is written, and its Python state is put back as it was. The thread that calls is the one whose
    loading is watched; no other thread may load into the model meanwhile.

    Raises ProbeError if the load cannot be expressed as a contract, EngineError if `load_weights` itself fails.
    """
    result = _build(
        model,
        checkpoint,
        engine or LiveEngine(),
        rank or Rank(),
        value_limit,
        verify,
        progress,
        _Clock(),
        throwaway=False,
    )
    return result.manifest


def _build(
    model: nn.Module,
    checkpoint: Checkpoint,
    engine: Engine,
    rank: Rank,
    value_limit: int,
    verify: bool,
    progress: Progress | None,
    clock: _Clock,
    *,
    throwaway: bool,
) -> RankResult:
    restore = verify or not throwaway
    recording = replay(model, checkpoint, engine, value_limit=value_limit, progress=progress, restore=restore)
    clock.lap("replay")
    if verify:
        again = replay(model, checkpoint, engine, value_limit=value_limit)
        _compare(recording, again, checkpoint, checkpoint, "a second replay of the same sources")
        backwards = checkpoint.reordered([source.name for source in reversed(checkpoint.sources)])
        what = "a replay with the sources in reversed order"
        try:
            reversed_recording = replay(model, backwards, engine, value_limit=value_limit)
        except EngineError as error:
            raise ProbeError(f"the load depends on the order of the sources: {what} fails: {error}") from error
        _compare(recording, reversed_recording, checkpoint, backwards, what)
        clock.lap("verify")
    manifest = manifest_of(recording, checkpoint, rank, engine.identity, type(model).__name__)
    clock.lap("document")
    return RankResult(manifest, recording.unused(checkpoint), _peak_rss(), clock.laps)


def _compare(one: Recording, other: Recording, first: Checkpoint, second: Checkpoint, what: str) -> None:
    left, right = _named_keys(one, first), _named_keys(other, second)
    if left == right:
        return
    differing = sorted({key for key in left.keys() | right.keys() if left.get(key, 0) != right.get(key, 0)})
    layer, tensor, sources, _ = differing[0]
    raise ProbeError(
        f"the contract is not stable: {what} differs in {len(differing)} keys, first {layer}.{tensor} from "
        f"{' + '.join(sources)} ({left.get(differing[0], 0)} times, then {right.get(differing[0], 0)})",
        hint="loading code must do the same for the same sources, in any order; or build without --verify",
    )


def _named_keys(recording: Recording, checkpoint: Checkpoint) -> dict[tuple[str, str, tuple[str, ...], bytes], int]:
    keys: dict[tuple[str, str, tuple[str, ...], bytes], int] = {}
    for layer, entries in recording.contracts.items():
        for key, entry in entries.items():
            # Several sources are joined in the order of the loader's own making, which the stream's order may shape.
            names = tuple(sorted(checkpoint.sources[index].name for index in entry.sources))
            selectors = key[2] if isinstance(key[2], bytes) else b""
            full = (layer, entry.owned.name, names, selectors)
            keys[full] = keys.get(full, 0) + entry.count
    return keys


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


def _peak_rss() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
