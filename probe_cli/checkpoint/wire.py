"""A wire file: what a trainer will send, as a JSON list of names, dtypes and shapes in order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from probe_cli.checkpoint.entries import MAX_NAME, MAX_RANK, size_in_bytes
from probe_cli.checkpoint.local import decode_text, read_text
from probe_cli.checkpoint.strict_json import Fault, loads
from probe_cli.checkpoint.text import is_plain, quote
from probe_cli.checkpoint.types import Source
from probe_cli.dtypes import DTYPE_BITS
from probe_cli.errors import CheckpointError

__all__ = ["MAX_WIRE", "parse_dtype", "parse_wire", "read_wire"]

MAX_WIRE = 200_000_000

#: torch's spellings (torch 2.13 `torch/_C/__init__.pyi`); safetensors' own are in DTYPE_BITS.
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
    "float4_e2m1fn_x2": "F4",
}


def read_wire(path: str | Path) -> tuple[Source, ...]:
    """The sources of a wire file, in order; "-" reads standard input. Raises CheckpointError."""
    if str(path) == "-":
        data = sys.stdin.buffer.read(MAX_WIRE + 1)
        if len(data) > MAX_WIRE:
            raise CheckpointError(f"standard input: has more than {MAX_WIRE:,} bytes, expected a list of names")
        return parse_wire(decode_text(data, file="standard input"), file="standard input")
    return parse_wire(read_text(Path(path), file=str(path), limit=MAX_WIRE), file=str(path))


def parse_wire(text: str, *, file: str) -> tuple[Source, ...]:
    """The sources of a wire document: a list of `{"name", "dtype", "shape"}` or `[name, dtype, shape]`."""
    try:
        document = loads(text)
    except Fault as fault:
        raise CheckpointError(f"{file}: {fault} (character {fault.position:,})", hint=_HINT) from None
    if not isinstance(document, list):
        raise CheckpointError(f"{file}: is not a list, expected a list of name, dtype and shape", hint=_HINT)
    if not document:
        raise CheckpointError(f"{file}: is an empty list, expected at least one tensor", hint=_HINT)
    seen: dict[str, int] = {}
    sources = []
    for at, entry in enumerate(document):
        source = _entry(entry, at, file)
        first = seen.setdefault(source.name, at)
        if first != at:
            raise CheckpointError(f"{file}: entry {at}: {quote(source.name)} stands at entry {first} already")
        sources.append(source)
    return tuple(sources)


def parse_dtype(text: str) -> str | None:
    """The safetensors spelling of a dtype in safetensors' or torch's spelling ("BF16", "bfloat16",
    "torch.bfloat16"), or None."""
    if text.upper() in DTYPE_BITS:
        return text.upper()
    return _TORCH.get(text.removeprefix("torch."))


_HINT = 'write [{"name": "model.embed_tokens.weight", "dtype": "BF16", "shape": [128, 64]}, ...]'


def _entry(entry: Any, at: int, file: str) -> Source:
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
    if not isinstance(name, str) or len(name) > MAX_NAME or not is_plain(name):
        raise CheckpointError(f"{where}: name is {quote(name)}, expected a tensor name", hint=_HINT)
    spelled = parse_dtype(dtype) if isinstance(dtype, str) else None
    if spelled is None:
        raise CheckpointError(
            f"{where}: dtype of {quote(name)} is {quote(dtype)}, expected one of {', '.join(DTYPE_BITS)}"
        )
    if not isinstance(shape, list) or len(shape) > MAX_RANK or any(type(n) is not int or n < 0 for n in shape):
        raise CheckpointError(
            f"{where}: shape of {quote(name)} is {quote(shape)}, expected at most {MAX_RANK} integers of 0 or more"
        )
    nbytes = size_in_bytes(spelled, tuple(shape), file, f"entry {at} ({quote(name)})")
    return Source(name=name, dtype=spelled, shape=tuple(shape), nbytes=nbytes)
