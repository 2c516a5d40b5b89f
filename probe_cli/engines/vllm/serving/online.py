"""Online quantization, tracked: weights are loaded whole and quantized afterwards, as for any other layer that is post-processed.

vLLM quantizes such a layer while it loads (`initialize_online_processing` in `model_loader/reload/layerwise.py`, 0.32 and 0.33): its
parameters are on meta, their loaders hold back what they are given and count elements. That keeps the peak of memory low, and leaves
no loaded layout to bind a contract to. So this costs memory at the start: for the weights as the checkpoint has them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["load_before_quantizing", "quantized_while_loading"]


def quantized_while_loading(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, layer) of what is quantized while it loads: parameters on meta, before the first load."""
    for name, module in model.named_modules():
        if getattr(getattr(module, "quant_method", None), "uses_meta_device", False) and any(
            parameter is not None and parameter.is_meta for parameter in module._parameters.values()
        ):
            yield name, module


def load_before_quantizing(model: nn.Module, device: torch.device) -> None:
    """Give these layers memory and their own loaders. Call it on a new model; the values are undefined until they are loaded."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

    for _, layer in quantized_while_loading(model):
        with device:
            for name, parameter in list(layer._parameters.items()):
                if parameter is None:
                    continue
                if parameter.is_meta:
                    layer._parameters[name] = materialize_meta_tensor(parameter)
                made = layer._parameters[name]
                if hasattr(made, "weight_loader"):
                    made.weight_loader = _get_original_loader(made)  # type: ignore[union-attr]
        get_layerwise_info(layer).reset()
