"""The contract of a model that is there: its own loading code replayed on stand-ins, in the process that serves it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config_or_none, set_current_vllm_config
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from probe_cli.checkpoint import Checkpoint
from probe_cli.engines.vllm.serving.rank import engine_identity, rank_of
from probe_cli.manifest import Manifest
from probe_cli.probe import probe
from probe_cli.probe.live import LiveEngine

__all__ = ["loading_context", "probe_live"]


@contextmanager
def loading_context(config: Any, dtype: torch.dtype) -> Iterator[None]:
    """What vLLM's own load runs in: its current config and the model's default dtype."""
    if get_current_vllm_config_or_none() is config:
        with set_default_torch_dtype(dtype):
            yield
        return
    with set_current_vllm_config(config), set_default_torch_dtype(dtype):
        yield


class _LiveVllm(LiveEngine):
    def __init__(self, config: Any, dtype: torch.dtype, load: Callable[..., object]) -> None:
        super().__init__(engine_identity(config))
        self._config = config
        self._dtype = dtype
        self._load = load

    @contextmanager
    def loading(self, model: nn.Module) -> Iterator[None]:
        with loading_context(self._config, self._dtype), torch.no_grad():
            yield

    def load_weights(self, model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        return self._load(weights)

    def default_loaders(self) -> Sequence[Callable[..., object]]:
        return (default_weight_loader,)


def probe_live(
    model: nn.Module, checkpoint: Checkpoint, config: Any, dtype: torch.dtype, load: Callable[..., object]
) -> Manifest:
    """This rank's manifest. The model is left as it was. Raises ProbeError or EngineError."""
    return probe(model, checkpoint, rank=rank_of(config), engine=_LiveVllm(config, dtype, load))
