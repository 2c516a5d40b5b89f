"""Staging memory: one block of a fixed size, handed out in pieces and never outgrown."""

from __future__ import annotations

import torch

from probe_cli.errors import ReloadError
from probe_cli.reload.device import Device

__all__ = ["ALIGNMENT", "StagingPool"]

#: Pieces start at multiples of this many bytes: what device copies and vectorized kernels like best.
ALIGNMENT = 512


class StagingPool:
    """First fit over a block of `budget` bytes, which is allocated when it is first needed and kept until `close`."""

    def __init__(self, device: Device, budget: int) -> None:
        self.device = device
        self.budget = budget
        self.peak = 0
        self.used = 0
        self._block: torch.Tensor | None = None
        #: Free pieces as (offset, size), in order of offset, never adjacent.
        self._free: list[tuple[int, int]] = [(0, budget)]

    def take(self, nbytes: int) -> tuple[int, torch.Tensor] | None:
        """A piece of at least `nbytes` as (offset, bytes), None if none is free now."""
        size = padded(nbytes)
        for position, (offset, extent) in enumerate(self._free):
            if extent >= size:
                if extent == size:
                    del self._free[position]
                else:
                    self._free[position] = (offset + size, extent - size)
                self.used += size
                self.peak = max(self.peak, self.used)
                return offset, self._bytes()[offset : offset + size]
        return None

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return a piece that `take` handed out."""
        size = padded(nbytes)
        self.used -= size
        pieces = sorted([*self._free, (offset, size)])
        merged: list[tuple[int, int]] = []
        for start, extent in pieces:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + extent)
            elif merged and merged[-1][0] + merged[-1][1] > start:
                raise ReloadError(f"staging memory at {start} was returned twice")
            else:
                merged.append((start, extent))
        self._free = merged

    def lend(self) -> bool:
        """Leave the memory to the system while nothing uses it; True if it may be kept on that condition."""
        return self.used == 0 and self._block is not None and self.device.lend(self._block)

    def close(self) -> None:
        """Let go of the memory. Pieces still in use keep it alive."""
        self._block = None

    def _bytes(self) -> torch.Tensor:
        if self._block is None:
            with self.device.context():
                self._block = self.device.empty(self.budget)
        return self._block


def padded(nbytes: int) -> int:
    """Bytes that a piece takes in the pool."""
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
