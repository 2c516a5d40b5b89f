"""One write that was suppressed, and where in the code it stands."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from probe_cli.manifest.schema import View
from probe_cli.model.inventory import OwnedTensor
from probe_cli.model.storage import byte_range
from probe_cli.probe.provenance import Piece

__all__ = ["ModelWrite", "code_line", "of_piece", "within"]


@dataclass(frozen=True)
class ModelWrite:
    """One suppressed write to a model tensor. `dst` is relative to the tensor, in elements of `dst_dtype` (None: the
    tensor's own); `src` likewise for the source. `source` is None if no source element is read. `recalled`: the elements of
    the source were read back from a tensor of the model, which an earlier write had brought there."""

    owned: OwnedTensor
    dst: View
    source: int | None
    src: View | None
    computed: bool
    exact: bool
    src_dtype: torch.dtype | None
    dst_dtype: torch.dtype | None
    op: str
    recalled: bool = False
    #: The operator may have left some elements of `dst` as they were.
    partial: bool = False
    #: Nothing is read, but the value was handed over in the tensor of these sources (zeroed by the load, say).
    given: tuple[int, ...] = ()
    #: The source was added to what the tensor held before the load.
    accumulates: bool = False


def code_line() -> str:
    """`file:line in function` of the innermost frame that belongs neither to torch nor to this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "probe_cli.probe", "probe_cli.model.")) and name != "torch":
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown line"


def within(own: torch.Tensor, target: torch.Tensor) -> bool:
    if target.shape == own.shape:  # by far the most frequent
        return True
    (low, high), (first, last) = byte_range(target), byte_range(own)
    return first <= low and high <= last


def of_piece(piece: Piece, owned: OwnedTensor, at: View, start: int, dtype: torch.dtype | None, op: str) -> ModelWrite:
    constant = piece.source < 0
    return ModelWrite(
        owned,
        View(at.offset - start, at.shape, at.stride),
        None if constant else piece.source,
        None if constant else piece.src,
        piece.computed,
        piece.exact,
        None if constant else piece.src_dtype,
        dtype,
        op,
        piece.recalled,
    )
