"""The memory behind a tensor: which storage it is, and which bytes of it a tensor reaches."""

from __future__ import annotations

import torch

__all__ = ["byte_range", "storage_key"]


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the storage behind a tensor: equal for all views of one storage, while that storage lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of its storage that a tensor can touch, and the byte after the last; an empty range without elements."""
    size = tensor.dtype.itemsize
    start = int(tensor.storage_offset()) * size
    if tensor.numel() == 0:
        return start, start
    reach = 1 + sum((int(length) - 1) * int(step) for length, step in zip(tensor.shape, tensor.stride()))
    return start, start + reach * size
