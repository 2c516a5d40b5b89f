"""What engines print while they work, kept out of the command's own output and shown when something fails."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from probe_cli.errors import ProbeManifestError

__all__ = ["attach_log", "captured_output"]

_TAIL = 16 << 10


@contextmanager
def captured_output(what: str) -> Iterator[None]:
    """What is written to file descriptors 1 and 2 inside goes to a temporary file. An error of this package that leaves
    the block carries its tail as `error.log`."""
    with tempfile.TemporaryFile() as log:
        saved = []
        for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
            with suppress(OSError, ValueError):
                stream.flush()
            saved.append(_duplicate(descriptor))
        try:
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
            yield
        except ProbeManifestError as error:
            attach_log(error, what, log)
            raise
        finally:
            for descriptor, stream, original in ((1, sys.stdout, saved[0]), (2, sys.stderr, saved[1])):
                with suppress(OSError, ValueError):
                    stream.flush()
                if original is None:
                    os.close(descriptor)
                else:
                    os.dup2(original, descriptor)
                    os.close(original)


def _duplicate(descriptor: int) -> int | None:
    try:
        return os.dup(descriptor)
    except OSError:  # closed from the start
        return None


def attach_log(error: ProbeManifestError, what: str, log: BinaryIO, trace: str = "") -> None:
    """Add what was printed, and a traceback from another process, to an error; `--debug` shows it."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - _TAIL))
    printed = log.read().decode("utf-8", "replace").strip()
    parts = [getattr(error, "log", "")]
    parts += [f"--- {what}: {kind} ---\n{text}" for kind, text in (("printed", printed), ("raised", trace)) if text]
    error.log = "\n".join(part for part in parts if part)  # type: ignore[attr-defined]
