"""Many ranks in parallel: a forked process each, at most `jobs` at once, none left when `build_ranks` ends."""

from __future__ import annotations

import gc
import os
import selectors
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol, cast

from probe_cli import errors
from probe_cli.checkpoint import Checkpoint
from probe_cli.engines.base import Engine
from probe_cli.errors import EngineError, ProbeManifestError, UsageError
from probe_cli.manifest import Bundle, Manifest
from probe_cli.probe.build import RankResult
from probe_cli.probe.capture import attach_log, captured_output
from probe_cli.probe.replay import DEFAULT_VALUE_LIMIT
from probe_cli.probe.worker import Failed, Finished, Progressed, decode_frames, run_worker
from probe_cli.topology import Rank, Topology

__all__ = ["BuildListener", "BuiltBundle", "build_bundle", "build_ranks", "default_jobs"]

_CHUNK = 1 << 20


class BuildListener(Protocol):
    """Who is told how a build goes. Called in the parent, between reads of the workers' pipes."""

    def started(self, rank: Rank) -> None:
        """A worker for this rank was forked."""

    def progressed(self, rank: Rank, done: int, total: int) -> None:
        """The replay of this rank has been fed `done` of `total` sources."""

    def finished(self, rank: Rank, result: RankResult) -> None:
        """This rank is done."""


@dataclass(frozen=True)
class BuiltBundle:
    """A bundle with what building each of its ranks took, in the same order."""

    bundle: Bundle
    results: tuple[RankResult, ...]


@dataclass
class _Worker:
    rank: Rank
    pid: int
    pipe: int
    log: BinaryIO
    buffer: bytearray = field(default_factory=bytearray)
    reaped: bool = False


def default_jobs(ranks: int) -> int:
    """As many workers as there are CPUs for this process, and no more than ranks."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cpus, ranks))


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

    `keep_order` feeds the sources in the checkpoint's order, not in the engine's.
    """
    with captured_output("the engine"):
        if keep_order:
            engine = cast(Engine, _KeepsOrder(engine))
        everyone = engine.ranks(checkpoint, topology)
        checkpoint = engine.ordered(checkpoint)
    wanted = everyone if ranks is None else [rank for rank in everyone if rank.index in set(ranks)]
    results = build_ranks(
        engine, checkpoint, wanted, jobs=jobs, value_limit=value_limit, verify=verify, listener=listener
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

    The engine is warmed up here, then a worker is forked for each rank. The first rank that fails stops the others; its
    error is raised with the rank's name in front. Whatever ends this call (an error, Ctrl-C, any other exception), no
    worker is left.
    """
    if not ranks:
        raise UsageError("no ranks to build")
    if not hasattr(os, "fork"):
        raise UsageError("building needs fork(), which this platform lacks", hint="build on Linux or macOS")
    with captured_output("the engine"):
        engine.warm_up()
    gc.collect()
    # Objects of the parent are then never touched by a worker's collector: their pages stay shared.
    gc.freeze()
    pool = _Pool(engine, checkpoint, value_limit, verify, listener)
    try:
        return pool.run(ranks, jobs or default_jobs(len(ranks)))
    finally:
        pool.stop()
        gc.unfreeze()


class _Pool:
    def __init__(
        self, engine: Engine, checkpoint: Checkpoint, value_limit: int, verify: bool, listener: BuildListener | None
    ) -> None:
        self._engine = engine
        self._checkpoint = checkpoint
        self._value_limit = value_limit
        self._verify = verify
        self._listener = listener
        self._workers: dict[int, _Worker] = {}
        self._names = checkpoint.names()

    def run(self, ranks: Sequence[Rank], jobs: int) -> list[RankResult]:
        results: dict[int, RankResult] = {}
        waiting = list(reversed(ranks))
        with selectors.DefaultSelector() as selector:
            while waiting or self._workers:
                while waiting and len(self._workers) < jobs:
                    worker = self._start(waiting.pop())
                    selector.register(worker.pipe, selectors.EVENT_READ, worker)
                for key, _ in selector.select(timeout=1.0):
                    worker = key.data
                    result = self._read(worker)
                    if result is not None:
                        results[worker.rank.index] = result
                        selector.unregister(worker.pipe)
                        self._end(worker)
                        if self._listener is not None:
                            self._listener.finished(worker.rank, result)
        return [results[rank.index] for rank in ranks]

    def _start(self, rank: Rank) -> _Worker:
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with its worker
        reading, writing = os.pipe()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        with _held_signals():
            pid = os.fork()
            if pid == 0:
                run_worker(
                    self._engine,
                    self._checkpoint,
                    rank,
                    pipe=writing,
                    log=log.fileno(),
                    parent=parent,
                    value_limit=self._value_limit,
                    verify=self._verify,
                )
            worker = self._workers[pid] = _Worker(rank, pid, reading, log)
        os.close(writing)
        if self._listener is not None:
            self._listener.started(rank)
        return worker

    def _read(self, worker: _Worker) -> RankResult | None:
        chunk = os.read(worker.pipe, _CHUNK)
        worker.buffer += chunk
        for frame in decode_frames(worker.buffer):
            if isinstance(frame, Progressed):
                if self._listener is not None:
                    self._listener.progressed(worker.rank, frame.done, frame.total)
            elif isinstance(frame, Finished):
                return self._result(frame)
            else:
                raise _named(frame, worker)
        if not chunk:
            raise self._vanished(worker)
        return None

    def _result(self, frame: Finished) -> RankResult:
        unused = {self._names[index]: reason for reason, indices in frame.unused.items() for index in indices}
        return RankResult(Manifest(frame.document), unused, frame.peak_rss, frame.seconds)

    def _vanished(self, worker: _Worker) -> EngineError:
        _, status = os.waitpid(worker.pid, 0)
        worker.reaped = True
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            what = f"its worker was killed by {signal.Signals(-code).name}"
            hint = "out of memory? fewer ranks at once need less (--jobs 1)" if code == -signal.SIGKILL else None
        else:
            what, hint = f"its worker ended with exit code {code} and no result", None
        error = EngineError(f"{worker.rank}: {what}", hint=hint)
        attach_log(error, str(worker.rank), worker.log)
        return error

    def _end(self, worker: _Worker) -> None:
        """Reap a worker that has delivered."""
        del self._workers[worker.pid]
        if not worker.reaped:
            os.waitpid(worker.pid, 0)
        os.close(worker.pipe)
        worker.log.close()

    def stop(self) -> None:
        """Kill and reap every worker that is still there."""
        with _held_signals():
            for worker in self._workers.values():
                if not worker.reaped:
                    with suppress(ProcessLookupError):
                        os.kill(worker.pid, signal.SIGKILL)
            for worker in list(self._workers.values()):
                self._end(worker)


@contextmanager
def _held_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until a worker is on the books (or off them)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _named(frame: Failed, worker: _Worker) -> ProbeManifestError:
    """The worker's error, with the rank in front."""
    kind = getattr(errors, frame.kind, EngineError)
    if not (isinstance(kind, type) and issubclass(kind, ProbeManifestError)):
        kind = EngineError
    error = kind(f"{worker.rank}: {frame.message}", hint=frame.hint)
    attach_log(error, str(worker.rank), worker.log, frame.traceback)
    return error
