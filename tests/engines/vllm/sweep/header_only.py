"""Checkpoints without weights: `config.json` and safetensors files that are a header and nothing after it."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from probe_cli.dtypes import DTYPE_BITS

__all__ = ["DTYPES", "Entry", "entries_of", "write_checkpoint"]

#: (name, dtype as safetensors spells it, shape)
Entry = tuple[str, str, tuple[int, ...]]

DTYPES: dict[torch.dtype, str] = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


def entries_of(state: Mapping[str, torch.Tensor]) -> list[Entry]:
    return [(name, DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in state.items()]


def write_checkpoint(
    folder: Path, config: Mapping[str, Any] | None, entries: Iterable[Entry], *, ones: bool = False
) -> int:
    """Write a folder and say how many bytes of weights it stands for. `config=None` leaves config.json as it is.

    `ones` gives the file a body: zeros (a hole), and 1.0 in every F32 scalar.
    """
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {}
    at = 0
    scalars: list[int] = []
    for name, dtype, shape in entries:
        if dtype == "F32" and math.prod(shape) == 1:
            scalars.append(at)
        end = at + math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        if ones:
            for position in scalars:
                file.seek(8 + len(raw) + position)
                file.write(struct.pack("<f", 1.0))
            file.truncate(8 + len(raw) + at)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(dict(config), indent=1))
    return at
