"""The vLLM engine: any vLLM model, any rank, without GPU and without weights. Only this package imports vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from probe_cli.engines.base import Engine, EngineOptions

__all__ = ["create"]


def create(options: EngineOptions) -> Engine:
    """The entry point of the engine `vllm`."""
    from probe_cli.engines.vllm.engine import VllmEngine

    return VllmEngine(options)
