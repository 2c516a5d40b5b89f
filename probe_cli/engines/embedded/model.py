"""A causal language model that reads Hugging Face checkpoints of Llama, Qwen3 and Qwen3-MoE, for one rank.

Small, in plain PyTorch, with the loading code of a serving engine: it routes, fuses, shards and declines as those do,
so that a manifest, a reload and their proofs can be tried anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from probe_cli.engines.embedded.layers import MLP, Attention, RMSNorm, SparseMLP, VocabEmbedding
from probe_cli.engines.embedded.parallel import ParallelContext, shard
from probe_cli.errors import UsageError

__all__ = ["SUPPORTED_MODEL_TYPES", "CausalLM", "check_config", "default_weight_loader", "process_weights"]

SUPPORTED_MODEL_TYPES = ("llama", "qwen3", "qwen3_moe")

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_EXPERT_SHARDS = {"gate_proj": ("w13", "w1"), "down_proj": ("w2", "w2"), "up_proj": ("w13", "w3")}
_STACKED: tuple[tuple[str, str, str | int], ...] = (
    ("qkv_proj", "q_proj", "q"),
    ("qkv_proj", "k_proj", "k"),
    ("qkv_proj", "v_proj", "v"),
    ("gate_up_proj", "gate_proj", 0),
    ("gate_up_proj", "up_proj", 1),
)


def default_weight_loader(param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
    """For parameters without a loader: copy whole."""
    if param.shape != loaded_weight.shape:
        raise ValueError(f"shape {list(loaded_weight.shape)} does not fit {list(param.shape)}")
    param.data.copy_(loaded_weight)


def check_config(config: Mapping[str, Any], context: ParallelContext) -> None:
    """Raise UsageError for a model or a topology that this family cannot do."""
    kind = config.get("model_type")
    if kind not in SUPPORTED_MODEL_TYPES:
        raise UsageError(
            f"the embedded models do not know model_type {kind!r}; they know {', '.join(SUPPORTED_MODEL_TYPES)}",
            hint="install an engine that does (the extra `vllm`), or give your own: --engine python:module:factory",
        )
    topology = context.rank.topology
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    if heads % topology.tp:
        raise UsageError(f"{heads} attention heads cannot be spread over tp={topology.tp} ranks")
    if kv_heads % topology.tp and topology.tp % kv_heads:
        raise UsageError(f"{kv_heads} key/value heads cannot be spread over, or copied to, tp={topology.tp} ranks")
    if topology.ep > 1 and not config.get("num_experts"):
        raise UsageError(f"ep={topology.ep}, but a {kind} model has no experts")
    if topology.ep > 1 and config["num_experts"] % topology.ep:
        raise UsageError(f"{config['num_experts']} experts cannot be spread over ep={topology.ep} ranks")
    if topology.pp > config["num_hidden_layers"]:
        raise UsageError(f"{config['num_hidden_layers']} layers cannot be spread over pp={topology.pp} stages")


class DecoderLayer(nn.Module):
    """Attention and feed-forward with their norms."""

    def __init__(self, config: dict[str, Any], index: int, context: ParallelContext, **options: Any) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config.get("rms_norm_eps", 1e-6)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config, context, **options)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        sparse = (
            bool(config.get("num_experts"))
            and index not in (config.get("mlp_only_layers") or ())
            and (index + 1) % (config.get("decoder_sparse_step") or 1) == 0
        )
        self.mlp: nn.Module = (
            SparseMLP(config, context) if sparse else MLP(hidden, config["intermediate_size"], context, **options)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """The layers of one pipeline stage; the first has the embedding, the last the final norm."""

    def __init__(self, config: dict[str, Any], context: ParallelContext, **options: Any) -> None:
        super().__init__()
        rank = context.rank
        layers, stages = config["num_hidden_layers"], rank.pp_size
        self.first = layers * rank.pp // stages
        self.last = layers * (rank.pp + 1) // stages
        if rank.pp == 0 or (config.get("tie_word_embeddings") and rank.pp == stages - 1):
            self.embed_tokens = VocabEmbedding(config["vocab_size"], config["hidden_size"], context)
        self.layers = nn.ModuleDict(
            {str(index): DecoderLayer(config, index, context, **options) for index in range(self.first, self.last)}
        )
        if rank.pp == stages - 1:
            self.norm = RMSNorm(config["hidden_size"], config.get("rms_norm_eps", 1e-6))


class CausalLM(nn.Module):
    """One rank of the model. `config` is config.json; dtype is torch's default one at construction."""

    def __init__(self, config: Mapping[str, Any], context: ParallelContext | None = None) -> None:
        super().__init__()
        context = context or ParallelContext()
        check_config(config, context)
        self.config = dict(config)
        self.context = context
        block = (config.get("quantization_config") or {}).get("weight_block_size")
        options = {"block": (int(block[0]), int(block[1]))} if block else {}
        self.model = Decoder(self.config, context, **options)
        if context.rank.pp == context.rank.pp_size - 1:
            self.lm_head = VocabEmbedding(config["vocab_size"], config["hidden_size"], context)
            if config.get("tie_word_embeddings"):
                self.lm_head.weight = self.model.embed_tokens.weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Route a stream of (checkpoint name, tensor) into this rank's parameters; returns the names it knew."""
        params = dict(self.named_parameters(remove_duplicate=False))
        loaded: set[str] = set()
        latents: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name == "lm_head.weight" and self.config.get("tie_word_embeddings"):
                continue
            done = (
                self._load_expert(params, name, tensor)
                or self._load_latent(params, name, tensor, latents)
                or self._load_sinks(params, name, tensor)
                or self._load_stacked(params, name, tensor)
                or self._load_plain(params, name, tensor)
            )
            if done:
                loaded.add(name)
        return loaded

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch x sequence x vocabulary) for tokens (batch x sequence), on a single stage."""
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers.values():
            x = layer(x)
        return self.lm_head.logits(self.model.norm(x))

    # Routing: each returns whether the name was one of its kind.

    def _load_expert(self, params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> bool:
        match = _EXPERT.fullmatch(name)
        if match is None:
            return False
        prefix, expert, projection = match.groups()
        weight, shard_id = _EXPERT_SHARDS[projection]
        param = params.get(f"{prefix}.{weight}")
        if param is None:
            return True  # a layer of another stage
        param.weight_loader(  # type: ignore[attr-defined]
            param, tensor, f"{prefix}.{weight}", shard_id=shard_id, expert_id=int(expert), return_success=True
        )
        return True

    def _load_latent(
        self, params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor, waiting: dict[str, torch.Tensor]
    ) -> bool:
        prefix, _, projection = name.removesuffix(".weight").rpartition(".")
        if projection not in ("q_a_proj", "kv_a_proj"):
            return False
        param = params.get(f"{prefix}.fused_qkv_a_proj.weight")
        if param is None:
            return True
        waiting[f"{prefix}.{projection}"] = tensor
        if f"{prefix}.q_a_proj" in waiting and f"{prefix}.kv_a_proj" in waiting:
            joined = torch.cat([waiting.pop(f"{prefix}.q_a_proj"), waiting.pop(f"{prefix}.kv_a_proj")])
            param.weight_loader(param, joined)  # type: ignore[attr-defined]
        return True

    def _load_sinks(self, params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> bool:
        if not name.endswith(".self_attn.sinks"):
            return False
        param = params.get(name)
        if param is not None:  # written here, without a loader (vLLM, gpt_oss.py)
            param.data.copy_(shard(tensor, 0, self.context.tp, self.context.tp_size))
        return True

    def _load_stacked(self, params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> bool:
        for fused, part, shard_id in _STACKED:
            if f".{part}." in name:
                param = params.get(name.replace(f".{part}.", f".{fused}."))
                if param is not None:
                    param.weight_loader(param, tensor, shard_id)  # type: ignore[attr-defined]
                return True
        return False

    def _load_plain(self, params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> bool:
        param = params.get(name)
        if param is None:
            return False
        getattr(param, "weight_loader", default_weight_loader)(param, tensor)
        return True


def process_weights(model: nn.Module) -> None:
    """Run every layer's `process_weights_after_loading`, as an engine does once the load is over."""
    for module in model.modules():
        hook = getattr(module, "process_weights_after_loading", None)
        if callable(hook):
            hook()
