"""Sharded linear layers with the loaders of a serving engine: column, merged column, fused qkv, row; block FP8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from probe_cli.engines.embedded.parallel import ParallelContext, shard

__all__ = ["ColumnLinear", "FusedLatentLinear", "Linear", "MergedColumnLinear", "QKVLinear", "RowLinear"]

BlockSize = tuple[int, int]


class Linear(nn.Module):
    """A linear layer of `outputs` x `inputs` local elements. With `block`, the weight is FP8 (e4m3) with one float32
    scale (`weight_scale_inv`) for each block of rows x columns."""

    def __init__(self, outputs: int, inputs: int, *, bias: bool = False, block: BlockSize | None = None) -> None:
        super().__init__()
        self.block = block
        dtype = torch.float8_e4m3fn if block else torch.get_default_dtype()
        self.weight = self._parameter(torch.empty(outputs, inputs, dtype=dtype))
        if block:
            rows, columns = (-(-outputs // block[0]), -(-inputs // block[1]))
            self.weight_scale_inv = self._parameter(torch.empty(rows, columns, dtype=torch.float32))
        self.bias: nn.Parameter | None = self._parameter(torch.zeros(outputs)) if bias else None

    def _parameter(self, data: torch.Tensor) -> nn.Parameter:
        parameter = nn.Parameter(data, requires_grad=False)
        parameter.weight_loader = self.weight_loader  # type: ignore[attr-defined]
        return parameter

    def _load_whole(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        copy_exactly(param.data, loaded_weight)

    #: Called as (param, loaded_weight, *selectors); a plain layer is replicated and copied whole.
    weight_loader: Callable[..., None] = _load_whole

    def unit(self, param: nn.Parameter) -> int:
        """How many rows of the full weight one row of `param` stands for."""
        return self.block[0] if self.block and param is self.weight_scale_inv else 1

    def dense_weight(self) -> torch.Tensor:
        """The weight as it multiplies."""
        if not self.block:
            return self.weight
        scale = self.weight_scale_inv.repeat_interleave(self.block[0], 0)[: self.weight.shape[0]]
        scale = scale.repeat_interleave(self.block[1], 1)[:, : self.weight.shape[1]]
        return (self.weight.float() * scale).to(torch.get_default_dtype())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.dense_weight(), self.bias)


class ColumnLinear(Linear):
    """Rows are spread over the ranks."""

    def __init__(self, outputs: int, inputs: int, context: ParallelContext, **options: Any) -> None:
        self.context = context
        super().__init__(outputs // context.tp_size, inputs, **options)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        copy_exactly(param.data, shard(loaded_weight, 0, self.context.tp, self.context.tp_size))


class MergedColumnLinear(Linear):
    """Several column-parallel weights of equal kind in one (gate and up)."""

    def __init__(self, outputs: Sequence[int], inputs: int, context: ParallelContext, **options: Any) -> None:
        self.context = context
        self.sizes = [size // context.tp_size for size in outputs]
        super().__init__(sum(self.sizes), inputs, **options)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor, loaded_shard_id: int) -> None:
        unit = self.unit(param)
        start, size = sum(self.sizes[:loaded_shard_id]) // unit, self.sizes[loaded_shard_id] // unit
        copy_exactly(param.data.narrow(0, start, size), shard(loaded_weight, 0, self.context.tp, self.context.tp_size))


class QKVLinear(Linear):
    """Query, key and value in one. With more ranks than key/value heads, each of those is on several ranks."""

    def __init__(
        self, hidden: int, head_dim: int, heads: int, kv_heads: int, context: ParallelContext, **options: Any
    ) -> None:
        self.context = context
        self.replicas = max(1, context.tp_size // kv_heads)
        self.heads = heads // context.tp_size
        self.kv_heads = max(1, kv_heads // context.tp_size)
        self.head_dim = head_dim
        super().__init__((self.heads + 2 * self.kv_heads) * head_dim, hidden, **options)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor, loaded_shard_id: str) -> None:
        unit = self.unit(param)
        q, kv = self.heads * self.head_dim // unit, self.kv_heads * self.head_dim // unit
        start = {"q": 0, "k": q, "v": q + kv}[loaded_shard_id]
        size = q if loaded_shard_id == "q" else kv
        index = self.context.tp if loaded_shard_id == "q" else self.context.tp // self.replicas
        copy_exactly(param.data.narrow(0, start, size), loaded_weight.narrow(0, index * size, size))

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of the local heads."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return torch.split(qkv, [q, kv, kv], dim=-1)


class RowLinear(Linear):
    """Columns are spread over the ranks; the outputs are summed."""

    def __init__(self, outputs: int, inputs: int, context: ParallelContext, **options: Any) -> None:
        self.context = context
        super().__init__(outputs, inputs // context.tp_size, **options)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        copy_exactly(param.data, shard(loaded_weight, -1, self.context.tp, self.context.tp_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.context.collectives.all_reduce(super().forward(x))


class FusedLatentLinear(Linear):
    """The replicated down-projections of queries and of keys and values in one. `load_weights` joins the two tensors
    and calls the loader once (vLLM, DeepSeek's `fused_qkv_a_proj`)."""

    def __init__(self, hidden: int, q_rank: int, kv_rank: int) -> None:
        self.ranks = (q_rank, kv_rank)
        super().__init__(q_rank + kv_rank, hidden)

    def split(self, latent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The latent of the queries, and that of keys and values."""
        return torch.split(latent, list(self.ranks), dim=-1)


def copy_exactly(target: torch.Tensor, loaded: torch.Tensor) -> None:
    """Copy without broadcasting: a tensor of another shape is an error."""
    if target.shape != loaded.shape:
        raise ValueError(f"shape {list(loaded.shape)} does not fit {list(target.shape)}")
    target.copy_(loaded)
