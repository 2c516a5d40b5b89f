"""Write small, real checkpoints of the family: config.json and sharded safetensors under the names of transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from probe_cli.engines.embedded.config import ModelConfig

__all__ = ["PRESETS", "checkpoint_tensors", "preset", "write_checkpoint"]

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 250,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 8]}

#: Small configurations, by name.
PRESETS: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama-tied": {**_BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True},
    "llama-fp8": {
        **_BASE,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "quantization_config": _FP8,
    },
    "qwen3": {**_BASE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3-moe": {**_BASE, **_MOE},
    "qwen3-moe-fp8": {**_BASE, **_MOE, "quantization_config": _FP8},
    "qwen3-moe-extras": {
        **_BASE,
        **_MOE,
        "attention_sinks": True,
        "attention_decay": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
    },
}


def preset(name: str, **changes: Any) -> dict[str, Any]:
    """A configuration of `PRESETS` with changes."""
    return {**PRESETS[name], **changes}


def checkpoint_tensors(config: Mapping[str, Any], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint, in layer order. Two seeds differ in every tensor; values are scaled so that logits
    are decisive."""
    model = ModelConfig.read(config)
    generator = torch.Generator().manual_seed(seed)
    block = model.block

    def random(*shape: int, scale: float | None = None) -> torch.Tensor:
        spread = scale if scale is not None else 1.5 / math.sqrt(shape[-1])
        return (torch.randn(*shape, generator=generator) * spread).to(model.dtype)

    def linear(name: str, rows: int, columns: int, bias: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        weight = random(rows, columns)
        if block:
            scales = torch.rand(-(-rows // block[0]), -(-columns // block[1]), generator=generator) + 0.5
            yield f"{name}.weight", weight.float().to(torch.float8_e4m3fn)
            yield f"{name}.weight_scale_inv", scales
        else:
            yield f"{name}.weight", weight
        if bias:
            yield f"{name}.bias", random(rows, scale=0.3)

    hidden, heads, kv_heads, head_dim = model.hidden_size, model.heads, model.kv_heads, model.head_dim
    yield "model.embed_tokens.weight", random(model.vocab_size, hidden, scale=1.0)
    for index in range(model.layers):
        layer = f"model.layers.{index}"
        attention = f"{layer}.self_attn"
        yield f"{layer}.input_layernorm.weight", 1 + random(hidden, scale=0.2)
        if model.q_rank:
            yield f"{attention}.q_a_proj.weight", random(model.q_rank, hidden)
            yield f"{attention}.kv_a_proj.weight", random(model.kv_rank, hidden)
            yield f"{attention}.q_b_proj.weight", random(heads * head_dim, model.q_rank)
            yield f"{attention}.kv_b_proj.weight", random(2 * kv_heads * head_dim, model.kv_rank)
        else:
            for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                yield from linear(f"{attention}.{part}_proj", count * head_dim, hidden, model.attention_bias)
        yield from linear(f"{attention}.o_proj", hidden, heads * head_dim, model.attention_bias)
        if model.model_type.startswith("qwen3"):
            yield f"{attention}.q_norm.weight", 1 + random(head_dim, scale=0.2)
            yield f"{attention}.k_norm.weight", 1 + random(head_dim, scale=0.2)
        if model.sinks:
            yield f"{attention}.sinks", random(heads, scale=1.0)
        if model.decay:
            yield f"{attention}.decay", random(heads, scale=1.0) - 2
        yield f"{layer}.post_attention_layernorm.weight", 1 + random(hidden, scale=0.2)
        if model.is_sparse(index):
            yield f"{layer}.mlp.gate.weight", random(model.experts, hidden)
            for expert in range(model.experts):
                name = f"{layer}.mlp.experts.{expert}"
                yield from linear(f"{name}.gate_proj", model.expert_size, hidden)
                yield from linear(f"{name}.up_proj", model.expert_size, hidden)
                yield from linear(f"{name}.down_proj", hidden, model.expert_size)
        else:
            size, bias = model.intermediate_size, model.mlp_bias
            yield from linear(f"{layer}.mlp.gate_proj", size, hidden, bias)
            yield from linear(f"{layer}.mlp.up_proj", size, hidden, bias)
            yield from linear(f"{layer}.mlp.down_proj", hidden, size, bias)
    yield "model.norm.weight", 1 + random(hidden, scale=0.2)
    if not model.tied:
        yield "lm_head.weight", random(model.vocab_size, hidden)


def write_checkpoint(directory: str | Path, config: Mapping[str, Any], *, seed: int = 0, shards: int = 2) -> Path:
    """Write config.json, `shards` safetensors files and their index into a directory (made if it is not there)."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tensors = list(checkpoint_tensors(config, seed))
    per_file = -(-len(tensors) // shards)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        part = dict(tensors[shard * per_file : (shard + 1) * per_file])
        name = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    if shards > 1:
        total = sum(tensor.nbytes for _, tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
    return folder
