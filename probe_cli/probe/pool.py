"""Jobs for many ranks in parallel: a forked process each, at most `jobs` at once, none left when `run_ranks` ends."""

from __future__ import annotations

import gc
import os
import selectors
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import BinaryIO, Generic, Protocol, TypeVar

from probe_cli import errors
from probe_cli.errors import EngineError, ProbeManifestError, UsageError
from probe_cli.probe.capture import attach_log
from probe_cli.probe.worker import Failed, Finished, Job, Progressed, decode_frames, run_worker
from probe_cli.topology import Rank

__all__ = ["Listener", "default_jobs", "run_ranks"]

_CHUNK = 1 << 20

R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)


class Listener(Protocol[R_contra]):
    """Who is told how it goes. Called in the parent, between reads of the workers' pipes."""

    def started(self, rank: Rank) -> None:
        """A worker for this rank was forked."""

    def progressed(self, rank: Rank, done: int, total: int) -> None:
        """This rank has done so much."""

    def finished(self, rank: Rank, result: R_contra) -> None:
        """This rank is done."""


def default_jobs(ranks: int) -> int:
    """As many workers as there are CPUs for this process, and no more than ranks."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cpus, ranks))


def run_ranks(
    ranks: Sequence[Rank],
    job: Job,
    decode: Callable[[bytes], R],
    *,
    jobs: int | None = None,
    listener: Listener[R] | None = None,
) -> list[R]:
    """Run `job` for each rank in a process of its own and give what `decode` makes of the results, in order.

    The first rank that fails stops the others; its error is raised with the rank's name in front. Whatever ends this
    call (an error, Ctrl-C, any other exception), no worker is left.
    """
    if not ranks:
        raise UsageError("no ranks to build")
    if not hasattr(os, "fork"):
        raise UsageError("building needs fork(), which this platform lacks", hint="build on Linux or macOS")
    gc.collect()
    # Objects of the parent are then never touched by a worker's collector: their pages stay shared.
    gc.freeze()
    pool = _Pool(job, decode, listener)
    try:
        return pool.run(ranks, jobs or default_jobs(len(ranks)))
    finally:
        pool.stop()
        gc.unfreeze()


@dataclass
class _Worker:
    rank: Rank
    pid: int
    pipe: int
    log: BinaryIO
    buffer: bytearray = field(default_factory=bytearray)
    reaped: bool = False


class _Pool(Generic[R]):
    def __init__(self, job: Job, decode: Callable[[bytes], R], listener: Listener[R] | None) -> None:
        self._job = job
        self._decode = decode
        self._listener = listener
        self._workers: dict[int, _Worker] = {}

    def run(self, ranks: Sequence[Rank], jobs: int) -> list[R]:
        results: dict[int, R] = {}
        waiting = list(reversed(ranks))
        with selectors.DefaultSelector() as selector:
            while waiting or self._workers:
                while waiting and len(self._workers) < jobs:
                    worker = self._start(waiting.pop())
                    selector.register(worker.pipe, selectors.EVENT_READ, worker)
                for key, _ in selector.select(timeout=1.0):
                    worker = key.data
                    finished = self._read(worker)
                    if finished is not None:
                        result = results[worker.rank.index] = self._decode(finished.result)
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
                run_worker(self._job, rank, pipe=writing, log=log.fileno(), parent=parent)
            worker = self._workers[pid] = _Worker(rank, pid, reading, log)
        os.close(writing)
        if self._listener is not None:
            self._listener.started(rank)
        return worker

    def _read(self, worker: _Worker) -> Finished | None:
        chunk = os.read(worker.pipe, _CHUNK)
        worker.buffer += chunk
        for frame in decode_frames(worker.buffer):
            if isinstance(frame, Progressed):
                if self._listener is not None:
                    self._listener.progressed(worker.rank, frame.done, frame.total)
            elif isinstance(frame, Finished):
                return frame
            else:
                raise _named(frame, worker)
        if not chunk:
            raise self._vanished(worker)
        return None

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
    prefix = f"{worker.rank}: "
    message = frame.message if frame.message.startswith(prefix) else prefix + frame.message
    error = kind(message, hint=frame.hint)
    attach_log(error, str(worker.rank), worker.log, frame.traceback)
    return error
