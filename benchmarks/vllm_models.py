"""Checkpoints of published models in full size, as headers: every tensor's name, dtype and shape, and none of its bytes."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probe_cli.dtypes import DTYPE_BITS

__all__ = ["MODELS", "PublishedModel", "write_headers"]

Shape = tuple[int, ...]
Tensors = Iterator[tuple[str, str, Shape]]


@dataclass(frozen=True)
class PublishedModel:
    """`flags`: how the model is served, as `build` spells it; `ranks` is what that makes."""

    name: str
    config: dict[str, Any]
    tensors: Callable[[], Tensors]
    target: str
    flags: tuple[str, ...]
    ranks: int


def write_headers(model: PublishedModel, folder: Path) -> tuple[int, int]:
    """Write `config.json` and one header-only safetensors file. Gives (tensors, bytes that they stand for)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config, indent=1))
    header: dict[str, Any] = {}
    at = 0
    for name, dtype, shape in model.tensors():
        end = at + math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    return len(header), at


def _fp8(name: str, out: int, inner: int) -> Tensors:
    yield f"{name}.weight", "F8_E4M3", (out, inner)
    yield f"{name}.weight_scale_inv", "F32", (-(-out // 128), -(-inner // 128))


def _mlp(name: str, hidden: int, width: int, linear: Callable[[str, int, int], Tensors]) -> Tensors:
    yield from linear(f"{name}.gate_proj", width, hidden)
    yield from linear(f"{name}.up_proj", width, hidden)
    yield from linear(f"{name}.down_proj", hidden, width)


def _mla_tensors(config: dict[str, Any]) -> Tensors:
    """DeepSeek-V3's layout, block FP8; with its multi-token-prediction layer where the configuration has one."""
    hidden, heads, vocabulary = config["hidden_size"], config["num_attention_heads"], config["vocab_size"]
    layers, experts = config["num_hidden_layers"], config["n_routed_experts"]
    yield "model.embed_tokens.weight", "BF16", (vocabulary, hidden)
    for index in range(layers + config.get("num_nextn_predict_layers", 0)):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", "BF16", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", "BF16", (hidden,)
        attention = f"{layer}.self_attn"
        yield from _fp8(f"{attention}.q_a_proj", 1536, hidden)
        yield f"{attention}.q_a_layernorm.weight", "BF16", (1536,)
        yield from _fp8(f"{attention}.q_b_proj", heads * 192, 1536)
        yield from _fp8(f"{attention}.kv_a_proj_with_mqa", 576, hidden)
        yield f"{attention}.kv_a_layernorm.weight", "BF16", (512,)
        yield from _fp8(f"{attention}.kv_b_proj", heads * 256, 512)
        yield from _fp8(f"{attention}.o_proj", hidden, heads * 128)
        if index < config["first_k_dense_replace"]:
            yield from _mlp(f"{layer}.mlp", hidden, config["intermediate_size"], _fp8)
        else:
            width = config["moe_intermediate_size"]
            yield f"{layer}.mlp.gate.weight", "BF16", (experts, hidden)
            yield f"{layer}.mlp.gate.e_score_correction_bias", "F32", (experts,)
            for expert in range(experts):
                yield from _mlp(f"{layer}.mlp.experts.{expert}", hidden, width, _fp8)
            yield from _mlp(f"{layer}.mlp.shared_experts", hidden, width, _fp8)
        if index >= layers:
            yield f"{layer}.embed_tokens.weight", "BF16", (vocabulary, hidden)
            yield f"{layer}.enorm.weight", "BF16", (hidden,)
            yield f"{layer}.hnorm.weight", "BF16", (hidden,)
            yield f"{layer}.eh_proj.weight", "BF16", (hidden, 2 * hidden)
            yield f"{layer}.shared_head.head.weight", "BF16", (vocabulary, hidden)
            yield f"{layer}.shared_head.norm.weight", "BF16", (hidden,)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (vocabulary, hidden)


_MLA: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "ep_size": 1, "hidden_act": "silu",
    "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-6,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    },
}  # fmt: skip
_DEEPSEEK_V3 = {
    **_MLA, "model_type": "deepseek_v3", "vocab_size": 129280, "num_attention_heads": 128, "num_key_value_heads": 128,
    "first_k_dense_replace": 3, "n_routed_experts": 256, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1, "max_position_embeddings": 163840, "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
_KIMI_K2 = {
    **_MLA, "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64,
    "first_k_dense_replace": 1, "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0, "max_position_embeddings": 131072, "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
_GPT_OSS_120B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880, "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "max_position_embeddings": 131072,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 36, "num_local_experts": 128,
    "num_experts_per_tok": 4, "experts_per_token": 4, "rms_norm_eps": 1e-5, "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 201088,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    },
}  # fmt: skip
_LLAMA_405B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "hidden_act": "silu",
    "hidden_size": 16384, "intermediate_size": 53248, "max_position_embeddings": 131072, "mlp_bias": False,
    "num_attention_heads": 128, "num_key_value_heads": 8, "num_hidden_layers": 126, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False,
                    "observer": "minmax",
                },
                "input_activations": {
                    "num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True,
                },
            },
        },
    },
}  # fmt: skip


def _gpt_oss_tensors() -> Tensors:
    hidden, experts = 2880, 128
    yield "model.embed_tokens.weight", "BF16", (201088, hidden)
    for index in range(36):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", "BF16", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", "BF16", (hidden,)
        for part, out, inner in (("q", 4096, hidden), ("k", 512, hidden), ("v", 512, hidden), ("o", hidden, 4096)):
            yield f"{layer}.self_attn.{part}_proj.weight", "BF16", (out, inner)
            yield f"{layer}.self_attn.{part}_proj.bias", "BF16", (out,)
        yield f"{layer}.self_attn.sinks", "BF16", (64,)
        yield f"{layer}.mlp.router.weight", "BF16", (experts, hidden)
        yield f"{layer}.mlp.router.bias", "BF16", (experts,)
        for part, out in (("gate_up_proj", 5760), ("down_proj", hidden)):
            yield f"{layer}.mlp.experts.{part}_blocks", "U8", (experts, out, 90, 16)
            yield f"{layer}.mlp.experts.{part}_scales", "U8", (experts, out, 90)
            yield f"{layer}.mlp.experts.{part}_bias", "BF16", (experts, out)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (201088, hidden)


def _llama_405b_tensors() -> Tensors:
    hidden = 16384

    def per_channel(name: str, out: int, inner: int) -> Tensors:
        yield f"{name}.weight", "F8_E4M3", (out, inner)
        yield f"{name}.weight_scale", "BF16", (out, 1)

    yield "model.embed_tokens.weight", "BF16", (128256, hidden)
    for index in range(126):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", "BF16", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", "BF16", (hidden,)
        for part, out in (("q", hidden), ("k", 1024), ("v", 1024), ("o", hidden)):
            yield from per_channel(f"{layer}.self_attn.{part}_proj", out, hidden)
        yield from _mlp(f"{layer}.mlp", hidden, 53248, per_channel)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (128256, hidden)


MODELS = {
    model.name: model
    for model in (
        PublishedModel(
            "deepseek-v3", _DEEPSEEK_V3, lambda: _mla_tensors(_DEEPSEEK_V3), "h200", ("--tp", "8", "--ep"), 8
        ),
        PublishedModel("gpt-oss-120b", _GPT_OSS_120B, _gpt_oss_tensors, "h100", ("--tp", "8"), 8),
        PublishedModel("kimi-k2", _KIMI_K2, lambda: _mla_tensors(_KIMI_K2), "h200", ("--dp", "32", "--ep"), 32),
        PublishedModel("llama-405b-fp8", _LLAMA_405B, _llama_405b_tensors, "h100", ("--tp", "8", "--pp", "2"), 16),
    )
}
