"""Every private or version-dependent name of vLLM that the engine touches, with the releases in which it was read."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from probe_cli.engines.vllm.text import AbsentTokenizer, absent_processor

__all__ = [
    "default_loaders", "import_kernels", "inspect_in_process", "keep_layers_unprocessed",
    "load_on_meta", "no_fusion_sizes", "no_ports", "no_processors", "no_tokenizers", "one_node", "preload",
    "start_workspace",
]  # fmt: skip


def default_loaders() -> Sequence[Callable[..., object]]:
    """`vllm/model_executor/model_loader/weight_utils.py` (0.32, 0.33): loads what has no `weight_loader`."""
    from vllm.model_executor.model_loader import weight_utils

    return (weight_utils.default_weight_loader,)


def inspect_in_process() -> None:
    """`vllm/model_executor/models/registry.py` (0.32, 0.33) looks at a model class in a subprocess, which would not see the
    emulated platform, and costs an import of vLLM."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()


def no_ports() -> None:
    """`vllm/config/parallel.py` (0.32, 0.33) opens sockets to find ports for data parallel groups that no build has."""
    from vllm.config import parallel

    parallel.get_open_ports_list = lambda count=5: [0] * count


def keep_layers_unprocessed() -> None:
    """`vllm/model_executor/model_loader/reload/layerwise.py` (0.32, 0.33): with online quantization, a layer is quantized by
    device kernels as soon as its elements have been counted. A contract ends where that begins."""
    from vllm.model_executor.model_loader.reload import layerwise

    def leave(layer: Any, info: Any) -> None:
        info.loaded_weights.clear()

    layerwise._layerwise_process = leave


def load_on_meta(config: Any) -> None:
    """Parameters that are made during the load (`vllm/model_executor/models/transformers/causal.py:71`, 0.33) go where the
    configuration says that weights are loaded."""
    config.load_config.device = "meta"


def one_node() -> None:
    """`vllm/distributed/parallel_state.py` (0.32, 0.33) finds out through shared memory and a broadcast which ranks are on one
    node. For a layout they all are."""
    from vllm.distributed import parallel_state

    def in_the_same_node_as(pg: Any, source_rank: int = 0) -> list[bool]:
        return [True] * int(torch.distributed.get_world_size(pg))

    _replace(parallel_state.in_the_same_node_as, in_the_same_node_as)


def no_tokenizers() -> None:
    """`vllm/tokenizers/registry.py` (0.32, 0.33): None where no tokenizer is wanted. Constructors of multimodal models look up
    the ids of their placeholder tokens, which nothing of a load depends on."""
    from vllm.tokenizers import registry

    _replace(registry.cached_tokenizer_from_config, lambda *args, **options: AbsentTokenizer())


def no_processors() -> None:
    """`vllm/transformers_utils/processor.py` (0.32, 0.33): models of the Transformers backend ask their processor which inputs
    they take. Its files may not be beside the weights; its class says it as well."""
    from vllm.transformers_utils import processor

    load = processor.cached_get_processor

    def get_processor(name: str, *args: Any, **options: Any) -> Any:
        try:
            return load(name, *args, **options)
        except OSError as error:
            found = absent_processor(name, trust_remote_code=bool(options.get("trust_remote_code")))
            if found is None:
                raise error
            return found

    _replace(load, get_processor)


def _replace(old: Any, new: Any) -> None:
    """Put one object in the place of another wherever a module of vLLM has it by name; modules imported later find the new
    one."""
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "vllm"]:
        for name in [name for name, value in vars(module).items() if value is old]:
            setattr(module, name, new)


def no_fusion_sizes() -> None:
    """`vllm/config/compilation.py` (0.32, 0.33) imports FlashInfer, seconds of work, to ask up to which size an all-reduce is
    fused with what follows it. Nothing is compiled in a build."""
    from vllm.config.compilation import PassConfig

    PassConfig.flashinfer_max_size = lambda self, world_size: None


def import_kernels() -> None:
    """What every CUDA worker comes to import while it chooses kernels and attention backends (0.32, 0.33): several seconds,
    which the parent spends once. What cannot be imported is not there for the workers either."""
    for name in ("vllm.v1.attention.backends.flashinfer", "vllm.model_executor.kernels.linear"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def preload(model_config: Any) -> None:
    """Import the model's class before workers are forked (`vllm/model_executor/model_loader/utils.py`, 0.32 and 0.33)."""
    from vllm.model_executor.model_loader.utils import get_model_cls

    get_model_cls(model_config)
    # `vllm/models/beam/nvidia/allreduce.py` (0.33): memory shared by all ranks, for a step of serving. None means "without".
    allreduce = sys.modules.get("vllm.models.beam.nvidia.allreduce")
    if allreduce is not None:
        allreduce.BeamAllReduceWorkspace.create = lambda *args, **options: None


def start_workspace() -> None:
    """`vllm/v1/worker/workspace.py` (0.32, 0.33): scratch memory that the model runner sets up before it makes a model. Some
    models ask for theirs in their constructors; under the materializer it is on meta."""
    from vllm.v1.worker import workspace

    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device("cpu"))
