"""Files on disk: open without following surprises, read the header, know later whether the file changed."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

from probe_cli.checkpoint.header import LENGTH_BYTES, Header, header_length, parse_header
from probe_cli.errors import CheckpointError

__all__ = ["Stamp", "read_header", "read_range", "read_text"]


class Stamp(NamedTuple):
    """What tells one state of a file from another."""

    device: int
    inode: int
    size: int
    modified_ns: int


def read_header(path: Path, *, file: str) -> tuple[Header, bool, Stamp]:
    """The checked header of a file, whether its data is there, and its stamp.

    A file that ends right after its header is a header-only file: whole, but without data. One that has part of its
    data is refused. `file` is the name for messages. Raises CheckpointError.
    """
    descriptor, before = _open(path, file)
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        prefix = _read(stream.fileno(), 0, LENGTH_BYTES)
        length = header_length(prefix, before.size, file=file)
        raw = prefix + _read(stream.fileno(), LENGTH_BYTES, length)
        after = _stamp(os.fstat(stream.fileno()))
    if after != before or len(raw) != LENGTH_BYTES + length:
        raise _changed(file)
    header = parse_header(raw, file=file)
    if before.size not in (header.nbytes, header.file_size):
        missing = header.file_size - before.size
        if missing > 0:
            raise CheckpointError(
                f"{file}: is truncated: has {before.size:,} bytes, expected {header.file_size:,} by its header",
                hint="download it again; a file with its header alone is accepted, part of the data is not",
            )
        raise CheckpointError(
            f"{file}: has {-missing:,} bytes after its data, expected {header.file_size:,} bytes by its header",
            hint="the file is damaged or was written by two writers: write it again",
        )
    return header, before.size == header.file_size, before


def read_range(path: Path, start: int, end: int, *, file: str, stamp: Stamp) -> bytes:
    """Bytes `start` to `end` of a file. Raises CheckpointError if it is not the file that `stamp` was taken of."""
    descriptor, now = _open(path, file)
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        if now != stamp:
            raise _changed(file)
        data = _read(stream.fileno(), start, end - start)
        if _stamp(os.fstat(stream.fileno())) != stamp or len(data) != end - start:
            raise _changed(file)
    return data


def read_text(path: Path, *, file: str, limit: int) -> str:
    """A JSON file's text. Raises CheckpointError if it is absent, a Git LFS pointer, too large or not UTF-8."""
    descriptor, stamp = _open(path, file)
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        if stamp.size > limit:
            raise CheckpointError(f"{file}: has {stamp.size:,} bytes, expected at most {limit:,}")
        data = _read(stream.fileno(), 0, stamp.size)
    return decode_text(data, file=file)


def decode_text(data: bytes, *, file: str) -> str:
    """UTF-8 text of a JSON file. Raises CheckpointError."""
    if data.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{file}: is a Git LFS pointer, expected JSON",
            hint="the file was not downloaded: run `git lfs pull` in that folder",
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: is not UTF-8 at byte {error.start:,}, expected JSON") from None


def _open(path: Path, file: str) -> tuple[int, Stamp]:
    try:
        # O_NONBLOCK: a named pipe in a checkpoint folder must not hang the reader.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(
                f"{file}: is a broken link to {os.readlink(path)!r}, expected a file",
                hint="download the file again, or copy the folder with its links resolved (cp -L)",
            ) from None
        raise CheckpointError(f"{file}: no such file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{file}: cannot be opened: {reason}") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{file}: is not a regular file")
    return descriptor, _stamp(status)


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _read(descriptor: int, start: int, count: int) -> bytes:
    parts: list[bytes] = []
    while count > 0:
        part = os.pread(descriptor, count, start)
        if not part:
            break
        parts.append(part)
        start += len(part)
        count -= len(part)
    return b"".join(parts)


def _changed(file: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: changed while it was being read, expected the file as it was when the checkpoint was opened",
        hint="wait until the writer is done, then run again",
    )
