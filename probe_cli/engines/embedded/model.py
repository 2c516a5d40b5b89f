"""A causal language model that reads Hugging Face checkpoints of Llama, Qwen3 and Qwen3-MoE, for one rank.

Small, in plain PyTorch, with the loading code of a serving engine: it routes, fuses, shards and declines as those do,
so that a manifest, a reload and their proofs can be tried anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from probe_cli.engines.embedded.config import SUPPORTED_MODEL_TYPES, ModelConfig
from probe_cli.engines.embedded.experts import SparseMLP
from probe_cli.engines.embedded.layers import MLP, Attention, RMSNorm, VocabEmbedding
from probe_cli.engines.embedded.parallel import ParallelContext, shard

__all__ = ["SUPPORTED_MODEL_TYPES", "CausalLM", "default_weight_loader", "process_weights"]

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d{1,6})\.(gate_proj|up_proj|down_proj)\.(weight|weight_scale_inv)")
_ALL_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
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


class DecoderLayer(nn.Module):
    """Attention and feed-forward with their norms."""

    def __init__(self, config: ModelConfig, index: int, context: ParallelContext) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config, context)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp: nn.Module
        if config.is_sparse(index):
            self.mlp = SparseMLP(config, context)
        else:
            self.mlp = MLP(hidden, config.intermediate_size, context, bias=config.mlp_bias, block=config.block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """The layers of one pipeline stage; the first has the embedding, the last the final norm."""

    def __init__(self, config: ModelConfig, context: ParallelContext) -> None:
        super().__init__()
        rank = context.rank
        stages = rank.pp_size
        self.first = config.layers * rank.pp // stages
        self.last = config.layers * (rank.pp + 1) // stages
        # A tied head needs the embedding's rows on the last stage too.
        if rank.pp == 0 or (config.tied and rank.pp == stages - 1):
            self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, context)
        self.layers = nn.ModuleDict(
            {str(index): DecoderLayer(config, index, context) for index in range(self.first, self.last)}
        )
        if rank.pp == stages - 1:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class CausalLM(nn.Module):
    """One rank of the model. `config` is config.json; its dtype is that of the weights.

    Raises UsageError for a model or a topology that this family cannot do, InputError for a value that cannot be.
    """

    def __init__(self, config: Mapping[str, Any], context: ParallelContext | None = None) -> None:
        super().__init__()
        self.context = context or ParallelContext()
        self.config = ModelConfig.read(config)
        self.config.check_topology(self.context.rank.topology)
        self.first_stage = self.context.rank.pp == 0
        self.last_stage = self.context.rank.pp == self.context.rank.pp_size - 1
        with _default_dtype(self.config.dtype):
            self.model = Decoder(self.config, self.context)
            if self.last_stage:
                self.lm_head = VocabEmbedding(self.config.vocab_size, self.config.hidden_size, self.context)
        if self.last_stage and self.config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Route a stream of (checkpoint name, tensor) into this rank's parameters; returns the names it knew."""
        params = dict(self.named_parameters(remove_duplicate=False))
        loaded: set[str] = set()
        latents: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name == "lm_head.weight" and self.config.tied:
                continue  # a copy of the embedding that some writers add
            done = (
                self._load_expert(params, name, tensor)
                or self._load_all_experts(params, name, tensor)
                or self._load_latent(params, name, tensor, latents)
                or self._load_sinks(params, name, tensor)
                or self._load_stacked(params, name, tensor)
                or self._load_plain(params, name, tensor)
            )
            if done:
                loaded.add(name)
        return loaded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (batch x sequence x vocabulary) for tokens (batch x sequence).

        A stage that is not the first takes what the one before returned, one that is not the last returns hidden states
        (batch x sequence x hidden). Raises NotImplementedError for what this family loads but does not compute.
        """
        if self.config.not_computed:
            raise NotImplementedError(f"loaded, but not computed here: {', '.join(self.config.not_computed)}")
        if self.context.rank.dp_size > 1 and self.context.rank.ep_size > 1:
            raise NotImplementedError("loaded, but not computed here: experts spread over data parallel ranks")
        if self.first_stage:
            x = self.model.embed_tokens(x)
        for layer in self.model.layers.values():
            x = layer(x)
        return self.lm_head.logits(self.model.norm(x)) if self.last_stage else x

    # Routing: each returns whether the name was one of its kind.

    def _load_expert(self, params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> bool:
        match = _EXPERT.fullmatch(name)
        if match is None:
            return False
        prefix, expert, projection, kind = match.groups()
        weight, shard_id = _EXPERT_SHARDS[projection]
        target = f"{prefix}.{weight}{kind.removeprefix('weight')}"
        param = params.get(target)
        if param is None:
            return True  # a layer of another stage
        param.weight_loader(  # type: ignore[attr-defined]
            param, tensor, target, shard_id=shard_id, expert_id=int(expert), return_success=True
        )
        return True

    def _load_all_experts(self, params: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> bool:
        """All experts of a layer in one tensor, as transformers 5 has them in memory and a trainer may send them."""
        match = _ALL_EXPERTS.fullmatch(name)
        if match is None:
            return False
        prefix, projection = match.groups()
        parts: tuple[tuple[str, str, torch.Tensor], ...] = (("w2", "w2", tensor),)
        if projection == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            parts = (("w13", "w1", gate), ("w13", "w3", up))
        for weight, shard_id, experts in parts:
            target = f"{prefix}.{weight}"
            param = params.get(target)
            if param is None:
                return True
            for expert_id in range(experts.shape[0]):
                param.weight_loader(  # type: ignore[attr-defined]
                    param, experts[expert_id], target, shard_id=shard_id, expert_id=expert_id, return_success=True
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
    """Run every layer's `process_weights_after_loading`, its own or its quantization's, as an engine does once the
    load is over."""
    with torch.no_grad():
        for module in model.modules():
            own = getattr(module, "process_weights_after_loading", None)
            if callable(own):
                own()
            method = getattr(module, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(module)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
