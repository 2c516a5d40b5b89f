"""vLLM's post-processing of one layer, as its own load of a model runs it.

Mirrors `process_weights_after_loading` of `model_executor/model_loader/utils.py`, vLLM 0.32 and 0.33: quant methods in model order,
then attention layers, then the model's own hook.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.utils import device_loading_context
from vllm.utils.torch_utils import set_default_torch_dtype

__all__ = ["VllmProcessing"]


class VllmProcessing:
    """Implements `probe_cli.reload.Processing`."""

    hook_names = frozenset({"process_weights_after_loading"})

    def __init__(self, model: nn.Module, model_config: Any, device: torch.device) -> None:
        self._is_model = id(model)
        self._dtype: torch.dtype = model_config.dtype
        self._device = device

    def has_hook(self, name: str, module: nn.Module) -> bool:
        """A quant method, deferred attention, or the whole model's own hook."""
        return (
            isinstance(getattr(module, "quant_method", None), QuantizeMethodBase)
            or is_deferred_attention_layer(module)
            or self._has_model_hook(module)
        )

    def deferred(self, name: str, module: nn.Module) -> bool:
        """Attention derives tensors from its neighbours' weights; the model's own hook may look at anything."""
        return is_deferred_attention_layer(module) or self._has_model_hook(module)

    def process(self, name: str, module: nn.Module) -> None:
        """Run what vLLM's own load runs on this layer."""
        with set_default_torch_dtype(self._dtype):
            quant_method = getattr(module, "quant_method", None)
            if isinstance(quant_method, QuantizeMethodBase):
                quant_method.process_weights_after_loading(module)
                # Parameters made by the hook carry the global rank until the layer says otherwise.
                settle_rank = getattr(module, "update_param_tp_status", None)
                if callable(settle_rank):
                    settle_rank()
            if is_deferred_attention_layer(module):
                with device_loading_context(module, self._device):
                    module.process_weights_after_loading(self._dtype)  # type: ignore[operator]
            if self._has_model_hook(module):
                module.process_weights_after_loading()  # type: ignore[operator]

    def _has_model_hook(self, module: nn.Module) -> bool:
        return id(module) == self._is_model and callable(getattr(module, "process_weights_after_loading", None))
