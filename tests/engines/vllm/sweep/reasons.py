"""Why a rank leaves a source aside, and why nothing writes a tensor: told from what vLLM built, not case by case."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

__all__ = ["why_unfed", "why_unused"]

#: What a checkpoint may put before names, and vLLM not.
_PREFIXES = frozenset({"model", "vlm"})
#: A module of vLLM that stands for several of a checkpoint.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def why_unused(names: Iterable[str], used: Iterable[str], model: nn.Module, role: str) -> dict[str, list[str]]:
    """Reason -> the sources of which it holds, in order. `used`: the sources that the rank takes."""
    taken = {_plain(name) for name in used}
    reasons: dict[str, list[str]] = {}
    for name in names:
        reasons.setdefault(_unused(name, taken, model, role), []).append(name)
    return reasons


def why_unfed(names: Iterable[str], model: nn.Module) -> dict[str, list[str]]:
    """Reason -> the tensors (`layer.tensor`) of which it holds, in order."""
    modules = dict(model.named_modules())
    reasons: dict[str, list[str]] = {}
    for name in names:
        owner = modules.get(name.rpartition(".")[0], model)
        reasons.setdefault(_unfed(owner), []).append(name)
    return reasons


def _unfed(owner: nn.Module) -> str:
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    method = getattr(owner, "quant_method", None)
    if isinstance(method, BaseKVCacheMethod):
        return "scales of the key/value cache that the checkpoint lacks: vLLM's own are kept"
    if method is not None and not type(method).__name__.startswith("Unquantized"):
        return f"made by {type(method).__name__}, and not in the checkpoint: the value it was made with is kept"
    return f"{type(owner).__name__} has it and the checkpoint does not: the value it was made with is kept"


def _unused(name: str, used: set[str], model: nn.Module, role: str) -> str:
    from vllm.model_executor.models.utils import PPMissingLayer

    if role == "draft":
        return "of the main model: a drafter takes its own layers"
    owner, rest = _walk(name, model)
    if isinstance(owner, PPMissingLayer):
        return "of another pipeline stage"
    if isinstance(owner, nn.ModuleList):
        return f"vLLM builds {len(owner)} of these layers"
    kind = type(owner).__name__
    if getattr(owner, rest, None) is not None:
        return "load_weights passes over it"
    head = rest.split(".")[0]
    before = _plain(name[: len(name) - len(rest)] + head)
    if "." in rest and any(other.startswith(f"{before}.") for other in used):
        return f"{kind} has no {rest.rpartition('.')[2]} for {head}"
    return f"{kind} has no {head}"


def _walk(name: str, model: nn.Module) -> tuple[nn.Module, str]:
    """The module that a source's name leads to in the model, and what of the name is left."""
    parts = name.split(".")
    start = 0
    while parts[start] in _PREFIXES and start < len(parts) - 1 and parts[start] not in model._modules:
        start += 1
    if _child(model, parts[start]) is not None:
        owner, at = model, start
        while at < len(parts) - 1:
            child = _child(owner, parts[at])
            if child is None and not (parts[at].isdigit() and at > start and not isinstance(owner, nn.ModuleList)):
                break
            owner, at = owner if child is None else child, at + 1
        return owner, ".".join(parts[at:])
    return model, name


def _plain(name: str) -> str:
    return re.sub(r"\d+", "N", name)


def _child(owner: nn.Module, name: str) -> nn.Module | None:
    """The child of that name, or the one that stands for it: fused with others, or with a module more between them."""
    found = owner._modules.get(name)
    if found is not None:
        return found
    for fused, parts in _FUSED.items():
        if name in parts and owner._modules.get(fused) is not None:
            return owner._modules[fused]
    if name.isdigit():
        return None
    inner = [child._modules[name] for child in owner.children() if child._modules.get(name) is not None]
    return inner[0] if len(inner) == 1 else None
