"""Many ranks at once: their manifests, the bundle of them, and selftests of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import msgspec

from probe_cli.checkpoint import Checkpoint
from probe_cli.collecting import rare_collection
from probe_cli.engines.base import Engine
from probe_cli.errors import CheckpointError
from probe_cli.manifest import Bundle, Manifest
from probe_cli.manifest.schema import ManifestDocument
from probe_cli.probe.build import RankResult, build_rank
from probe_cli.probe.capture import captured_output
from probe_cli.probe.pool import Listener, run_ranks
from probe_cli.probe.replay import DEFAULT_VALUE_LIMIT, Progress
from probe_cli.probe.selftest import SelfTest, selftest
from probe_cli.topology import Rank, Topology

__all__ = ["BuildListener", "BuiltBundle", "build_bundle", "build_ranks", "selftest_ranks"]

BuildListener: TypeAlias = Listener[RankResult]


@dataclass(frozen=True)
class BuiltBundle:
    """A bundle with what building each of its ranks took, in the same order."""

    bundle: Bundle
    results: tuple[RankResult, ...]


def build_bundle(
    engine: Engine,
    checkpoint: Checkpoint,
    topology: Topology,
    *,
    ranks: Sequence[int] | None = None,
    keep_order: bool = False,
    jobs: int | None = None,
    value_limit: int = DEFAULT_VALUE_LIMIT,
    verify: bool = False,
    listener: BuildListener | None = None,
) -> BuiltBundle:
    """The bundle of a topology (or of some of its ranks), proved over the ranks that were built.

    `keep_order` feeds the sources in the checkpoint's order, not in the engine's. Raises CheckpointError if no rank loads
    anything: an empty contract would be fulfilled by whatever is sent.
    """
    with rare_collection():
        with captured_output("the engine"):
            if keep_order:
                engine = cast(Engine, _KeepsOrder(engine))
            everyone = engine.ranks(checkpoint, topology)
            checkpoint = engine.ordered(checkpoint)
        wanted = everyone if ranks is None else [rank for rank in everyone if rank.index in set(ranks)]
        results = build_ranks(
            engine, checkpoint, wanted, jobs=jobs, value_limit=value_limit, verify=verify, listener=listener
        )
    if not any(result.manifest.document.summary.applications for result in results):
        raise CheckpointError(
            f"nothing is loaded: load_weights uses none of the {len(checkpoint.sources):,} sources on any rank that was built",
            hint=f"is it this model's checkpoint? its first source is {checkpoint.sources[0].name}"
            if checkpoint.sources
            else None,
        )
    bundle = Bundle.build(checkpoint, [result.manifest for result in results], [result.unused for result in results])
    return BuiltBundle(bundle, tuple(results))


class _KeepsOrder:
    """An engine that takes the sources in whatever order they come."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def ordered(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _Parcel(msgspec.Struct, array_like=True):
    """A rank's result on its way to the parent. `unused`: reason -> indices of sources (names would be megabytes)."""

    document: ManifestDocument
    unused: dict[str, list[int]]
    peak_rss: int
    seconds: dict[str, float]


def build_ranks(
    engine: Engine,
    checkpoint: Checkpoint,
    ranks: Sequence[Rank],
    *,
    jobs: int | None = None,
    value_limit: int = DEFAULT_VALUE_LIMIT,
    verify: bool = False,
    listener: BuildListener | None = None,
) -> list[RankResult]:
    """The results of these ranks, in their order. `checkpoint` must be in the engine's order already.

    The engine is warmed up here, then a worker is forked for each rank (see `run_ranks` for how that ends).
    """
    _warm_up(engine)
    names = checkpoint.names()

    def job(rank: Rank, report: Progress) -> bytes:
        result = build_rank(engine, checkpoint, rank, value_limit=value_limit, verify=verify, progress=report)
        place = {name: index for index, name in enumerate(names)}
        unused: dict[str, list[int]] = {}
        for name, reason in result.unused.items():
            unused.setdefault(reason, []).append(place[name])
        return msgspec.msgpack.encode(_Parcel(result.manifest.document, unused, result.peak_rss, result.seconds))

    def decode(parcel: bytes) -> RankResult:
        found = msgspec.msgpack.decode(parcel, type=_Parcel)
        unused = {names[index]: reason for reason, indices in found.unused.items() for index in indices}
        return RankResult(Manifest(found.document), unused, found.peak_rss, found.seconds)

    return run_ranks(ranks, job, decode, jobs=jobs, listener=listener)


def selftest_ranks(
    engine: Engine,
    checkpoint: Checkpoint,
    manifests: Sequence[Manifest],
    *,
    samples: int,
    jobs: int | None = None,
    value_limit: int = DEFAULT_VALUE_LIMIT,
    listener: Listener[SelfTest] | None = None,
) -> list[SelfTest]:
    """The selftests of these ranks, each in a process of its own."""
    _warm_up(engine)
    by_rank = {manifest.rank: manifest for manifest in manifests}

    def job(rank: Rank, report: Progress) -> bytes:
        found = selftest(engine, checkpoint, by_rank[rank], samples=samples, value_limit=value_limit, progress=report)
        return msgspec.msgpack.encode(found)

    def decode(parcel: bytes) -> SelfTest:
        return msgspec.msgpack.decode(parcel, type=SelfTest)

    return run_ranks(list(by_rank), job, decode, jobs=jobs, listener=listener)


def _warm_up(engine: Engine) -> None:
    with captured_output("the engine"):
        engine.warm_up()
