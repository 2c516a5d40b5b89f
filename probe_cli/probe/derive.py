"""Exact provenance for the operators that move elements without touching them: concatenation, stacking, padding, and
writes through an index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from probe_cli.manifest.schema import View
from probe_cli.probe.provenance import Piece, Read, broadcast, cover, pieces_of, view_of

__all__ = ["derived_reads"]

#: (tensor, view of its storage or None for the tensor itself) -> what it holds.
Reads = Callable[[torch.Tensor, "View | None"], list[Read]]

_MAX_INDEXED = 1 << 14


def derived_reads(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor, reads: Reads
) -> list[Piece] | None:
    """The pieces of `output` that an operator fills, None for an operator that is not known here."""
    rule = _RULES.get(name)
    return None if rule is None else rule(args, kwargs, output, reads)


def _cat(args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor, reads: Reads) -> list[Piece]:
    tensors: Sequence[torch.Tensor] = args[0]
    dim = _argument(args, kwargs, 1, "dim", 0) % max(output.dim(), 1)
    pieces: list[Piece] = []
    start = 0
    for tensor in tensors:
        if tensor.dim() == 1 and tensor.numel() == 0 and output.dim() != 1:
            continue  # torch skips such a legacy empty tensor
        at = view_of(output.narrow(dim, start, tensor.shape[dim]))
        pieces += pieces_of(reads(tensor, None), at, computed=True)
        start += tensor.shape[dim]
    return pieces


def _stack(args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor, reads: Reads) -> list[Piece]:
    dim = _argument(args, kwargs, 1, "dim", 0) % max(output.dim(), 1)
    pieces: list[Piece] = []
    for index, tensor in enumerate(args[0]):
        taken = view_of(tensor.unsqueeze(dim))
        pieces += pieces_of(reads(tensor, taken), view_of(output.narrow(dim, index, 1)), computed=True)
    return pieces


def _pad(args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor, reads: Reads) -> list[Piece] | None:
    tensor, pads = args[0], list(args[1])
    if any(pad < 0 for pad in pads):
        return None
    inner = output
    for index in range(0, len(pads), 2):
        dim = tensor.dim() - 1 - index // 2
        inner = inner.narrow(dim, pads[index], tensor.shape[dim])
    return list(pieces_of(reads(tensor, None), view_of(inner), computed=True))


def _index_put(args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor, reads: Reads) -> list[Piece] | None:
    indices, value = args[1], args[2]
    if _argument(args, kwargs, 3, "accumulate", False) or not indices or indices[0] is None:
        return None
    if any(index is not None for index in indices[1:]):
        return None
    index = indices[0]
    if index.dtype in (torch.bool, torch.uint8) and index.device.type != "meta" and index.dim() == 1:
        index = index.nonzero().flatten()
    return _rows(output, 0, index, value, reads)


def _index_copy(
    args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor, reads: Reads
) -> list[Piece] | None:
    return _rows(output, args[1] % max(output.dim(), 1), args[2], args[3], reads)


def _index_fill(
    args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor, reads: Reads
) -> list[Piece] | None:
    value = args[3]
    if not isinstance(value, torch.Tensor):
        value = torch.empty((), dtype=output.dtype, device="meta")
    return _rows(output, args[1] % max(output.dim(), 1), args[2], value, reads)


def _rows(output: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor, reads: Reads) -> list[Piece] | None:
    """Row `index[i]` of `output` along `dim` gets row i of `value`."""
    if index.device.type == "meta" or index.dim() != 1 or index.numel() > _MAX_INDEXED or index.is_floating_point():
        return None
    shape = list(output.shape)
    shape[dim] = index.numel()
    view = broadcast(view_of(value), shape)
    if view is None:
        return None
    pieces: list[Piece] = []
    for position, row in enumerate(index.tolist()):
        at = view_of(output.narrow(dim, row if row >= 0 else row + output.shape[dim], 1))
        taken = View(
            view.offset + position * view.stride[dim],
            (*view.shape[:dim], 1, *view.shape[dim + 1 :]),
            view.stride,
        )
        found = reads(value, taken)
        if not cover(found, at.shape):
            pieces.append(Piece(-1, at, at, False))  # of what the reads do not reach, a constant is written
        pieces += pieces_of(found, at, computed=False)
    return pieces


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if position < len(args) else kwargs.get(name, default)


_RULES: dict[str, Callable[[tuple[Any, ...], dict[str, Any], torch.Tensor, Reads], list[Piece] | None]] = {
    "aten::cat": _cat,
    "aten::stack": _stack,
    "aten::constant_pad_nd": _pad,
    "aten::index_put_": _index_put,
    "aten::_index_put_impl_": _index_put,
    "aten::index_copy_": _index_copy,
    "aten::index_fill_": _index_fill,
}
