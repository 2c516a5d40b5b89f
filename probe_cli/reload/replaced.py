"""Modules that were replaced after the load. An engine that drafts with a second model gives it the first one's embeddings and
output layer (vLLM 0.32 and 0.33, `v1/spec_decode/llm_base_proposer.py`): the draft's loading code then finds the other model's
live tensors under its own names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from probe_cli.reload.layout import LoadedLayout

__all__ = ["Replaced", "find_replaced", "originals_in_place"]


@dataclass(frozen=True, eq=False)
class Replaced:
    """`original` was `holder.name` when the weights were loaded."""

    holder: nn.Module
    name: str
    original: nn.Module

    @property
    def successor(self) -> nn.Module | None:
        """What stands there now."""
        return self.holder._modules.get(self.name)


def find_replaced(layout: LoadedLayout) -> dict[str, Replaced]:
    """Layers that the model no longer has -> where their place was lost. A layer that was put into a wrapper (LoRA) is still
    there."""
    present = set(layout.model.modules())
    originals = {name: module for module, name in layout.names_of_modules.items()}
    found = {}
    for name, layer in layout.layers.items():
        if layer.module not in present:
            replaced = _where(layout.model, name, originals)
            if replaced is not None:
                found[name] = replaced
    return found


def _where(model: nn.Module, name: str, originals: dict[str, nn.Module]) -> Replaced | None:
    holder, path = model, ""
    for part in name.split("."):
        path = f"{path}.{part}" if path else part
        now, original = holder._modules.get(part), originals.get(path)
        if original is not None and now is not original:
            return Replaced(holder, part, original)
        if now is None:
            return None
        holder = now
    return None


@contextmanager
def originals_in_place(replaced: Iterable[Replaced]) -> Iterator[None]:
    """The modules of the load where they were, for loading code to find; their successors again afterwards."""
    put = []
    try:
        for entry in replaced:
            successor = entry.successor
            if successor is not entry.original:
                put.append((entry, successor))
                entry.holder._modules[entry.name] = entry.original
        yield
    finally:
        for entry, successor in reversed(put):
            if successor is None:
                entry.holder._modules.pop(entry.name, None)
            else:
                entry.holder._modules[entry.name] = successor
