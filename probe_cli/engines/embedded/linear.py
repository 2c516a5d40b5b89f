"""Sharded linear layers with the loaders of a serving engine: column, merged column, fused qkv, row; block FP8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from probe_cli.engines.embedded.config import BlockSize
from probe_cli.engines.embedded.parallel import ParallelContext, shard

__all__ = [
    "BlockFP8",
    "ColumnLinear",
    "FusedLatentLinear",
    "Linear",
    "MergedColumnLinear",
    "QKVLinear",
    "RowLinear",
    "copy_exactly",
    "dequantize",
    "scales",
]


class BlockFP8:
    """Post-processing of block-quantized layers: hosts without an FP8 kernel multiply by a dequantized copy.

    The copy is a buffer that no checkpoint has; it must follow the weight whenever that changes.
    """

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Derive `layer.dense` from weight and scales."""
        weight, scale = layer.get_parameter("weight"), layer.get_parameter("weight_scale_inv")
        dense = dequantize(weight, scale, layer.block, layer.dtype)  # type: ignore[arg-type]
        if layer.dense is None:
            layer.dense = dense
        else:
            layer.dense.copy_(dense)  # type: ignore[operator]


class Linear(nn.Module):
    """A linear layer of `outputs` x `inputs` local elements. With `block`, the weight is FP8 (e4m3) with one float32
    scale (`weight_scale_inv`) for each block of rows x columns."""

    dense: torch.Tensor | None

    def __init__(self, outputs: int, inputs: int, *, bias: bool = False, block: BlockSize | None = None) -> None:
        super().__init__()
        self.block = block
        self.dtype = torch.get_default_dtype()
        self.quant_method = BlockFP8() if block else None
        self.weight = self._parameter(torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn if block else self.dtype))
        if block:
            self.weight_scale_inv = self._parameter(scales(outputs, inputs, block))
        self.bias: nn.Parameter | None = self._parameter(torch.zeros(outputs)) if bias else None
        self.register_buffer("dense", None, persistent=False)

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
        return self.block[0] if self.block and param.ndim == 2 and param.dtype == torch.float32 else 1

    def dense_weight(self) -> torch.Tensor:
        """The weight as it multiplies."""
        if not self.block:
            return self.weight
        if self.dense is not None:
            return self.dense
        return dequantize(self.weight, self.weight_scale_inv, self.block, self.dtype)

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
        # What a checkpoint's tensor must hold, in rows: more of them would be cut off without a word.
        self.rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        super().__init__((self.heads + 2 * self.kv_heads) * head_dim, hidden, **options)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor, loaded_shard_id: str) -> None:
        unit = self.unit(param)
        if loaded_weight.shape[0] != self.rows[loaded_shard_id] // unit:
            raise ValueError(f"{loaded_weight.shape[0]} rows, expected {self.rows[loaded_shard_id] // unit}")
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
    """Columns are spread over the ranks; the outputs are summed, then the replicated bias is added."""

    def __init__(self, outputs: int, inputs: int, context: ParallelContext, **options: Any) -> None:
        self.context = context
        super().__init__(outputs, inputs // context.tp_size, **options)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        if param.ndim == 1:
            copy_exactly(param.data, loaded_weight)
        else:
            copy_exactly(param.data, shard(loaded_weight, -1, self.context.tp, self.context.tp_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.context.collectives.all_reduce(functional.linear(x, self.dense_weight()))
        return out if self.bias is None else out + self.bias


class FusedLatentLinear(Linear):
    """The replicated down-projections of queries and of keys and values in one. `load_weights` joins the two tensors
    and calls the loader once (vLLM, DeepSeek's `fused_qkv_a_proj`)."""

    def __init__(self, hidden: int, q_rank: int, kv_rank: int) -> None:
        self.ranks = (q_rank, kv_rank)
        super().__init__(q_rank + kv_rank, hidden)

    def split(self, latent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The latent of the queries, and that of keys and values."""
        return torch.split(latent, list(self.ranks), dim=-1)


def scales(outputs: int, inputs: int, block: BlockSize, *leading: int) -> torch.Tensor:
    """Room for the scales of a weight: one float32 for each block, the last ones of a row or column may be cut."""
    return torch.empty(*leading, -(-outputs // block[0]), -(-inputs // block[1]), dtype=torch.float32)


def dequantize(weight: torch.Tensor, scale: torch.Tensor, block: BlockSize, dtype: torch.dtype) -> torch.Tensor:
    """A block FP8 weight (rows x columns, perhaps with leading dimensions) as `dtype`."""
    wide = scale.repeat_interleave(block[0], -2)[..., : weight.shape[-2], :]
    wide = wide.repeat_interleave(block[1], -1)[..., : weight.shape[-1]]
    return (weight.float() * wide).to(dtype)


def copy_exactly(target: torch.Tensor, loaded: torch.Tensor) -> None:
    """Copy without broadcasting: a tensor of another shape is an error."""
    if target.shape != loaded.shape:
        raise ValueError(f"shape {list(loaded.shape)} does not fit {list(target.shape)}")
    target.copy_(loaded)
