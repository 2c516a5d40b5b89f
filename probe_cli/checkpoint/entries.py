"""The entries of a safetensors header, one by one.

The JSON is read entry by entry rather than by a JSON library, so that a duplicate key is seen, an error names its
tensor, and a hostile header costs no more memory than a good one of the same length. `quick.py` is the fast road for
headers that need none of this.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeAlias

from probe_cli.checkpoint.strict_json import Fault, Reader
from probe_cli.checkpoint.text import is_plain, quote
from probe_cli.dtypes import DTYPE_BITS
from probe_cli.errors import CheckpointError

__all__ = [
    "MAX_METADATA",
    "MAX_NAME",
    "MAX_RANK",
    "MAX_TENSORS",
    "METADATA",
    "Record",
    "fail",
    "parse_entries",
    "size_in_bytes",
]

METADATA = "__metadata__"
#: Caps of ours, far above anything in use: characters of a tensor name, dimensions of a shape, tensors of a file and
#: keys of its metadata.
MAX_NAME = 2048
MAX_RANK = 64
MAX_TENSORS = 1_000_000
MAX_METADATA = 100_000
_MAX_ENTRY = 16_384
_MAX_BITS = 8 * (2**63 - 1)
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})

#: begin, end (relative to the data), name, dtype, shape. A plain tuple: a checkpoint has 100,000 of them.
Record: TypeAlias = tuple[int, int, str, str, tuple[int, ...]]


def parse_entries(text: str, *, file: str) -> tuple[list[Record], dict[str, str]]:
    """Records in the order of the JSON text, and `__metadata__`. Raises CheckpointError."""
    records: list[Record] = []
    metadata: dict[str, str] = {}
    reader = Reader(text)
    try:
        for name in reader.members("the header"):
            if name == METADATA:
                metadata = reader.string_map(METADATA, MAX_METADATA)
            else:
                if len(records) == MAX_TENSORS:
                    raise Fault(f"more than {MAX_TENSORS:,} tensors in one file", reader.position)
                records.append(_entry(name, reader, file))
        reader.end()
    except Fault as fault:
        fail(file, f"header at character {fault.position:,}: {fault}")
    return records, metadata


def _entry(name: str, reader: Reader, file: str) -> Record:
    where = f"tensor {quote(name)}"
    if len(name) > MAX_NAME:
        fail(file, f"{where}: name is longer than {MAX_NAME:,} characters")
    if not is_plain(name):
        fail(file, f"{where}: name has control characters")
    try:
        value = reader.value(_MAX_ENTRY)
    except Fault as fault:
        fail(file, f"{where}: {fault}")
    if not isinstance(value, dict):
        fail(file, f"{where}: is {quote(value)}, expected an object with dtype, shape and data_offsets")
    if value.keys() != _FIELDS:
        missing = sorted(_FIELDS - value.keys())
        extra = sorted(value.keys() - _FIELDS)
        fail(file, f"{where}: " + (f"lacks {missing[0]!r}" if missing else f"has the unknown field {quote(extra[0])}"))
    dtype, shape, offsets = value["dtype"], _shape(value["shape"], where, file), value["data_offsets"]
    if not isinstance(dtype, str):
        fail(file, f"{where}: dtype is {quote(dtype)}, expected a string")
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(at) is not int or at < 0 for at in offsets):
        fail(file, f"{where}: data_offsets is {quote(offsets)}, expected two integers of 0 or more")
    begin, end = offsets
    nbytes = size_in_bytes(dtype, shape, file, where)
    if end < begin:
        fail(file, f"{where}: data_offsets {quote(offsets)} end before they begin")
    if end - begin != nbytes:
        span = f"data_offsets {quote(offsets)} span {quote(end - begin)} bytes"
        fail(file, f"{where}: {span}, expected {nbytes} for {dtype} of shape {quote(list(shape))}")
    return begin, end, name, dtype, shape


def _shape(value: Any, where: str, file: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        fail(file, f"{where}: shape is {quote(value)}, expected a list of integers")
    if len(value) > MAX_RANK:
        fail(file, f"{where}: shape has {len(value):,} dimensions, expected at most {MAX_RANK}")
    for size in value:
        if type(size) is not int or size < 0:
            fail(file, f"{where}: shape has {quote(size)}, expected integers of 0 or more")
    return tuple(value)


def size_in_bytes(dtype: str, shape: tuple[int, ...], file: str, where: str) -> int:
    """Bytes of a tensor. Raises CheckpointError: unknown dtype, overflow, or part of a byte."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        fail(file, f"{where}: dtype {quote(dtype)} is unknown, expected one of {', '.join(DTYPE_BITS)}")
    for size in shape:
        bits *= size
        # At every step, not at the end alone: a later 0 must not hide an overflow.
        if bits > _MAX_BITS:
            fail(file, f"{where}: shape {quote(list(shape))} of {dtype} overflows 2^63 bytes")
    if bits % 8:
        fail(file, f"{where}: shape {quote(list(shape))} of {dtype} is {bits:,} bits, expected whole bytes")
    return bits // 8


def fail(file: str, message: str, hint: str = "the header is damaged or hostile: write the file again") -> NoReturn:
    """Raise the one-line error about a header."""
    raise CheckpointError(f"{file}: {message}", hint=hint)
