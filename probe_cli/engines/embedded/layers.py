"""The other dense layers of the family: norm, vocabulary-parallel embedding and head, feed-forward, attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from probe_cli.engines.embedded.config import ModelConfig, Rope
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

__all__ = ["MLP", "Attention", "RMSNorm", "VocabEmbedding", "composed_loader", "inverse_frequencies"]

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
        if loaded_weight.shape[0] != self.vocab:
            raise ValueError(f"{loaded_weight.shape[0]} rows, expected a vocabulary of {self.vocab}")
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

    def __init__(self, config: ModelConfig, context: ParallelContext) -> None:
        super().__init__()
        self.context = context
        hidden, heads, kv_heads = config.hidden_size, config.heads, config.kv_heads
        self.head_dim = config.head_dim
        self.heads = heads // context.tp_size
        self.kv_heads = max(1, kv_heads // context.tp_size)
        self.latent = config.q_rank > 0
        options: dict[str, Any] = {"bias": config.attention_bias, "block": config.block}
        if self.latent:
            self.fused_qkv_a_proj = FusedLatentLinear(hidden, config.q_rank, config.kv_rank)
            self.q_b_proj = ColumnLinear(heads * self.head_dim, config.q_rank, context)
            self.kv_b_proj = LatentKV(kv_heads, self.head_dim, config.kv_rank, context)
        else:
            self.qkv_proj = QKVLinear(hidden, self.head_dim, heads, kv_heads, context, **options)
        self.o_proj = RowLinear(hidden, heads * self.head_dim, context, **options)
        normed = config.model_type.startswith("qwen3")
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if normed else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if normed else None
        self.sinks: nn.Parameter | None = None
        self.decay: nn.Parameter | None = None
        if config.sinks:
            self.sinks = nn.Parameter(torch.zeros(self.heads), requires_grad=False)
        if config.decay:
            self.decay = nn.Parameter(torch.zeros(self.heads), requires_grad=False)
            self.decay.weight_loader = composed_loader(context)  # type: ignore[attr-defined]
        self.register_buffer("inv_freq", inverse_frequencies(config.rope, self.head_dim), persistent=False)

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
        if self.decay is not None:
            scores = scores + self.decay.float()[:, None, None] * distance.clamp(min=0)
        scores = scores.masked_fill(distance < 0, float("-inf"))
        if self.sinks is not None:
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


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Angle per position for each pair of dimensions; stretched as `rope` says (transformers,
    modeling_rope_utils.py)."""
    inverse = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind != "llama3":
        return inverse
    # Long waves are stretched, short ones are not, those between are blended.
    turns = rope.original_length * inverse / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * inverse / rope.factor + blend * inverse
