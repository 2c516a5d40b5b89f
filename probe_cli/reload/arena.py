"""Storage for what post-processing computes that stays where it is over reloads (the idea of vLLM pull request 49789).

workspace = arena.get_or_alloc(layer, "workspace", Spec.like(x))    # the same tensor after every reload
layer.packed = arena.put(layer, "packed", pack(layer.weight))       # new values, old address
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from probe_cli.errors import ReloadError

__all__ = ["Arena", "Spec"]


@dataclass(frozen=True)
class Spec:
    """What a slot holds. `stride` None means contiguous."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    stride: tuple[int, ...] | None = None

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Spec:
        """The spec of a tensor."""
        stride = None if tensor.is_contiguous() else tuple(tensor.stride())
        return cls(tensor.dtype, tuple(tensor.shape), tensor.device, stride)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"


class Arena:
    """Slots by layer and name. A slot lives as long as its layer does."""

    def __init__(self) -> None:
        self._slots: WeakKeyDictionary[nn.Module, dict[str, torch.Tensor]] = WeakKeyDictionary()

    def get_or_alloc(self, layer: nn.Module, slot: str, spec: Spec) -> torch.Tensor:
        """The tensor of a slot; uninitialized the first time. Raises ReloadError if the slot holds another spec,
        since a captured graph reads the old one."""
        slots = self._slots.setdefault(layer, {})
        tensor = slots.get(slot)
        if tensor is None:
            if spec.stride is None:
                tensor = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
            else:
                tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
            slots[slot] = tensor
        elif Spec.like(tensor) != spec:
            raise ReloadError(
                f"arena slot {slot!r} of {type(layer).__name__} holds {Spec.like(tensor)}, asked for {spec}",
                hint="drop the slot first if nothing has captured its address",
            )
        return tensor

    def put(self, layer: nn.Module, slot: str, value: torch.Tensor) -> torch.Tensor:
        """Copy a value into its slot and give the slot's tensor."""
        tensor = self.get_or_alloc(layer, slot, Spec.like(value))
        if tensor is not value:
            with torch.no_grad():
                tensor.copy_(value)
        return tensor

    def drop(self, layer: nn.Module, slot: str) -> None:
        """Forget a slot; its tensor lives on with whoever holds it."""
        self._slots.get(layer, {}).pop(slot, None)

    @property
    def nbytes(self) -> int:
        """Bytes that all slots hold."""
        return sum(t.numel() * t.element_size() for slots in self._slots.values() for t in slots.values())
