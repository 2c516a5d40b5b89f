"""A safetensors header, read without trust: every field is checked before it is used.

Format (safetensors 0.8, `safetensors/src/tensor.rs`): 8 bytes little-endian length, that many bytes of JSON starting
with `{` and padded with spaces, then the data. Offsets are relative to the data and tile it without gap or overlap.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from probe_cli.checkpoint.entries import Record, fail, parse_entries
from probe_cli.checkpoint.quick import parse_quickly
from probe_cli.checkpoint.text import quote
from probe_cli.errors import CheckpointError

__all__ = ["LENGTH_BYTES", "MAX_HEADER", "Header", "header_length", "parse_header"]

LENGTH_BYTES = 8
#: `MAX_HEADER_SIZE` of the format: bytes of JSON.
MAX_HEADER = 100_000_000
_MAX_FILE = 2**63 - 1


class Header(NamedTuple):
    """A checked header. Records are in offset order, their offsets relative to the data."""

    records: list[Record]
    metadata: Mapping[str, str]
    #: Bytes of length and JSON together: where the data starts.
    nbytes: int
    #: Bytes of data that the header promises.
    data_nbytes: int
    #: "sha256:" over length and JSON.
    digest: str

    @property
    def file_size(self) -> int:
        """Bytes of a file with this header and all of its data."""
        return self.nbytes + self.data_nbytes


def header_length(prefix: bytes, available: int, *, file: str) -> int:
    """Bytes of JSON that the first 8 bytes of a file announce.

    `available` is the size of the whole file. Raises CheckpointError if this cannot be a safetensors header.
    """
    if prefix.startswith(b"version "):
        raise CheckpointError(
            f"{file}: is a Git LFS pointer, expected a safetensors file",
            hint="the weights were not downloaded: run `git lfs pull` in that folder",
        )
    if len(prefix) < LENGTH_BYTES:
        raise CheckpointError(
            f"{file}: has {available} bytes, expected at least the {LENGTH_BYTES} bytes of a header length",
            hint="the file is empty or cut: download it again",
        )
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > MAX_HEADER or length < 2:
        raise CheckpointError(
            f"{file}: header length is {length:,} bytes, expected 2 to {MAX_HEADER:,}", hint=_looks_like(prefix)
        )
    if length + LENGTH_BYTES > available:
        raise CheckpointError(
            f"{file}: header length is {length:,} bytes, but the file ends after {available:,} bytes",
            hint=_looks_like(prefix, "the file is cut: download it again"),
        )
    return length


def parse_header(raw: bytes, *, file: str) -> Header:
    """The header in `raw` (exactly length and JSON). Raises CheckpointError, which names the tensor at fault."""
    if raw[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
        fail(file, f"header starts with {raw[LENGTH_BYTES : LENGTH_BYTES + 1]!r}, expected b'{{'", _looks_like(raw))
    body = raw[LENGTH_BYTES:]
    parsed = parse_quickly(body)
    if parsed is None:
        try:
            text = body.decode("utf-8")
        except UnicodeDecodeError as error:
            fail(file, f"header is not UTF-8 at byte {error.start + LENGTH_BYTES:,}")
        parsed = parse_entries(text, file=file)
    records, metadata = parsed
    data_nbytes = _check_tiling(records, file)
    return Header(records, metadata, len(raw), data_nbytes, "sha256:" + hashlib.sha256(raw).hexdigest())


def _check_tiling(records: list[Record], file: str) -> int:
    """Sort by offset, and return the bytes that the tensors tile. Raises on the first gap or overlap."""
    records.sort()
    at = 0
    before = ""
    for begin, end, name, _, _ in records:
        if begin != at:
            what = f"overlaps {quote(before)}" if begin < at else "leaves a gap"
            fail(file, f"tensor {quote(name)}: data_offsets begin at {quote(begin)}, expected {at}: {what}")
        at = end
        before = name
    if at > _MAX_FILE:
        fail(file, "data is larger than 2^63 bytes")
    return at


def _looks_like(prefix: bytes, otherwise: str = "this is not a safetensors file, or it is damaged") -> str:
    if prefix.startswith(b"PK\x03\x04"):
        return "this is a zip archive, as torch.save writes it: convert it to safetensors"
    if prefix.startswith(b"GGUF"):
        return "this is a GGUF file: open the safetensors original"
    if prefix.lstrip()[:1] == b"<":
        return "this looks like an HTML page: the download went wrong"
    if prefix.lstrip()[:1] in (b"{", b"["):
        return "this looks like a JSON file: give names and shapes as a wire file"
    return otherwise
