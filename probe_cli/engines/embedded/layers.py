"""The other layers of the family: norm, vocabulary-parallel embedding and head, experts, attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from probe_cli.engines.embedded.linear import (
    ColumnLinear,
    FusedLatentLinear,
    Linear,
    MergedColumnLinear,
    QKVLinear,
    RowLinear,
    copy_exactly,
)
from probe_cli.engines.embedded.parallel import ParallelContext, shard

__all__ = ["MLP", "Attention", "Experts", "RMSNorm", "SparseMLP", "VocabEmbedding", "composed_loader"]

#: Rows of an embedding are padded to a multiple of this, times the ranks.
VOCAB_PADDING = 64


class RMSNorm(nn.Module):
    """Root mean square norm; its weight has no loader: `load_weights` uses the default one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class VocabEmbedding(nn.Module):
    """An embedding, or the head that shares its layout: rows are spread over the ranks and padded at the end."""

    def __init__(self, vocab: int, hidden: int, context: ParallelContext) -> None:
        super().__init__()
        self.context = context
        self.vocab = vocab
        multiple = VOCAB_PADDING * context.tp_size
        self.rows = -(-vocab // multiple) * multiple // context.tp_size
        self.start = min(context.tp * self.rows, vocab)
        self.stop = min(self.start + self.rows, vocab)
        self.weight = nn.Parameter(torch.zeros(self.rows, hidden), requires_grad=False)
        self.weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        size = self.stop - self.start
        copy_exactly(param.data[:size], loaded_weight.narrow(0, self.start, size))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        local = (tokens >= self.start) & (tokens < self.stop)
        rows = functional.embedding(torch.where(local, tokens - self.start, 0), self.weight)
        return self.context.collectives.all_reduce(rows * local.unsqueeze(-1))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Use as a head: logits of the whole vocabulary."""
        return self.context.collectives.all_gather(functional.linear(x, self.weight))[..., : self.vocab]


class MLP(nn.Module):
    """Gate, up and down."""

    def __init__(self, hidden: int, size: int, context: ParallelContext, **options: Any) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnLinear([size, size], hidden, context, **options)
        self.down_proj = RowLinear(hidden, size, context, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(functional.silu(gate) * up)
        return out


class Experts(nn.Module):
    """All local experts in two tensors: `w13` (gate and up) and `w2` (down). With expert parallelism a rank owns whole
    experts (`expert_map`: global -> local, -1 for another rank's); otherwise a part of each.

    The kernel wants up before gate: `process_weights_after_loading` swaps the halves of `w13` in place.
    """

    def __init__(self, count: int, hidden: int, size: int, context: ParallelContext) -> None:
        super().__init__()
        rank = context.rank
        self.parallel = rank.ep_size > 1
        # Experts that several ranks of an expert group share are cut along their size, as other weights are.
        self.tp_size = max(1, context.tp_size // rank.ep_size) if self.parallel else context.tp_size
        self.tp = context.tp % self.tp_size
        local = count // rank.ep_size if self.parallel else count
        first = rank.ep * local if self.parallel else 0
        expert_map = torch.full((count,), -1, dtype=torch.int32)
        expert_map[first : first + local] = torch.arange(local, dtype=torch.int32)
        self.register_buffer("expert_map", expert_map, persistent=False)
        # Read back at construction: sizes and maps are control data and must be real even where weights are not.
        self.local_of: list[int] = expert_map.tolist()
        self.size = size // self.tp_size
        self.w13 = nn.Parameter(torch.empty(local, 2 * self.size, hidden), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(local, hidden, self.size), requires_grad=False)
        for parameter in (self.w13, self.w2):
            parameter.weight_loader = self.weight_loader  # type: ignore[attr-defined]
        self.up_first = False

    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Load one matrix of one expert; declines the experts of other ranks."""
        local = self.local_of[expert_id]
        if local < 0:
            return False if return_success else None
        if shard_id not in ("w1", "w2", "w3"):
            raise ValueError(f"{weight_name}: shard_id must be w1, w2 or w3, not {shard_id}")
        expert = param.data[local]
        if shard_id == "w2":
            copy_exactly(expert, shard(loaded_weight, 1, self.tp, self.tp_size))
        else:
            half = expert.narrow(0, 0 if shard_id == "w1" else self.size, self.size)
            copy_exactly(half, shard(loaded_weight, 0, self.tp, self.tp_size))
        return True if return_success else None

    def process_weights_after_loading(self) -> None:
        """Put up before gate. Not idempotent: doing it to processed weights undoes it."""
        gate, up = self.w13.data.clone().split(self.size, dim=1)
        self.w13.data[:, : self.size].copy_(up)
        self.w13.data[:, self.size :].copy_(gate)
        self.up_first = True

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """`x`: tokens x hidden; `weights`, `chosen`: tokens x top_k."""
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            local = self.local_of[expert]
            if local < 0:
                continue
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            first, second = functional.linear(x[token], self.w13[local]).split(self.size, dim=-1)
            gate, up = (second, first) if self.up_first else (first, second)
            result = functional.linear(functional.silu(gate) * up, self.w2[local])
            out.index_add_(0, token, (result * weights[token, slot, None]).to(out.dtype))
        return out


class SparseMLP(nn.Module):
    """A router and its experts (Qwen3-MoE)."""

    def __init__(self, config: dict[str, Any], context: ParallelContext) -> None:
        super().__init__()
        self.context = context
        hidden = config["hidden_size"]
        self.top_k = config["num_experts_per_tok"]
        self.normalize = config.get("norm_topk_prob", False)
        self.gate = nn.Linear(hidden, config["num_experts"], bias=False)
        self.gate.weight.requires_grad_(False)
        self.experts = Experts(config["num_experts"], hidden, config["moe_intermediate_size"], context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores = functional.softmax(self.gate(flat), dim=-1, dtype=torch.float)
        weights, chosen = torch.topk(scores, self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        out = self.experts(flat, weights.to(x.dtype), chosen)
        return self.context.collectives.all_reduce(out).reshape(x.shape)


def composed_loader(context: ParallelContext) -> Callable[[nn.Parameter, torch.Tensor], None]:
    """A loader that copies the local heads and then changes the value in place (Mamba's A = -exp(A_log))."""

    def load(param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        copy_exactly(param.data, shard(loaded_weight, 0, context.tp, context.tp_size))
        param.data.copy_(-torch.exp(param.data.float()))

    return load


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    Beyond what Llama and Qwen3 have, a config can ask for sinks (a logit per head, `attention_sinks`), a per-head decay
    with distance (`attention_decay`), and low-rank projections (`q_lora_rank` and `kv_lora_rank`).
    """

    def __init__(self, config: dict[str, Any], context: ParallelContext, **options: Any) -> None:
        super().__init__()
        self.context = context
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        self.head_dim = config.get("head_dim") or hidden // heads
        self.heads = heads // context.tp_size
        self.kv_heads = max(1, kv_heads // context.tp_size)
        self.latent = "q_lora_rank" in config
        bias = bool(config.get("attention_bias", False))
        if self.latent:
            self.fused_qkv_a_proj = FusedLatentLinear(hidden, config["q_lora_rank"], config["kv_lora_rank"])
            self.q_b_proj = ColumnLinear(heads * self.head_dim, config["q_lora_rank"], context)
            self.kv_b_proj = LatentKV(kv_heads, self.head_dim, config["kv_lora_rank"], context)
        else:
            self.qkv_proj = QKVLinear(hidden, self.head_dim, heads, kv_heads, context, bias=bias, **options)
        self.o_proj = RowLinear(hidden, heads * self.head_dim, context, **options)
        eps = config.get("rms_norm_eps", 1e-6)
        normed = config["model_type"].startswith("qwen3")
        self.q_norm = RMSNorm(self.head_dim, eps) if normed else None
        self.k_norm = RMSNorm(self.head_dim, eps) if normed else None
        if config.get("attention_sinks"):
            self.sinks = nn.Parameter(torch.zeros(self.heads), requires_grad=False)
        if config.get("attention_decay"):
            self.decay = nn.Parameter(torch.zeros(self.heads), requires_grad=False)
            self.decay.weight_loader = composed_loader(context)  # type: ignore[attr-defined]
        theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta") or 10000.0
        inverse = 1.0 / (theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim))
        self.register_buffer("inv_freq", inverse, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: batch x sequence x hidden, causal."""
        batch, length, _ = x.shape
        if self.latent:
            q_latent, kv_latent = self.fused_qkv_a_proj.split(self.fused_qkv_a_proj(x))
            q = self.q_b_proj(q_latent)
            k, v = self.kv_b_proj(kv_latent).chunk(2, dim=-1)
        else:
            q, k, v = self.qkv_proj.split(self.qkv_proj(x))
        q = q.reshape(batch, length, self.heads, self.head_dim)
        k = k.reshape(batch, length, self.kv_heads, self.head_dim)
        v = v.reshape(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self._rotate(q.transpose(1, 2)), self._rotate(k.transpose(1, 2))
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = (q @ k.transpose(-1, -2)).float() * self.head_dim**-0.5
        distance = torch.arange(length, device=x.device)
        distance = distance[:, None] - distance[None, :]
        if hasattr(self, "decay"):
            scores = scores + self.decay.float()[:, None, None] * distance.clamp(min=0)
        scores = scores.masked_fill(distance < 0, float("-inf"))
        if hasattr(self, "sinks"):
            sink = self.sinks.float()[None, :, None, None].expand(batch, -1, length, 1)
            weights = functional.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
        else:
            weights = functional.softmax(scores, dim=-1)
        out = (weights.to(v.dtype) @ v).transpose(1, 2).reshape(batch, length, -1)
        result: torch.Tensor = self.o_proj(out)
        return result

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[-2], device=x.device).float()
        angles = torch.outer(positions, self.get_buffer("inv_freq"))
        angles = torch.cat([angles, angles], dim=-1)
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)


class LatentKV(Linear):
    """Keys of all heads, then values of all heads; each rank takes its heads of both. With more ranks than heads, each
    head is on several ranks."""

    def __init__(self, kv_heads: int, head_dim: int, rank: int, context: ParallelContext) -> None:
        self.rows = max(1, kv_heads // context.tp_size) * head_dim
        self.index = context.tp // max(1, context.tp_size // kv_heads)
        super().__init__(2 * self.rows, rank)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        for mine, all_heads in zip(param.data.chunk(2), loaded_weight.chunk(2)):
            copy_exactly(mine, all_heads.narrow(0, self.index * self.rows, self.rows))
