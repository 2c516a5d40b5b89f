"""Small checkpoints with decisive logits, as transformers itself saves them.

Plain random weights give nearly uniform logits, under which a wrong tensor does not show in any token.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.engines.vllm.zoo import MODELS

__all__ = ["save"]


def save(name: str, folder: Path, seed: int) -> Path:
    """Write the checkpoint of a model of `MODELS`; every tensor differs between seeds."""
    import transformers

    torch.manual_seed(seed)
    config_class, changes = MODELS[name]
    config = getattr(transformers, config_class)(**changes)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() < 2 or "conv" in parameter_name:
                parameter.normal_(1.0, 0.1)
            else:
                parameter.normal_(0.0, (4.0 if "lm_head" in parameter_name else 1.0) / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    config_file = folder / "config.json"
    values = json.loads(config_file.read_text())
    values["dtype"] = values["torch_dtype"] = "bfloat16"
    config_file.write_text(json.dumps(values, indent=2))
    return folder
