"""A wire file: what a trainer will send, as a JSON list of names, dtypes and shapes in order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from probe_cli.checkpoint.entries import MAX_NAME, MAX_RANK, size_in_bytes
from probe_cli.checkpoint.local import decode_text, read_text
from probe_cli.checkpoint.strict_json import Fault, Reader
from probe_cli.checkpoint.text import is_plain, quote
from probe_cli.checkpoint.types import Source
from probe_cli.dtypes import DTYPE_BITS
from probe_cli.errors import CheckpointError

__all__ = ["MAX_WIRE", "parse_dtype", "parse_wire", "read_wire"]

#: Bytes. 100,000 tensors take about 8 million.
MAX_WIRE = 64_000_000
_MAX_ENTRY = 16_384
_HINT = 'write [{"name": "model.embed_tokens.weight", "dtype": "BF16", "shape": [128, 64]}, ...]'

#: torch's spellings (torch 2.13); safetensors' own are in DTYPE_BITS.
_TORCH = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "short": "I16",
    "uint32": "U32",
    "int32": "I32",
    "int": "I32",
    "uint64": "U64",
    "int64": "I64",
    "long": "I64",
    "float16": "F16",
    "half": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float": "F32",
    "float64": "F64",
    "double": "F64",
    "complex64": "C64",
    "cfloat": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
#: Two elements in one byte: safetensors counts elements, torch counts pairs in the last dimension.
_TORCH_PAIRS = "float4_e2m1fn_x2"

#: name, dtype as spelled, shape.
_Row: TypeAlias = tuple[str, str, tuple[int, ...]]


class _Object(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


def read_wire(path: str | Path) -> tuple[Source, ...]:
    """The sources of a wire file, in order; "-" reads standard input. Raises CheckpointError."""
    if str(path) != "-":
        return parse_wire(read_text(Path(path), file=str(path), limit=MAX_WIRE), file=str(path))
    data = sys.stdin.buffer.read(MAX_WIRE + 1)
    if len(data) > MAX_WIRE:
        raise CheckpointError(f"standard input: has more than {MAX_WIRE:,} bytes, expected a list of tensors")
    return parse_wire(decode_text(data, file="standard input"), file="standard input")


def parse_wire(text: str, *, file: str) -> tuple[Source, ...]:
    """The sources of a wire document: a list of `{"name", "dtype", "shape"}` or `[name, dtype, shape]`."""
    rows = _rows_quickly(text)
    if rows is None:
        rows = _rows(text, file)
    if not rows:
        raise CheckpointError(f"{file}: is an empty list, expected at least one tensor", hint=_HINT)
    first: dict[str, int] = {}
    # Distinct (dtype, shape) pairs are few: judge each once.
    known: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...], int]] = {}
    sources = []
    for at, (name, dtype, shape) in enumerate(rows):
        if first.setdefault(name, at) != at:
            raise CheckpointError(f"{file}: entry {at}: {quote(name)} is entry {first[name]} already, expected it once")
        if len(name) > MAX_NAME or not is_plain(name):
            raise CheckpointError(
                f"{file}: entry {at}: name is {quote(name)}, expected at most {MAX_NAME:,} printable characters"
            )
        tensor = known.get((dtype, shape))
        if tensor is None:
            tensor = known[dtype, shape] = _tensor(dtype, shape, f"entry {at} ({quote(name)})", file)
        sources.append(Source(name, *tensor))
    return tuple(sources)


def parse_dtype(text: str) -> str | None:
    """The safetensors spelling of a dtype in safetensors' or torch's spelling ("BF16", "bfloat16",
    "torch.bfloat16"), or None."""
    spelled = text.upper()
    return spelled if spelled in DTYPE_BITS else _TORCH.get(text.removeprefix("torch."))


def _rows_quickly(text: str) -> list[_Row] | None:
    """The rows of a list in which every entry has the same form; None leaves the judgement to `_rows`."""
    quotes = text.count('"')
    if "\\" in text or text.count(",") > (MAX_RANK + 4) * (quotes // 4 + 1):
        return None
    try:
        if text[:64].lstrip()[1:].lstrip().startswith("["):
            return msgspec.json.decode(text, type=list[_Row])
        entries = msgspec.json.decode(text, type=list[_Object])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    # Without escapes quotes only delimit: more than ten for an entry mean that a key stands twice.
    return [(row.name, row.dtype, row.shape) for row in entries] if quotes == 10 * len(entries) else None


def _rows(text: str, file: str) -> list[_Row]:
    rows: list[_Row] = []
    reader = Reader(text)
    try:
        if reader.peek() != "[":
            raise Fault("expected a list of name, dtype and shape", reader.position)
        for at in reader.items():
            rows.append(_row(reader.value(_MAX_ENTRY), at, file))
        reader.end()
    except Fault as fault:
        where = f"{file}: entry {len(rows)}" if rows else file
        raise CheckpointError(f"{where}: at character {fault.position:,}: {fault}", hint=_HINT) from None
    return rows


def _row(entry: Any, at: int, file: str) -> _Row:
    where = f"{file}: entry {at}"
    if isinstance(entry, dict):
        missing = [field for field in ("name", "dtype", "shape") if field not in entry]
        if missing:
            raise CheckpointError(f"{where}: lacks {missing[0]!r}", hint=_HINT)
        name, dtype, shape = entry["name"], entry["dtype"], entry["shape"]
    elif isinstance(entry, list) and len(entry) == 3:
        name, dtype, shape = entry
    else:
        raise CheckpointError(f"{where}: is {quote(entry)}, expected name, dtype and shape", hint=_HINT)
    if not isinstance(name, str):
        raise CheckpointError(f"{where}: name is {quote(name)}, expected a string", hint=_HINT)
    if not isinstance(dtype, str):
        raise CheckpointError(f"{where}: dtype of {quote(name)} is {quote(dtype)}, expected a string", hint=_HINT)
    if not isinstance(shape, list) or any(type(size) is not int for size in shape):
        raise CheckpointError(f"{where}: shape of {quote(name)} is {quote(shape)}, expected a list of integers")
    return name, dtype, tuple(shape)


def _tensor(dtype: str, shape: tuple[int, ...], where: str, file: str) -> tuple[str, tuple[int, ...], int]:
    """dtype and shape as safetensors has them, and bytes."""
    if len(shape) > MAX_RANK or any(size < 0 for size in shape):
        raise CheckpointError(
            f"{file}: {where}: shape is {quote(list(shape))}, expected at most {MAX_RANK} integers of 0 or more"
        )
    spelled = parse_dtype(dtype)
    if dtype.removeprefix("torch.") == _TORCH_PAIRS and shape:
        spelled, shape = "F4", (*shape[:-1], 2 * shape[-1])
    if spelled is None:
        raise CheckpointError(
            f"{file}: {where}: dtype {quote(dtype)} is unknown, expected one of {', '.join(DTYPE_BITS)}",
            hint="torch's spellings are fine too: bfloat16 or torch.bfloat16",
        )
    return spelled, shape, size_in_bytes(spelled, shape, file, where)
