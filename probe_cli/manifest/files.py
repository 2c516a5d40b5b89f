"""Manifest files on disk: bounded reading of text and gzip, atomic and reproducible writing."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import zlib
from pathlib import Path

from probe_cli.errors import ManifestError

__all__ = ["MAX_TEXT_BYTES", "compress", "decompress", "is_manifest_name", "read_text", "sync_directory", "write_bytes"]

#: Most bytes of JSON that a manifest file may hold. A rank of 150,000 applications needs a third of it.
MAX_TEXT_BYTES = 128 << 20

_GZIP_MAGIC = b"\x1f\x8b"
_LEVEL = 9


def is_manifest_name(name: str) -> bool:
    return name.endswith((".json", ".json.gz"))


def compress(text: bytes) -> bytes:
    """Gzip with no name and no time in its header: the same text gives the same bytes."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = packer.compress(text) + packer.flush()
    header = _GZIP_MAGIC + b"\x08\x00" + b"\x00\x00\x00\x00" + b"\x02\xff"
    return header + body + zlib.crc32(text).to_bytes(4, "little") + (len(text) & 0xFFFFFFFF).to_bytes(4, "little")


def decompress(data: bytes, where: str, limit: int = MAX_TEXT_BYTES) -> bytes:
    """The text of a gzip file of one member, never more than `limit` bytes of it. Raises ManifestError if it is
    larger, cut short, damaged, or followed by anything."""
    unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        text = unpacker.decompress(data, limit + 1)
    except zlib.error as error:
        raise ManifestError(f"{where}: damaged gzip data ({error})") from None
    if len(text) > limit:
        raise ManifestError(f"{where}: unpacks to more than {limit:,} bytes, the most a manifest may hold")
    if not unpacker.eof:
        raise ManifestError(f"{where}: the gzip data ends early; the file was cut short")
    if unpacker.unused_data:
        raise ManifestError(f"{where}: {len(unpacker.unused_data):,} bytes follow the gzip data, expected none")
    return text


def read_text(path: Path, limit: int = MAX_TEXT_BYTES) -> bytes:
    """The JSON text of a manifest file, plain or gzip (told by its first bytes, whatever its name). Raises
    ManifestError."""
    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ManifestError(f"{path}: is not a regular file, expected a manifest")
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise ManifestError(f"{path}: no such file") from None
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read ({error.strerror or error})") from None
    if len(data) > limit:
        raise ManifestError(f"{path}: larger than {limit:,} bytes, the most a manifest may hold")
    if not data:
        raise ManifestError(f"{path}: the file is empty, expected a manifest")
    if data.startswith(b"version https://git-lfs"):
        raise ManifestError(
            f"{path}: is a Git LFS pointer, expected a manifest",
            hint="the file was not downloaded: run `git lfs pull` (actions/checkout: lfs: true)",
        )
    return decompress(data, str(path), limit) if data.startswith(_GZIP_MAGIC) else data


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part. Raises ManifestError."""
    target = Path(os.path.realpath(path))  # a link stays a link
    temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}.tmp")
    try:
        if target.exists() and not target.is_file():
            raise FileExistsError(errno.EEXIST, "not a regular file")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_directory(target.parent)
    except OSError as error:
        raise ManifestError(f"{path}: cannot be written ({error.strerror or error})") from None


def sync_directory(path: Path) -> None:
    """Make a rename in this directory survive a power cut; file systems that cannot are left alone."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
