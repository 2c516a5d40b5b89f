"""What is not tracked, and why: said at the start, never found out half way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["refusals"]


def refusals(model: nn.Module, config: Any, model_config: Any, online_layer: str | None = None) -> Iterator[str]:
    """One line for each thing about a model, before its weights are processed, that an update could not be tracked through.
    `online_layer`: the first that was quantized while it was loaded."""
    if model_config.quantization == "torchao":
        yield "torchao quantizes inside load_weights, which begins and ends reloads of its own"
    if online_layer is not None:
        yield (
            f"layer {online_layer} quantizes while it loads, so that there is no loaded layout to stage "
            "(PROBE_MANIFEST_ONLINE_QUANTIZATION=track loads it whole first, which takes memory at the start)"
        )
    if getattr(config.parallel_config, "enable_eplb", False):
        yield "EPLB moves experts between updates, and vLLM's loading code puts them where they were at the start"
    if getattr(config, "lora_config", None) is not None and any(
        hasattr(module, "lora_base_layer_prefix") for module in model.modules()
    ):
        yield "LoRA wraps the experts, and vLLM then calls their loaders by other names than in the first load"
    offload = getattr(config, "offload_config", None)
    if _offloads(offload):
        yield "weights are offloaded to the host, and move between updates"


def _offloads(offload: Any) -> bool:
    if offload is None:
        return False
    uva, prefetch = getattr(offload, "uva", None), getattr(offload, "prefetch", None)
    return bool(getattr(uva, "cpu_offload_gb", 0)) or bool(getattr(prefetch, "offload_group_size", 0))
