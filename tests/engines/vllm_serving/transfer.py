"""vLLM's own weight transfer engines with the wire replaced: tensors come from a safetensors file instead of another GPU's memory.
What begins, receives into the model and ends an update is vLLM's code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

__all__ = ["register"]


@dataclass
class FileInit(WeightTransferInitInfo):
    packed: bool = False


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    path: str
    names: list[str] = field(default_factory=list)


def load(model: Any, update: FileUpdate) -> None:
    from safetensors import safe_open
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

    with safe_open(update.path, "pt") as file, disable_mtp_completeness_check():
        model.load_weights([(name, file.get_tensor(name)) for name in update.names])


class FileIPCEngine(IPCWeightTransferEngine):
    init_info_cls = FileInit  # type: ignore[assignment]
    update_info_cls = FileUpdate  # type: ignore[assignment]

    def receive_weights(self, update_info: Any) -> None:
        load(self.model, update_info)


class FileNCCLEngine(NCCLWeightTransferEngine):
    init_info_cls = FileInit  # type: ignore[assignment]
    update_info_cls = FileUpdate  # type: ignore[assignment]

    def init_transfer_engine(self, init_info: Any) -> None:
        pass

    def receive_weights(self, update_info: Any) -> None:
        load(self.model, update_info)


def register() -> None:
    """Once per process; vLLM's plugin group calls it in those of a server."""
    for name, engine in (("file-ipc", FileIPCEngine), ("file-nccl", FileNCCLEngine)):
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, engine)
