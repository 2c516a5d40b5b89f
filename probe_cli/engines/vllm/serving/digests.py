"""Digests of what a model's layers hold, for comparing a reloaded engine with a cold one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from probe_cli.reload.state import enterable, items_of

__all__ = ["differing", "live_digests"]

_DEPTH = 4

#: What serving writes to all the time, and no load does: caches, and LoRA's slots for adapters and requests.
_NOT_WEIGHTS = frozenset({"kv_cache", "lora_manager", "punica_wrapper", "lora_a_stacked", "lora_b_stacked"})


def live_digests(model: nn.Module) -> dict[str, str]:
    """Full name -> `dtype[shape] sha256` of every parameter and buffer, and of every tensor in plain attributes and helpers of
    layers (kernel objects, scales, workspaces)."""
    found: dict[str, str] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        for registered in (module._parameters, module._buffers):
            for local, tensor in registered.items():
                if tensor is not None:
                    found[prefix + local] = _digest(tensor)
        for path, tensor in _attributes(module, "", 0, seen):
            found.setdefault(prefix + path, _digest(tensor))
    return found


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Names whose digests differ, or that only one of two has."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _attributes(holder: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if id(holder) in seen:
        return
    seen.add(id(holder))
    for step, value in items_of(holder):
        if step in _NOT_WEIGHTS:
            continue
        where = f"{path}.{step}" if path and not step.startswith("[") else path + step
        if isinstance(value, torch.Tensor):
            yield where, value
        elif depth < _DEPTH and enterable(value):
            yield from _attributes(value, where, depth + 1, seen)


def _digest(tensor: torch.Tensor) -> str:
    kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.device.type == "meta":
        return f"{kind} meta"
    data = tensor.detach().contiguous().cpu().flatten()
    return f"{kind} {hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest()}"
