"""Mixture-of-experts layers: a router, and experts in fused tensors with the loader of a serving engine."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from probe_cli.engines.embedded.config import ModelConfig, expert_parts
from probe_cli.engines.embedded.linear import copy_exactly, dequantize, scales
from probe_cli.engines.embedded.parallel import ParallelContext, shard

__all__ = ["Experts", "SparseMLP"]


class Experts(nn.Module):
    """All local experts in two tensors: `w13` (gate and up) and `w2` (down). With expert parallelism a rank owns whole
    experts (`expert_map`: global -> local, -1 for another rank's); otherwise a part of each.

    The kernel wants up before gate: `process_weights_after_loading` swaps the halves of `w13` in place.
    """

    def __init__(self, config: ModelConfig, context: ParallelContext) -> None:
        super().__init__()
        rank = context.rank
        # Experts that several ranks of an expert group share are cut along their size, as other weights are.
        self.tp_size = expert_parts(rank.topology)
        self.tp = context.tp % self.tp_size
        local = config.experts // rank.ep_size
        first = rank.ep * local
        # Control data lives on the host, also when weights are on meta: the table below is read back from it.
        expert_map = torch.full((config.experts,), -1, dtype=torch.int32, device="cpu")
        expert_map[first : first + local] = torch.arange(local, dtype=torch.int32, device="cpu")
        self.register_buffer("expert_map", expert_map, persistent=False)
        self.local_of: list[int] = expert_map.tolist()
        self.size = config.expert_size // self.tp_size
        self.block = config.block
        self.dtype = torch.get_default_dtype()
        hidden = config.hidden_size
        dtype = torch.float8_e4m3fn if self.block else self.dtype
        self.w13 = self._parameter(torch.empty(local, 2 * self.size, hidden, dtype=dtype))
        self.w2 = self._parameter(torch.empty(local, hidden, self.size, dtype=dtype))
        if self.block:
            self.w13_scale_inv = self._parameter(scales(2 * self.size, hidden, self.block, local))
            self.w2_scale_inv = self._parameter(scales(hidden, self.size, self.block, local))
        self.up_first = False

    def _parameter(self, data: torch.Tensor) -> nn.Parameter:
        parameter = nn.Parameter(data, requires_grad=False)
        parameter.weight_loader = self.weight_loader  # type: ignore[attr-defined]
        return parameter

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
            rows = expert.shape[0] // 2  # of the weight, or of its scales
            half = expert.narrow(0, 0 if shard_id == "w1" else rows, rows)
            copy_exactly(half, shard(loaded_weight, 0, self.tp, self.tp_size))
        return True if return_success else None

    def process_weights_after_loading(self) -> None:
        """Put up before gate. Not idempotent: doing it to processed weights undoes it."""
        for tensor in [self.w13, self.w13_scale_inv] if self.block else [self.w13]:
            gate, up = tensor.data.clone().chunk(2, dim=1)
            tensor.data.copy_(torch.cat([up, gate], dim=1))
        self.up_first = True

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """`x`: tokens x hidden; `weights`, `chosen`: tokens x top_k."""
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            local = self.local_of[expert]
            if local < 0:
                continue
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            first, second = functional.linear(x[token], self._dense("w13", local)).chunk(2, dim=-1)
            gate, up = (second, first) if self.up_first else (first, second)
            result = functional.linear(functional.silu(gate) * up, self._dense("w2", local))
            out.index_add_(0, token, (result * weights[token, slot, None]).to(out.dtype))
        return out

    def _dense(self, name: str, local: int) -> torch.Tensor:
        weight = self.get_parameter(name)[local]
        if not self.block:
            return weight
        return dequantize(weight, self.get_parameter(f"{name}_scale_inv")[local], self.block, self.dtype)


class SparseMLP(nn.Module):
    """A router and its experts (Qwen3-MoE)."""

    def __init__(self, config: ModelConfig, context: ParallelContext) -> None:
        super().__init__()
        self.context = context
        self.top_k = config.experts_per_token
        self.normalize = config.normalize_experts
        self.gate = nn.Linear(config.hidden_size, config.experts, bias=False)
        self.gate.weight.requires_grad_(False)
        self.experts = Experts(config, context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores = functional.softmax(self.gate(flat), dim=-1, dtype=torch.float)
        weights, chosen = torch.topk(scores, self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        out = self.experts(flat, weights.to(x.dtype), chosen)
        return self.context.collectives.all_reduce(out).reshape(x.shape)
