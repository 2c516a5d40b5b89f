"""safetensors files written by hand: as they should be, and as they should not."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from probe_cli.dtypes import DTYPE_BITS

Tensors = Mapping[str, tuple[str, Sequence[int]]]


def framed(header: bytes | str, data: bytes = b"") -> bytes:
    """Length, header, data."""
    raw = header.encode() if isinstance(header, str) else header
    return len(raw).to_bytes(8, "little") + raw + data


def entries(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The header's JSON object for tensors that lie one after the other."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    return header


def data_of(tensors: Tensors) -> bytes:
    """Bytes that differ from place to place, as many as the tensors have."""
    size = sum(math.prod(shape) * DTYPE_BITS[dtype] // 8 for dtype, shape in tensors.values())
    return bytes(at * 7 % 251 for at in range(size))


def write(path: Path, tensors: Tensors, *, data: bool = True, metadata: Mapping[str, str] | None = None) -> Path:
    """A well-formed file, or its header alone."""
    header = json.dumps(entries(tensors, metadata), separators=(",", ":"))
    path.write_bytes(framed(header, data_of(tensors) if data else b""))
    return path


def write_sharded(root: Path, shards: Mapping[str, Tensors], *, data: bool = True) -> Path:
    """A folder with one file per shard and `model.safetensors.index.json`."""
    for file, tensors in shards.items():
        write(root / file, tensors, data=data)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return root
