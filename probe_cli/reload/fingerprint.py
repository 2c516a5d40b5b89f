"""Whether the values of a model's tensors have changed, whoever changed them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from probe_cli.model.inventory import Inventory, OwnedTensor
from probe_cli.model.storage import byte_range, storage_key

__all__ = ["Fingerprints"]

_Print = tuple[torch.dtype, tuple[int, ...], int, int]


class Fingerprints:
    """Of every tensor of a model at one moment: two sums over its bytes, read once, where the tensor is."""

    def __init__(self, inventory: Inventory) -> None:
        self._before = {owned.full_name: (owned, _fingerprint(owned.tensor)) for owned in inventory.tensors()}

    def changed(self, now: Inventory, accounted: set[str]) -> list[str]:
        """Full names of tensors whose values are others now, in model order, but for those that are, or share memory
        with, one of `accounted`. A buffer that was registered anew does not count: models make them while they load."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        for owned in now.tensors():
            if owned.full_name in accounted:
                ranges.setdefault(storage_key(owned.tensor), []).append(byte_range(owned.tensor))
        return [
            owned.full_name
            for owned in now.tensors()
            if not _reaches(owned.tensor, ranges.get(storage_key(owned.tensor), ())) and self._differs(owned)
        ]

    def _differs(self, owned: OwnedTensor) -> bool:
        before, value = self._before.get(owned.full_name, (owned, None))
        if value is None or (owned.kind == "buffer" and owned.tensor is not before.tensor):
            return False
        now = _fingerprint(owned.tensor)
        return now is not None and now != value


def _reaches(tensor: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> bool:
    start, end = byte_range(tensor)
    return any(low < end and start < high for low, high in ranges)


def _fingerprint(tensor: torch.Tensor) -> _Print | None:
    """None where there are no values to read."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        if tensor.device.type == "meta" or tensor.layout is not torch.strided or tensor.is_quantized:
            return None
        if tensor.numel() == 0:
            return None
        data = tensor.detach()
        offset = data.storage_offset() * data.dtype.itemsize
        if not data.is_contiguous() or offset % 8 or data.data_ptr() % 8:
            data = data.clone(memory_format=torch.contiguous_format)
        raw = data.reshape(-1).view(torch.uint8)
        whole = raw.numel() // 8 * 8
        # Integer sums wrap around and do not depend on the order of summation.
        words = raw[:whole].view(torch.int64)
        rest = int(raw[whole:].sum())
        return tensor.dtype, tuple(tensor.shape), int(words.sum()) + rest, int(words[::3].sum())
