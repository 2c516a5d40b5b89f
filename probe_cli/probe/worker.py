"""One rank's work in a process of its own: what runs after the fork, and the frames it sends back.

A frame is a length (4 bytes, little-endian) and a MessagePack object of one of the types below.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import msgspec
import torch

from probe_cli.errors import ProbeManifestError, described, one_line
from probe_cli.topology import Rank

__all__ = ["Failed", "Finished", "Frame", "Job", "Progressed", "decode_frames", "run_worker"]

#: What a worker does: from a rank, and a function to report (done, total) with, to the bytes of its result.
Job: TypeAlias = Callable[[Rank, Callable[[int, int], None]], bytes]

_LENGTH = struct.Struct("<I")
_SECONDS_BETWEEN_REPORTS = 0.1
_PR_SET_PDEATHSIG = 1


class Progressed(msgspec.Struct, tag="progress", array_like=True):
    """How far the replay is: sources fed, and sources in all."""

    done: int
    total: int


class Finished(msgspec.Struct, tag="finished", array_like=True):
    """The rank's result, in whatever form the job and its caller agree on."""

    result: bytes


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The rank's error: class name, text, hint, and the traceback for --debug."""

    kind: str
    message: str
    hint: str | None
    traceback: str


Frame: TypeAlias = Progressed | Finished | Failed

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Frame)


def decode_frames(buffer: bytearray) -> list[Frame]:
    """The complete frames at the start of a buffer, which is left with the rest."""
    frames: list[Frame] = []
    start = 0
    while len(buffer) - start >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer, start)
        stop = start + _LENGTH.size + length
        if stop > len(buffer):
            break
        frames.append(_decoder.decode(memoryview(buffer)[start + _LENGTH.size : stop].tobytes()))
        start = stop
    del buffer[:start]
    return frames


def run_worker(job: Job, rank: Rank, *, pipe: int, log: int, parent: int) -> NoReturn:
    """The whole life of a forked worker. Never returns: the caller's stack belongs to the parent."""
    code = 1
    try:
        _settle(log, parent)
        try:
            frame: Frame = Finished(job(rank, _reporter(pipe)))
            code = 0
        except BaseException as error:
            frame = _failure(error)
        _send(pipe, frame)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _settle(log: int, parent: int) -> None:
    """Signals, output and threads of a worker."""
    # Ctrl-C reaches the whole foreground group: the parent decides what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        # A parent that is killed outright must not leave workers behind.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    # Engines log to stdout, which is for results.
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(os.dup(log), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    # Thread pools do not survive a fork, and meta tensors need none.
    torch.set_num_threads(1)


def _reporter(pipe: int) -> Callable[[int, int], None]:
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_REPORTS:
            last = now
            _send(pipe, Progressed(done, total))

    return report


def _failure(error: BaseException) -> Failed:
    return Failed(
        kind=type(error).__name__,
        message=one_line(error) if isinstance(error, ProbeManifestError) else described(error),
        hint=error.hint if isinstance(error, ProbeManifestError) else None,
        traceback="".join(traceback.format_exception(error)),
    )


def _send(pipe: int, frame: Frame) -> None:
    body = _encoder.encode(frame)
    data = memoryview(_LENGTH.pack(len(body)) + body)
    while data:
        data = data[os.write(pipe, data) :]
