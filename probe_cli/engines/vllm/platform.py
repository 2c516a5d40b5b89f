"""Make the CUDA build of vLLM believe in a device that is not there.

`emulate` runs before vLLM is imported. From then on every question about the device is answered from `targets.py`, and no CUDA
call is made. `docs/engines.md` lists the answers.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from probe_cli.engines.vllm.stub import load_stub
from probe_cli.engines.vllm.targets import Target
from probe_cli.engines.vllm.triton import answer_for_triton

__all__ = ["emulate", "prepare_environment"]


def prepare_environment() -> None:
    """Settings for any build: quiet, no usage statistics, no helper processes."""
    for name, value in {
        # Errors alone, and not among a command's results: vLLM logs to stdout otherwise.
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIGURE_LOGGING": "1",
        "HUMMING_DISABLE_PARALLEL_BUILD": "1",  # `import humming` starts two compilers otherwise
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # `vllm/models/inkling/nvidia/ops/lamport.py` (0.33): memory shared by all ranks, for a step of serving.
        "LAMPORT_RS_SCONV": "0",
    }.items():
        os.environ.setdefault(name, value)


def emulate(target: Target, devices: int) -> None:
    """Answer for `devices` devices of a type. Raises EngineError if the driver's library cannot be stood in for."""
    load_stub()
    # vLLM's extensions name functions of the driver that the stand-in lacks: they must be bound when called, not before.
    sys.setdlopenflags(os.RTLD_LAZY)
    _answer_for_torch(target, devices)
    answer_for_triton(target)
    _answer_for_vllm(target, devices)


def _answer_for_torch(target: Target, devices: int) -> None:
    properties = _Properties(target)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "device_count": lambda: devices,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: target.capability,
        "get_device_name": lambda device=None: target.device_name,
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": lambda: [f"sm_{target.capability[0]}{target.capability[1]}"],
        "mem_get_info": lambda device=None: (target.memory, target.memory),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "Stream": _Stream,
        "Event": _Stream,
        "stream": _Stream,
        "is_bf16_supported": lambda including_emulation=True: target.capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    accelerator: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: devices,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "set_device_index": lambda device: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: _Stream(),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
    }
    for name, answer in accelerator.items():
        if hasattr(torch.accelerator, name):
            setattr(torch.accelerator, name, answer)


def _answer_for_vllm(target: Target, devices: int) -> None:
    from vllm import platforms
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    capability = DeviceCapability(*target.capability)

    class EmulatedCuda(cuda.CudaPlatformBase):  # type: ignore[misc]
        """`CudaPlatformBase` with every question to NVML or the runtime answered from the table."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return capability

        @classmethod
        def has_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
            if isinstance(capability, tuple):
                return target.capability >= capability
            return target.capability[0] * 10 + target.capability[1] >= int(capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return target.device_name

        @classmethod
        def get_device_uuid(cls, device_id: int = 0) -> str:
            return f"GPU-{device_id:032x}"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return target.memory

        @classmethod
        def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return devices

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return target.multiprocessors

        @classmethod
        def get_current_memory_usage(cls, device: Any = None) -> float:
            return 0.0

        @classmethod
        def is_integrated_gpu(cls, device_id: int = 0) -> bool:
            return False

        @classmethod
        def set_device(cls, device: Any) -> None:
            return None

        @classmethod
        def log_warnings(cls) -> None:
            return None

    platforms._current_platform = EmulatedCuda()


class _Properties:
    """`torch.cuda.get_device_properties`."""

    def __init__(self, target: Target) -> None:
        self.name = target.device_name
        self.major, self.minor = target.capability
        self.total_memory = target.memory
        self.multi_processor_count = target.multiprocessors
        self.shared_memory_per_block_optin = target.shared_memory
        self.shared_memory_per_block = 49152
        self.shared_memory_per_multiprocessor = target.shared_memory + 1024
        self.L2_cache_size = target.l2_cache
        self.warp_size = 32
        self.regs_per_multiprocessor = 65536
        self.max_threads_per_multi_processor = 2048
        self.max_threads_per_block = 1024
        self.is_integrated = 0
        self.is_multi_gpu_board = 0
        self.gcnArchName = ""
        self.uuid = "0" * 32


class _Stream:
    """Streams and events that models make in their constructors and never use in a load."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None
