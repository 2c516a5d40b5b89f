"""From a loader call to its selectors: bind the arguments to the loader's signature, apply the defaults, keep what is
not a tensor. The same call gives the same selectors however it is spelled."""

from __future__ import annotations

import enum
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from probe_cli.errors import ProbeError

__all__ = ["DEFAULT_CONTROL_FLAGS", "Binder", "BoundCall", "loader_name"]

#: Arguments that steer a call but select no part of a tensor (vLLM FusedMoE.weight_loader, 0.32 and 0.33).
DEFAULT_CONTROL_FLAGS = frozenset({"return_success"})


@dataclass(frozen=True)
class BoundCall:
    """A loader call with its arguments sorted out. `tensors` are in order of the signature, the parameter among them."""

    tensors: tuple[torch.Tensor, ...]
    #: The argument of each of them.
    names: tuple[str, ...]
    #: JSON values; an argument whose value is None selects nothing and is left out.
    selectors: dict[str, Any]


class _Plan:
    """The signature of one loader, compiled for binding thousands of calls."""

    __slots__ = ("callee", "defaults", "names", "preset_args", "preset_kwargs", "var_keyword", "var_positional")

    def __init__(self, loader: Callable[..., object]) -> None:
        preset_args: tuple[object, ...] = ()
        preset_kwargs: dict[str, object] = {}
        callee: Any = loader
        while isinstance(callee, functools.partial):
            preset_args = callee.args + preset_args
            preset_kwargs = {**callee.keywords, **preset_kwargs}
            callee = callee.func
        try:
            parameters = list(inspect.signature(callee).parameters.values())
        except (TypeError, ValueError):
            raise ProbeError(
                f"weight loader {loader_name(loader)} has no readable signature",
                hint="give the loader a Python signature; selectors are found from it",
            ) from None
        kinds = inspect.Parameter
        self.callee = callee
        self.preset_args = preset_args
        self.preset_kwargs = preset_kwargs
        self.names = tuple(p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD))
        self.defaults = {p.name: p.default for p in parameters if p.default is not kinds.empty}
        self.var_positional = next((p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL), None)
        self.var_keyword = next((p.name for p in parameters if p.kind is kinds.VAR_KEYWORD), None)

    def bind(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Name -> value, defaults applied. The loader itself judges whether the call is legal."""
        if self.preset_args:
            args = self.preset_args + args
        bound = dict(zip(self.names, args))
        if len(args) > len(self.names) and self.var_positional is not None:
            bound[self.var_positional] = args[len(self.names) :]
        if self.preset_kwargs:
            bound.update(self.preset_kwargs)
        bound.update(kwargs)
        for name, default in self.defaults.items():
            if name not in bound:
                bound[name] = default
        return bound


class Binder:
    """Binds calls of the loaders of one model. `modules` are those of the model: a module that is passed as an argument
    plays the part of `self` and is no selector."""

    def __init__(self, modules: Mapping[nn.Module, str], control_flags: frozenset[str] = DEFAULT_CONTROL_FLAGS) -> None:
        self._modules = modules
        self._control_flags = control_flags
        self._plans: dict[object, _Plan] = {}
        self._bound_plans: dict[object, _Plan] = {}

    def bind(self, loader: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> BoundCall:
        """Sort out one call. Raises ProbeError for a selector that is no JSON scalar, tuple, enum or dtype."""
        tensors: list[torch.Tensor] = []
        names: list[str] = []
        selectors: dict[str, Any] = {}
        for name, value in self._plan(loader).bind(args, kwargs).items():
            if value is None or name in self._control_flags:
                continue
            kind = type(value)
            if kind is int or kind is str or kind is bool:
                selectors[name] = value
            elif isinstance(value, torch.Tensor):
                tensors.append(value)
                names.append(name)
            elif name == "self" or (isinstance(value, nn.Module) and value in self._modules):
                continue
            elif isinstance(value, (tuple, list)) and any(isinstance(v, torch.Tensor) for v in value):
                given = [v for v in value if isinstance(v, torch.Tensor)]
                tensors += given
                names += [name] * len(given)
                # What else a loader's `*args` hold says which part is loaded; a list of tensors has nothing else.
                rest = tuple(v for v in value if not isinstance(v, (torch.Tensor, nn.Module)))
                if any(v is not None for v in rest):
                    selectors[name] = _selector(rest, loader, name)
            elif not (isinstance(value, tuple) and not value):
                selectors[name] = _selector(value, loader, name)
        return BoundCall(tuple(tensors), tuple(names), selectors)

    def accepts(self, loader: Callable[..., object], name: str) -> bool:
        """Whether the loader knows an argument of that name, e.g. `return_success`."""
        plan = self._plan(loader)
        return name in plan.names or name in plan.defaults or plan.var_keyword is not None

    def _plan(self, loader: Callable[..., object]) -> _Plan:
        # A bound method is a new object at every access; its function is not. The same function unbound takes one more.
        function = getattr(loader, "__func__", None)
        plans, key = (self._plans, loader) if function is None else (self._bound_plans, function)
        try:
            plan = plans.get(key)
        except TypeError:  # an unhashable callable object
            return _Plan(loader)
        if plan is None:
            plan = plans[key] = _Plan(loader)
        return plan


def _selector(value: object, loader: Callable[..., object], name: str) -> Any:
    """The JSON form of a selector value."""
    if isinstance(value, enum.Enum) and value.name is not None:
        return {"enum": f"{type(value).__name__}.{value.name}"}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if value is None or type(value) in (int, str, bool):
        return value
    if type(value) is float:
        if math.isfinite(value):
            return value
    elif isinstance(value, (tuple, list)):
        return [_selector(item, loader, name) for item in value]
    elif isinstance(value, (int, str)):  # subclasses that add nothing to the value
        return int(value) if isinstance(value, int) else str(value)
    raise ProbeError(
        f"weight loader {loader_name(loader)}: argument {name!r} is {_describe(value)}; "
        "a selector must be a JSON scalar, a tuple of them, an enum or a dtype",
        hint="pass what selects the part of the tensor as a plain value, or bind the object as the loader's self",
    )


def _describe(value: object) -> str:
    return (
        f"{value!r} (float)"
        if isinstance(value, float)
        else f"of type {type(value).__module__}.{type(value).__qualname__}"
    )


def loader_name(loader: object) -> str:
    """A loader's qualified name for messages."""
    while isinstance(loader, functools.partial):
        loader = loader.func
    name = getattr(loader, "__qualname__", None)
    return name if isinstance(name, str) else type(loader).__qualname__
