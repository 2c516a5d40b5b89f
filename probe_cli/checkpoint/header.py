"""A safetensors header, read without trust: every field is checked before it is used.

Format (safetensors, `safetensors/src/tensor.rs`, 0.8): 8 bytes little-endian length, that many bytes of JSON starting
with `{`, padded with spaces, then the data. Offsets are relative to the data and tile it without gap or overlap.

The JSON is read entry by entry rather than by a JSON library, so that a duplicate key is seen, an error names its tensor, and
a hostile header costs no more memory than a good one of the same length.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from probe_cli.checkpoint.strict_json import MAX_ENTRY, Fault, parse_string, parse_string_map, parse_value
from probe_cli.checkpoint.text import is_plain, quote
from probe_cli.dtypes import DTYPE_BITS
from probe_cli.errors import CheckpointError

__all__ = ["LENGTH_BYTES", "MAX_HEADER", "MAX_NAME", "MAX_RANK", "Header", "TensorRecord", "header_length", "parse_header"]

LENGTH_BYTES = 8
#: `MAX_HEADER_SIZE` of the format.
MAX_HEADER = 100_000_000
#: Caps of ours, far above anything in use: characters of a tensor name, dimensions of a shape.
MAX_NAME = 2048
MAX_RANK = 64
_MAX_BYTES = 2**63 - 1

#: One entry as every known writer spells it. Anything else takes the slow road, with the same checks.
_ENTRY = re.compile(
    r'[ \t\r\n]*"([^"\\\x00-\x1f]*)"[ \t\r\n]*:[ \t\r\n]*\{[ \t\r\n]*'
    r'"dtype"[ \t\r\n]*:[ \t\r\n]*"([A-Z0-9_]{1,16})"[ \t\r\n]*,[ \t\r\n]*'
    r'"shape"[ \t\r\n]*:[ \t\r\n]*\[((?:(?:0|[1-9][0-9]{0,18})(?:,[ ]?|(?=\]))){0,64})\][ \t\r\n]*,[ \t\r\n]*'
    r'"data_offsets"[ \t\r\n]*:[ \t\r\n]*\[[ ]*(0|[1-9][0-9]{0,18}),[ ]?(0|[1-9][0-9]{0,18})\][ \t\r\n]*\}[ \t\r\n]*'
    r"([,}])"
)
_SPACE = re.compile(r"[ \t\r\n]*")
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})


class TensorRecord(msgspec.Struct, frozen=True, gc=False):
    """One tensor of one file; `start` and `end` are bytes from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Header(msgspec.Struct, frozen=True):
    """A checked header. Tensors are in offset order."""

    tensors: tuple[TensorRecord, ...]
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
            hint="the file is cut: download it again",
        )
    return length


def parse_header(raw: bytes, *, file: str) -> Header:
    """The header in `raw` (exactly length and JSON). Raises CheckpointError, which names the tensor at fault."""
    body = raw[LENGTH_BYTES:]
    if not body.startswith(b"{"):
        raise CheckpointError(f"{file}: header starts with {body[:1]!r}, expected '{{'", hint=_looks_like(raw))
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: header is not UTF-8 at byte {error.start + LENGTH_BYTES}") from None
    try:
        records, metadata = _entries(text, file)
    except Fault as fault:
        _fail(file, f"header at character {fault.position:,}: {fault}")
    data_start = len(raw)
    data_nbytes = _check_tiling(records, file)
    tensors = tuple(
        TensorRecord(name, dtype, shape, data_start + begin, data_start + end) for begin, end, name, dtype, shape in records
    )
    return Header(
        tensors=tensors,
        metadata=metadata,
        nbytes=data_start,
        data_nbytes=data_nbytes,
        digest="sha256:" + hashlib.sha256(raw).hexdigest(),
    )


#: begin, end, name, dtype, shape: sorts by offset.
_Record = tuple[int, int, str, str, tuple[int, ...]]


def _entries(text: str, file: str) -> tuple[list[_Record], dict[str, str]]:
    records: list[_Record] = []
    metadata: dict[str, str] | None = None
    seen: set[str] = set()
    shapes: dict[str, tuple[int, ...]] = {}
    position, size = 1, len(text)
    match = _ENTRY.match
    space = _SPACE.match

    def skip(at: int) -> int:
        found = space(text, at)
        return found.end() if found else at

    position = skip(position)
    more = position < size and text[position] != "}"
    if not more:
        position += 1
    while more:
        found = match(text, position)
        if found is not None and found.group(1) != "__metadata__":
            name, dtype, dims, begin, end, stop = found.groups()
            shape = shapes.get(dims)
            if shape is None:
                # A comma may not end the list, which the pattern alone lets pass.
                if dims.rstrip().endswith(","):
                    raise Fault("shape ends with a comma", found.start(3))
                shape = shapes[dims] = tuple(int(part) for part in dims.split(",") if part)
            _check_name(name, seen, file)
            records.append(_checked(name, dtype, shape, int(begin), int(end), file))
            position = found.end()
            more = stop == ","
            continue
        name, position = parse_string(text, skip(position), "a tensor name")
        position = skip(position)
        if text[position : position + 1] != ":":
            raise Fault(f"expected ':' after key {quote(name)}", position)
        position = skip(position + 1)
        if name == "__metadata__":
            if metadata is not None:
                _fail(file, "duplicate key '__metadata__'")
            metadata, position = parse_string_map(text, position, "__metadata__")
        else:
            _check_name(name, seen, file)
            try:
                value, position = parse_value(text, position, MAX_ENTRY)
            except Fault as fault:
                _fail(file, f"tensor {quote(name)}: {fault}")
            records.append(_untyped(name, value, file))
        position = skip(position)
        stop = text[position : position + 1]
        if stop not in (",", "}"):
            raise Fault("expected ',' or '}' " + ("before the end of the header" if not stop else f"after {quote(name)}"), position)
        position += 1
        more = stop == ","
    rest = skip(position)
    if rest < size or position > size:
        raise Fault("expected the end of the JSON object" if rest < size else "expected '}' before the end", rest)
    return records, metadata or {}


def _check_name(name: str, seen: set[str], file: str) -> None:
    if name in seen:
        _fail(file, f"tensor {quote(name)}: duplicate key")
    if len(name) > MAX_NAME:
        _fail(file, f"tensor {quote(name)}: name is longer than {MAX_NAME:,} characters")
    if not is_plain(name):
        _fail(file, f"tensor {quote(name)}: name has control characters")
    seen.add(name)


def _untyped(name: str, value: Any, file: str) -> _Record:
    """The record of an entry that came through the slow road: any JSON value."""
    where = f"tensor {quote(name)}"
    if not isinstance(value, dict):
        _fail(file, f"{where}: is {quote(value)}, expected an object with dtype, shape and data_offsets")
    if value.keys() != _FIELDS:
        missing = sorted(_FIELDS - value.keys())
        extra = sorted(value.keys() - _FIELDS)
        _fail(file, f"{where}: " + (f"lacks {missing[0]!r}" if missing else f"has the unknown field {quote(extra[0])}"))
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        _fail(file, f"{where}: dtype is {quote(dtype)}, expected a string")
    if not isinstance(shape, list):
        _fail(file, f"{where}: shape is {quote(shape)}, expected a list of integers")
    if len(shape) > MAX_RANK:
        _fail(file, f"{where}: shape has {len(shape):,} dimensions, expected at most {MAX_RANK}")
    for size in shape:
        if type(size) is not int or size < 0:
            _fail(file, f"{where}: shape has {quote(size)}, expected integers of 0 or more")
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(at) is not int or at < 0 for at in offsets):
        _fail(file, f"{where}: data_offsets is {quote(offsets)}, expected two integers of 0 or more")
    return _checked(name, dtype, tuple(shape), offsets[0], offsets[1], file)


def _checked(name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int, file: str) -> _Record:
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        _fail(
            file,
            f"tensor {quote(name)}: dtype {quote(dtype)} is unknown, expected one of {', '.join(DTYPE_BITS)}",
        )
    for size in shape:
        bits *= size
        # Every step, not the end alone: a later 0 must not hide an overflow, as in safetensors' own check.
        if bits > 8 * _MAX_BYTES:
            _fail(file, f"tensor {quote(name)}: shape {quote(list(shape))} overflows 2^63 bytes")
    if bits % 8:
        _fail(file, f"tensor {quote(name)}: shape {quote(list(shape))} of {dtype} is {bits:,} bits, expected whole bytes")
    if end - begin != bits // 8 or end > _MAX_BYTES:
        if end < begin:
            _fail(file, f"tensor {quote(name)}: data_offsets [{begin}, {end}] end before they begin")
        _fail(
            file,
            f"tensor {quote(name)}: data_offsets span {end - begin:,} bytes, "
            f"expected {bits // 8:,} for {dtype} {quote(list(shape))}",
        )
    return begin, end, name, dtype, shape


def _check_tiling(records: list[_Record], file: str) -> int:
    """Sort by offset; the bytes of data that the tensors tile. Raises on the first gap or overlap."""
    records.sort()
    at = 0
    before = ""
    for begin, end, name, _, _ in records:
        if begin != at:
            what = f"overlaps {quote(before)}" if begin < at else "leaves a gap"
            _fail(file, f"tensor {quote(name)}: data_offsets begin at {begin:,}, expected {at:,}: {what}")
        at = end
        before = name
    return at


def _looks_like(prefix: bytes) -> str:
    if prefix.startswith(b"PK\x03\x04"):
        return "this is a zip archive, as torch.save writes it: convert it to safetensors"
    if prefix.startswith(b"GGUF"):
        return "this is a GGUF file: open the safetensors original"
    if prefix.lstrip()[:1] == b"<":
        return "this looks like an HTML page: the download went wrong"
    if prefix.lstrip()[:1] in (b"{", b"["):
        return "this looks like a JSON file: give names and shapes with --wire"
    return "this is not a safetensors file, or it is damaged"


def _fail(file: str, message: str, hint: str = "the header is damaged or hostile: write the file again") -> NoReturn:
    raise CheckpointError(f"{file}: {message}", hint=hint)
