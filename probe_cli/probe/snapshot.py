"""Leave a model as it was found: every attribute, parameter, buffer, loader, flag and container, by identity.

Writes never reach a tensor in the first place. What loading code changes besides is Python state: attributes that it sets,
parameters that it replaces, lists and dicts that it appends to. All of that is put back.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

__all__ = ["ModelSnapshot"]

_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, torch.dtype)
_UNSET = object()

#: The getset descriptor of C++, whatever `torch.Tensor` shows under that name.
_DATA: Any = vars(torch._C.TensorBase)["data"]


class ModelSnapshot:
    """The state of a model at one moment; `restore` brings it back, in place."""

    def __init__(self, model: nn.Module) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, object] = {}
        for module in model.modules():
            self._take(module)
        self._versions: list[tuple[torch.Tensor, int]] = [
            (value, value._version)
            for value in self._seen.values()
            if isinstance(value, torch.Tensor) and not value.is_inference()
        ]

    def restore(self) -> None:
        """Put everything back. Safe to call more than once."""
        for undo in self._undo:
            undo()
        for tensor, version in self._versions:
            if tensor._version != version:
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))

    def _take(self, value: Any) -> None:
        if isinstance(value, _LEAVES) or id(value) in self._seen:
            return
        pending = [value]
        while pending:
            item = pending.pop()
            if isinstance(item, _LEAVES) or id(item) in self._seen:
                continue
            self._seen[id(item)] = item  # keeps it alive, so that the id stays its own
            pending += self._remember(item)

    def _remember(self, item: Any) -> list[Any]:
        """Note how to restore one object; returns what it holds."""
        if isinstance(item, torch.Tensor):
            self._undo.append(_tensor_restorer(item))
            return [item.__dict__] if getattr(item, "__dict__", None) else []
        if isinstance(item, dict):
            self._undo.append(_dict_restorer(item))
            return list(item.values())
        if isinstance(item, list):
            self._undo.append(_list_restorer(item))
            return list(item)
        if isinstance(item, set):
            self._undo.append(_set_restorer(item))
            return []
        if isinstance(item, (deque, bytearray)):
            self._undo.append(_sequence_restorer(item))
            return list(item) if isinstance(item, deque) else []
        if isinstance(item, (tuple, frozenset)):
            return list(item)
        if isinstance(item, MethodType):
            return [item.__self__]
        if isinstance(item, functools.partial):
            return [item.func, item.args, item.keywords]
        if isinstance(item, FunctionType):
            cells = item.__closure__ or ()
            self._undo += [_cell_restorer(cell) for cell in cells]
            return [item.__dict__, *(_contents(cell) for cell in cells)]
        if type(item).__module__ == "numpy" and hasattr(item, "flags") and item.flags.writeable:
            self._undo.append(_array_restorer(item))
            return []
        module = type(item).__module__
        if isinstance(item, nn.Module) or not module.startswith(("torch.", "builtins", "collections", "threading")):
            attributes = getattr(item, "__dict__", None)
            slots = _slots_of(item)
            if slots:
                self._undo.append(_slots_restorer(item, slots))
            return [*slots.values(), *([attributes] if isinstance(attributes, dict) else [])]
        return []


def _tensor_restorer(tensor: torch.Tensor) -> Callable[[], None]:
    # An alias of the same storage with the same geometry: enough to point the tensor back to it.
    data = _DATA.__get__(tensor)
    requires_grad, grad, is_leaf = (tensor.requires_grad, tensor.grad if tensor.is_leaf else None, tensor.is_leaf)
    had_dict = dict(getattr(tensor, "__dict__", {}))

    def restore() -> None:
        if (
            tensor.untyped_storage()._cdata != data.untyped_storage()._cdata
            or tensor.shape != data.shape
            or tensor.stride() != data.stride()
            or tensor.storage_offset() != data.storage_offset()
            or tensor.dtype != data.dtype
        ):
            _DATA.__set__(tensor, data)
        if is_leaf and tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        if is_leaf and tensor.grad is not grad:
            tensor.grad = grad
        attributes = getattr(tensor, "__dict__", None)
        if attributes is not None and attributes.keys() - had_dict.keys():
            for name in attributes.keys() - had_dict.keys():
                del attributes[name]

    return restore


def _dict_restorer(item: dict[Any, Any]) -> Callable[[], None]:
    copy = list(item.items())

    def restore() -> None:
        now = list(item.items())
        if len(now) == len(copy) and all(k is a and v is b for (k, v), (a, b) in zip(now, copy)):
            return
        item.clear()
        for key, value in copy:
            item[key] = value

    return restore


def _list_restorer(item: list[Any]) -> Callable[[], None]:
    copy = list(item)

    def restore() -> None:
        if len(item) != len(copy) or any(a is not b for a, b in zip(item, copy)):
            item[:] = copy

    return restore


def _set_restorer(item: set[Any]) -> Callable[[], None]:
    copy = set(item)

    def restore() -> None:
        if item != copy:
            item.clear()
            item.update(copy)

    return restore


def _sequence_restorer(item: Any) -> Callable[[], None]:
    copy = list(item)

    def restore() -> None:
        if len(item) != len(copy) or any(a is not b for a, b in zip(item, copy)):
            item.clear()
            item.extend(copy)

    return restore


def _array_restorer(item: Any) -> Callable[[], None]:
    copy = item.copy()

    def restore() -> None:
        if item.shape == copy.shape and item.tobytes() != copy.tobytes():
            item[...] = copy

    return restore


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _cell_restorer(cell: CellType) -> Callable[[], None]:
    try:
        before = cell.cell_contents
    except ValueError:
        before = _UNSET

    def restore() -> None:
        if before is not _UNSET and _contents(cell) is not before:
            cell.cell_contents = before

    return restore


def _slots_of(item: Any) -> dict[str, Any]:
    """The filled slots of an object, by name."""
    slots: dict[str, Any] = {}
    for cls in type(item).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                value = getattr(item, name, _UNSET)
                if value is not _UNSET:
                    slots[name] = value
    return slots


def _slots_restorer(item: Any, slots: dict[str, Any]) -> Callable[[], None]:
    def restore() -> None:
        for name, value in slots.items():
            if getattr(item, name, _UNSET) is not value:
                object.__setattr__(item, name, value)

    return restore
