"""The seam to the device: everything the runtime does differently on CUDA stands here, so the rest runs on any
device."""

from __future__ import annotations

import ctypes
import sys
import time
from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["CpuDevice", "CudaDevice", "Device", "device_of"]


class Device:
    """One device and how memory moves between it and the host. The base class is right for any device without
    streams."""

    #: Spilled tensors live on another device than staged ones, so they need tensor objects of their own.
    host_is_apart = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, nbytes: int) -> torch.Tensor:
        """Uninitialized device memory, one byte an element."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def lend(self, memory: torch.Tensor) -> bool:
        """Whether device memory that is not in use may be held all the same, since the system takes it when it needs
        it. Its contents are lost."""
        return False

    def host_empty(self, nbytes: int) -> torch.Tensor:
        """Uninitialized host memory that this device copies from and to fast."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy device bytes to host memory; `source` may be reused for work that is enqueued afterwards."""
        target.copy_(source)

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy host bytes to device memory, ready for work that is enqueued afterwards."""
        target.copy_(source)

    def release_host(self, buffer: torch.Tensor) -> None:
        """Host memory is no longer needed by the caller; pending copies may still read it."""

    def synchronize(self) -> None:
        """Wait for all work on the device."""

    def context(self) -> AbstractContextManager[object]:
        """Makes this the current device."""
        return nullcontext()

    def clock(self) -> float:
        """Seconds, for durations; does not wait for the device."""
        return time.perf_counter()


class CpuDevice(Device):
    """Host memory all the way: a spilled layer only leaves the staging budget."""

    host_is_apart = False

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def empty(self, nbytes: int) -> torch.Tensor:
        memory = super().empty(nbytes)
        _advise(memory, _MADV_HUGEPAGE)
        return memory

    def lend(self, memory: torch.Tensor) -> bool:
        return _advise(memory, _MADV_FREE)


class CudaDevice(Device):
    """Spills go to pinned memory on a side stream, so that they overlap with loading and processing.

    Both directions are ordered against the current stream by events. A spilled buffer is kept until its copy is done.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._side = torch.cuda.Stream(device)
        #: Host buffers whose last copy may be in flight, with the event that ends it.
        self._pending: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def host_empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> None:
        main = torch.cuda.current_stream(self.device)
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
        # The arena hands `source` out again at once: later work on the main stream must come after this copy.
        done = self._side.record_event()
        main.wait_event(done)
        # Loaders write to `target` from the host next, so the bytes have to be there.
        done.synchronize()

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> None:
        main = torch.cuda.current_stream(self.device)
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
        done = self._side.record_event()
        main.wait_event(done)
        self._pending.append((source, done))

    def release_host(self, buffer: torch.Tensor) -> None:
        event = torch.cuda.current_stream(self.device).record_event()
        self._pending.append((buffer, event))
        self._pending = [(kept, done) for kept, done in self._pending if not done.query()]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
        self._pending.clear()

    def context(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device)


def _advise(memory: torch.Tensor, advice: int) -> bool:
    """Tell Linux how whole huge pages of host memory will be used; False where it does not take advice."""
    start = -(-memory.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    length = (memory.data_ptr() + memory.nbytes - start) // _HUGE_PAGE * _HUGE_PAGE
    if not sys.platform.startswith("linux") or length <= 0:
        return False
    try:
        failed = ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)
    except (OSError, AttributeError):  # without it all is only slower
        return False
    return not failed


_HUGE_PAGE = 1 << 21
#: Touching fresh memory a small page at a time costs as much as the copy into it.
_MADV_HUGEPAGE = 14
#: The pages stay until the system is short of memory (Linux 4.5): touching fresh ones costs time at every update.
_MADV_FREE = 8


def device_of(device: torch.device) -> Device:
    """The seam for a device."""
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        return CudaDevice(device)
    return Device(device)
