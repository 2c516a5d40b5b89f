"""What captured graphs see: every tensor that a layer reaches, where it lies, and the Python numbers made from tensors.

A captured graph, or any code that kept an address, goes on reading the storage it saw. So after an update each tensor
that was reachable before has to be where it was, as it was. Numbers that Python code made from a tensor
(`float(scale)`) do not follow the tensor by themselves; they are told by comparing values.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from probe_cli.reload.receipt import Finding
from probe_cli.reload.state import PLAIN_TYPES, enterable, items_of

__all__ = ["TensorMap", "compare", "derived_scalars"]

_MAX_DEPTH = 5
_MAX_OBJECTS = 2000


class Place(NamedTuple):
    """Where a tensor lies and how it is seen."""

    data_ptr: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    reference: weakref.ref[Any]

    @property
    def spec(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}, strides {list(self.stride)}"


class TensorMap:
    """All tensors and numbers reachable from each layer, by layer and path. A tensor counts for the first layer and
    path that reach it through a helper; registered ones count under every name."""

    def __init__(self, layers: dict[str, nn.Module], *, scalars: bool = True) -> None:
        self.places: dict[tuple[str, str], Place] = {}
        self.numbers: dict[tuple[str, str], float] = {}
        #: Values of one-element tensors, for layers that keep numbers beside them.
        self.values: dict[tuple[str, str], float] = {}
        seen: set[int] = set()
        for name, module in layers.items():
            single: list[tuple[str, torch.Tensor]] = []
            numbers = False
            for path, value in _reach(module, seen):
                if isinstance(value, torch.Tensor):
                    self.places[name, path] = _place(value)
                    if value.numel() == 1 and value.device.type != "meta":
                        single.append((path, value))
                elif type(value) is float:
                    self.numbers[name, path] = value
                    numbers = True
            if scalars and numbers:
                self.values.update(((name, path), float(tensor.detach())) for path, tensor in single)


def derived_scalars(layers: TensorMap) -> dict[tuple[str, str], tuple[str, str]]:
    """Numbers that equal a one-element tensor of their layer (0 and 1 aside, which equal too much): number ->
    tensor."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for (layer, path), number in layers.numbers.items():
        for (owner, tensor_path), value in layers.values.items():
            if owner == layer and value == number and number not in (0.0, 1.0):
                found[layer, path] = (owner, tensor_path)
    return found


def compare(before: TensorMap, after: TensorMap, reported: set[tuple[str, str]] = frozenset()) -> list[Finding]:  # type: ignore[assignment]
    """Findings: `moved`, `freed`, `respecified`, `stale`, `refreshed`. What is in `reported` has been told already."""
    findings: list[Finding] = []
    for (layer, path), was in before.places.items():
        now = after.places.get((layer, path))
        if (layer, path) in reported:
            continue
        if now is None:
            if was.reference() is None:
                findings.append(Finding("freed", layer, path, "the tensor that was here is gone, and so is its memory"))
            else:
                findings.append(Finding("moved", layer, path, "nothing is here now; the old tensor is held elsewhere"))
        elif (now.dtype, now.shape, now.stride) != (was.dtype, was.shape, was.stride):
            findings.append(Finding("respecified", layer, path, f"was {was.spec}, is {now.spec}"))
        elif now.data_ptr != was.data_ptr:
            findings.append(Finding("moved", layer, path, f"was at {was.data_ptr:#x}, is at {now.data_ptr:#x}"))
    for (layer, path), (_, tensor_path) in derived_scalars(before).items():
        old, new = before.numbers[layer, path], after.numbers.get((layer, path))
        value = after.values.get((layer, tensor_path))
        if new is not None and new != old and new == value:
            findings.append(
                Finding("refreshed", layer, path, f"{old!r} was made from {tensor_path} and is {new!r} now")
            )
        if new == old and value is not None and value != old:
            message = f"the number {old!r} was made from {tensor_path}, which is {value!r} now"
            findings.append(Finding("stale", layer, path, message))
    return findings


def _place(tensor: torch.Tensor) -> Place:
    pointer = tensor.data_ptr() if tensor.layout is torch.strided and tensor.device.type != "meta" else 0
    stride = tuple(tensor.stride()) if tensor.layout is torch.strided else ()
    return Place(pointer, tensor.dtype, tuple(tensor.shape), stride, weakref.ref(tensor))


def _reach(module: nn.Module, seen: set[int]) -> Iterator[tuple[str, Any]]:
    for registered in (module._parameters, module._buffers):
        for name, tensor in registered.items():
            if tensor is not None:
                yield name, tensor
    stack: list[tuple[str, Any, int]] = [("", module, 0)]
    visited = 0
    while stack and visited < _MAX_OBJECTS:
        path, holder, depth = stack.pop()
        visited += 1
        for step, value in items_of(holder, PLAIN_TYPES):
            where = step if not path else path + step if step[0] == "[" else f"{path}.{step}"
            if isinstance(value, torch.Tensor) or type(value) is float:
                yield where, value
            elif isinstance(value, tuple):
                for index, item in enumerate(value):
                    if isinstance(item, torch.Tensor):
                        yield f"{where}[{index}]", item
            elif depth < _MAX_DEPTH and enterable(value) and id(value) not in seen:
                seen.add(id(value))
                stack.append((where, value, depth + 1))
