"""Small checkpoints of many architectures, as transformers itself saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

__all__ = ["MODELS", "save"]

_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
_MLA: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}

#: Name -> (transformers configuration class, changes to its defaults).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_COMMON, "head_dim": 32}),
    "llama-tied": ("LlamaConfig", {**_COMMON, "head_dim": 32, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_COMMON, "head_dim": 32}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**_COMMON, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "mixtral": ("MixtralConfig", {**_COMMON, "head_dim": 32, "num_local_experts": 4}),
    "deepseek-v2": ("DeepseekV2Config", _MLA),
    "deepseek-v3": ("DeepseekV3Config", _MLA),
    "gemma3": ("Gemma3TextConfig", {**_COMMON, "head_dim": 32, "sliding_window": 64}),
    "phi3": ("Phi3Config", {**_COMMON, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}),
    "falcon-h1": (
        "FalconH1Config",
        {
            **_COMMON,
            "head_dim": 32,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "mamba_d_ssm": 256,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_COMMON,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "num_local_experts": 4,
            "shared_intermediate_size": 64,
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            **_COMMON,
            "head_dim": 32,
            "intermediate_size": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}

#: What the published config.json has and transformers' class does not keep.
CONFIG_JSON: dict[str, dict[str, Any]] = {
    "deepseek-v2": {"topk_method": "group_limited_greedy"},
    "deepseek-v3": {"topk_method": "noaux_tc"},
}

#: Needs torchvision, which the CPU environment cannot have.
MULTIMODAL = "qwen2.5-vl"


def save(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint of a model of `MODELS` (or `MULTIMODAL`): config.json and safetensors."""
    import transformers

    torch.manual_seed(seed)
    if name == MULTIMODAL:
        model = _multimodal(transformers)
    else:
        config_class, changes = MODELS[name]
        config = getattr(transformers, config_class)(**changes)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model = model.to(torch.bfloat16)
    _make_unlike(model)
    model.save_pretrained(folder, safe_serialization=True)
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    config["dtype"] = config["torch_dtype"] = "bfloat16"
    config.update(CONFIG_JSON.get(name, {}))
    config_file.write_text(json.dumps(config, indent=2))
    return folder


def _make_unlike(model: torch.nn.Module) -> None:
    """Every tensor random: initial zeros and ones would hide a misplaced copy."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point() and "inv_freq" not in name:
                buffer.copy_(torch.randn(buffer.shape))


def _multimodal(transformers: Any) -> Any:
    text = {**_COMMON, "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [4, 6, 6]}}
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 128,
        "fullatt_block_indexes": [1],
    }
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)
