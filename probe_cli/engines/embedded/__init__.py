"""The embedded engine: a small family of models in plain PyTorch, for checkpoints of Llama, Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from probe_cli.engines.base import Engine, EngineOptions

__all__ = ["create"]


def create(options: EngineOptions) -> Engine:
    """The entry point of the engine `embedded`."""
    from probe_cli.engines.embedded.engine import EmbeddedEngine

    return EmbeddedEngine(options)
