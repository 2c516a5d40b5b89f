"""What post-processing keeps outside parameters and buffers: plain attributes of layers and of the helpers they hold.

Three things are done with it. What the cold load's processing changed is *undone* before a reload's processing, so
that it starts from the same state ("the kernel does not exist yet"). What a failed update changed is put back. And
after processing the new values are *settled* into the tensors that serving already points to.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

__all__ = [
    "MISSING",
    "PLAIN_TYPES",
    "Change",
    "StateSnapshot",
    "current_value",
    "enterable",
    "holdings",
    "items_of",
    "put_value",
    "same_spec",
    "settle",
]

MISSING: Any = object()

#: Attributes of a module that hold its registered tensors, children and hooks; the runtime handles those itself.
_OWN = frozenset(nn.Module().__dict__) - {"training"}
_OPAQUE = (torch.Tensor, nn.Module, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, enum.Enum)
#: Types of most attributes, which hold neither a tensor nor a number made from one.
PLAIN_TYPES: frozenset[type] = frozenset(
    {bool, int, str, bytes, type, type(None), torch.dtype, torch.device, torch.Size}
    | {FunctionType, MethodType, BuiltinFunctionType, ModuleType}
)
_ATOMS = PLAIN_TYPES | {float, tuple, torch.Tensor, nn.Parameter}
_MAX_DEPTH = 4
_MAX_OBJECTS = 400


@dataclass(frozen=True, eq=False)
class Change:
    """One attribute (or item) that processing changed: who holds it, under which name, and what was there before."""

    holder: Any
    name: Any
    before: Any
    path: str

    def undo(self) -> None:
        """Put back what was there before."""
        put_value(self.holder, self.name, self.before)


class StateSnapshot:
    """Shallow copies of the attributes of a layer and of the helper objects it reaches.

    Helpers are plain objects, lists and dicts within a few steps; modules, tensors, functions and classes are not
    entered. `shared` are helpers that earlier snapshots took, which must be kept as long as this one: they are left out
    here, and what this one takes is added.
    """

    def __init__(self, module: nn.Module, shared: set[int] | None = None) -> None:
        self.module = module
        self._holders: list[tuple[Any, dict[Any, Any], str]] = []
        self._seen: set[int] = set()
        #: Only what modules hold themselves: from there each helper is entered as deep as any other layer would.
        self._shared: set[int] = set() if shared is None else shared
        self._visit(module, "", 0)

    def changes(self) -> list[Change]:
        """What differs now, in what was there when the snapshot was taken. Values are compared by identity."""
        found: list[Change] = []
        for holder, before, path in self._holders:
            now = _items(holder)
            for name in {**before, **now}:
                old, new = before.get(name, MISSING), now.get(name, MISSING)
                if old is not new and not (_plain(old) and type(old) is type(new) and old == new):
                    found.append(Change(holder, name, old, _join(path, name)))
        return found

    def restore(self) -> None:
        """Undo everything that changed since."""
        for change in self.changes():
            change.undo()

    def _visit(self, holder: Any, path: str, depth: int) -> None:
        if id(holder) in self._seen or len(self._holders) >= _MAX_OBJECTS:
            return
        if depth and id(holder) in self._shared:
            return
        self._seen.add(id(holder))
        if depth == 1:
            self._shared.add(id(holder))
        items = _items(holder)
        self._holders.append((holder, items, path))
        if depth < _MAX_DEPTH:
            for name, value in items.items():
                if type(value) not in _ATOMS and enterable(value):
                    self._visit(value, _join(path, name), depth + 1)


def enterable(value: Any) -> bool:
    """Whether a value is a helper that can hold state. A module without a tensor of its own or below counts as one:
    vLLM's quantization methods for experts are such modules."""
    kind = type(value)
    if kind in _ATOMS:
        return False
    if kind is list or kind is dict or isinstance(value, (list, dict)):
        return True
    if isinstance(value, nn.Module):
        return _is_tensorless(value)
    return not isinstance(value, _OPAQUE) and isinstance(getattr(value, "__dict__", None), dict)


def items_of(holder: Any, without: frozenset[type] = frozenset()) -> Iterator[tuple[str, Any]]:
    """(path step, value) of what a holder holds, but values of certain types."""
    for name, value in _items(holder).items():
        if type(value) not in without:
            yield _join("", name), value


def holdings(holder: Any) -> list[tuple[Any, Any, Any]]:
    """(holder, name, value) of what a holder holds."""
    return [(holder, name, value) for name, value in _items(holder).items()]


def current_value(holder: Any, name: Any) -> Any:
    """What a holder has under a name; MISSING if nothing."""
    return _items(holder).get(name, MISSING)


def _is_tensorless(module: nn.Module) -> bool:
    return not any(m is not None and (m._parameters or m._buffers) for m in module.modules())


def _items(holder: Any) -> dict[Any, Any]:
    if isinstance(holder, nn.Module):
        items = {name: value for name, value in holder.__dict__.items() if name not in _OWN}
        items.update((n, child) for n, child in holder._modules.items() if child is not None and _is_tensorless(child))
        return items
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, list):
        return dict(enumerate(holder))
    return dict(holder.__dict__)


def put_value(holder: Any, name: Any, value: Any) -> None:
    """Set an attribute (or item) directly, MISSING deletes it."""
    if isinstance(holder, list):
        if value is MISSING:
            if name < len(holder):
                del holder[name:]
        elif name < len(holder):
            holder[name] = value
        else:
            holder.append(value)
        return
    target = holder if isinstance(holder, dict) else holder.__dict__
    if isinstance(holder, nn.Module) and (name in holder._modules or isinstance(value, nn.Module)):
        target = holder._modules
    if value is MISSING:
        target.pop(name, None)
    else:
        target[name] = value


def _join(path: str, name: Any) -> str:
    step = name if isinstance(name, str) and name.isidentifier() else f"[{name!r}]"
    return f"{path}.{step}" if path and not step.startswith("[") else path + step


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch.Size))


#: Told of each attribute whose tensor could not stay where it was: (path, what happened).
Report = Callable[[str, str], None]


def settle(before: Change, live: Any, report: Report) -> None:
    """Make the attribute of a change, which processing has just set, serve from the storage that was `live` there.

    Tensors of the same dtype, shape and strides are copied into the live ones, which are put back; helpers of the
    same type are merged the same way; plain values are taken as they are. A function is kept if what it closes over
    could be settled, else the new one takes its place: a kernel's closure may hold the only copy of packed weights.
    """
    new = _items(before.holder).get(before.name, MISSING)
    put_value(before.holder, before.name, _settled(live, new, before.path, report, set()))


def _settled(live: Any, new: Any, path: str, report: Report, seen: set[int]) -> Any:
    if live is new or live is MISSING or live is None or new is MISSING or new is None:
        return new
    if isinstance(live, torch.Tensor) and isinstance(new, torch.Tensor):
        if same_spec(live, new):
            if live.untyped_storage()._cdata != new.untyped_storage()._cdata:
                live.copy_(new)
                report(path, "settled")
            return live
        report(path, "respecified")
        return new
    if _plain(new) or type(live) is not type(new):
        return new
    if id(new) in seen:
        return live
    seen.add(id(new))
    if isinstance(live, (list, tuple)) and len(live) == len(new):
        values = [_settled(a, b, f"{path}[{i}]", report, seen) for i, (a, b) in enumerate(zip(live, new))]
        if isinstance(live, list):
            live[:] = values
            return live
        return tuple(values) if type(live) is tuple else new
    if enterable(live):
        current = _items(live)
        for name, value in _items(new).items():
            put_value(live, name, _settled(current.get(name, MISSING), value, _join(path, name), report, seen))
        return live
    if isinstance(live, FunctionType) and isinstance(new, FunctionType):
        return _settled_function(live, new, path, report, seen)
    return live if callable(live) else new


def _settled_function(live: FunctionType, new: FunctionType, path: str, report: Report, seen: set[int]) -> Any:
    old_cells, new_cells = live.__closure__ or (), new.__closure__ or ()
    if live.__code__ is not new.__code__ or len(old_cells) != len(new_cells):
        return new
    pairs = list(zip(old_cells, new_cells))
    if not all(_mergeable(a.cell_contents, b.cell_contents) for a, b in pairs):
        return new
    for old, fresh in pairs:
        where = f"{path}.<closure>"
        old.cell_contents = _settled(old.cell_contents, fresh.cell_contents, where, report, seen)
    return live


def _mergeable(live: Any, new: Any) -> bool:
    if live is new:
        return True
    if isinstance(live, torch.Tensor) and isinstance(new, torch.Tensor):
        return same_spec(live, new)
    return _plain(live) and _plain(new)


def same_spec(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same dtype, shape, strides and device."""
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and a.device == b.device
