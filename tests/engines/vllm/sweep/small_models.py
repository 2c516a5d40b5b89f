"""Small, realistic checkpoints of any architecture that transformers has a class for.

The widths are the defaults of the architecture's own configuration class (a width costs nothing on meta); only depths are
cut. Names and shapes are those that `save_pretrained` would write, conversions to the published layout included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.engines.vllm.sweep.header_only import Entry, entries_of
from tests.engines.vllm.sweep.published import as_published

__all__ = ["NoTransformersClass", "config_and_entries", "transformers_class"]

LAYERS = 4
_DEPTHS = frozenset(
    {
        "num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers",
        "num_encoder_layers", "num_decoder_layers", "num_attention_layers", "num_local_layers",
    }
)  # fmt: skip
_LENGTHS = frozenset({"max_position_embeddings", "n_positions"})


class NoTransformersClass(Exception):
    """Transformers has no class of that name that can be made from its defaults."""


def transformers_class(architecture: str) -> Any:
    """The class of that name. Raises NoTransformersClass."""
    import transformers

    found = getattr(transformers, architecture, None)
    if found is None or not isinstance(found, type) or getattr(found, "config_class", None) is None:
        raise NoTransformersClass(architecture)
    return found


def config_and_entries(
    architecture: str, changes: Mapping[str, Any], *, prefixes: bool = False
) -> tuple[dict[str, Any], list[Entry]]:
    """`config.json` and the checkpoint's entries. `changes` are passed to the configuration class.

    `prefixes`: with the prefixes that transformers' own mapping takes off when it loads a published checkpoint, and would
    not put on when it saves a model that was never loaded.
    """
    model_class = transformers_class(architecture)
    config = small_config(model_class.config_class, changes)
    config._attn_implementation = "eager"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = model_class(config)
    finally:
        torch.set_default_dtype(before)
    config.architectures = [architecture]
    config.dtype = torch.bfloat16
    document = json.loads(config.to_json_string(use_diff=False))
    document.pop("_attn_implementation_autoset", None)
    return as_published(architecture, document), entries_of(saved_state(model, prefixes))


def saved_state(model: Any, prefixes: bool = False) -> dict[str, torch.Tensor]:
    """What `save_pretrained` would write: tied tensors once, in the published layout."""
    from transformers.core_model_loading import revert_weight_conversion

    if prefixes:
        from transformers.conversion_mapping import get_model_conversion_mapping

        model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False) or None
    model.tie_weights()
    seen: set[int] = set()
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor.detach()
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    return dict(revert_weight_conversion(model, {k: v for k, v in state.items() if k not in ignored}))


def small_config(config_class: Any, changes: Mapping[str, Any]) -> Any:
    default = config_class()
    cut = {**_cut(default), **changes}
    try:
        return config_class(**cut)
    except Exception:
        # A class that checks its lists against its depth, and whose defaults are lists: cut both.
        for name, value in cut.items():
            if not isinstance(value, dict):
                old = getattr(default, name, None)
                if name in _DEPTHS and isinstance(old, int):
                    _truncate(default, old, value)
                setattr(default, name, value)
        return default


def _cut(config: Any) -> dict[str, Any]:
    """The configuration's depths, cut, here and in its parts."""
    cut: dict[str, Any] = {}
    parts = getattr(config, "sub_configs", None) or {}
    for name, value in vars(config).items():
        if name in _DEPTHS and isinstance(value, int):
            cut[name] = min(value, LAYERS)
        elif name in _LENGTHS and isinstance(value, int):
            cut[name] = min(value, 4096)
        elif name in parts and hasattr(value, "to_dict"):
            inner = _cut(value)
            if inner:
                cut[name] = {"model_type": value.model_type, **inner} if value.model_type else inner
    return cut


def _truncate(config: Any, length: int, to: int) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == length:
            setattr(config, name, value[:to])


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=1))
