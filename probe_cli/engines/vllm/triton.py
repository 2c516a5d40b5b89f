"""Triton's driver, stood in for: it answers what a module asks at its import, and launches nothing."""

from __future__ import annotations

from typing import Any

from probe_cli.engines.vllm.targets import Target

__all__ = ["answer_for_triton"]


def answer_for_triton(target: Target) -> None:
    """Make Triton (3.x) believe in the target: its own driver looks for the device's library and compiles a helper."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    emulated: Any = _Driver(GPUTarget("cuda", target.capability[0] * 10 + target.capability[1], 32), target)
    driver._default = emulated
    driver.set_active(emulated)


class _Driver:
    """`triton.backends.nvidia.driver.CudaDriver`, as far as it is asked without a launch."""

    def __init__(self, gpu: Any, target: Target) -> None:
        self._gpu = gpu
        self.utils = _Utils(target)

    def get_current_target(self) -> Any:
        return self._gpu

    def get_current_device(self) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(int(self._gpu.arch), 10)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)


class _Utils:
    def __init__(self, target: Target) -> None:
        self._target = target

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._target.shared_memory,
            "max_num_regs": 65536,
            "multiprocessor_count": self._target.multiprocessors,
            "warpSize": 32,
        }
