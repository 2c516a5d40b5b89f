"""See every call of every `weight_loader`, without touching a single parameter.

While an interception is active, `torch.Tensor` has a data descriptor named `weight_loader`, which takes precedence over
the attribute in a parameter's own `__dict__` (and over the property that a subclass defines, e.g. vLLM's
`BasevLLMParameter`, 0.32 and 0.33). Reading the attribute gives the loader wrapped; setting it stores the plain loader where it
was always stored. So loaders that are replaced, and parameters that appear during the load, are seen as well, a parameter without
a loader still has none, and leaving the interception leaves nothing behind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from types import TracebackType
from typing import Any

import torch
from torch import nn

from probe_cli.errors import ProbeError

__all__ = ["InterceptedLoader", "LoaderInterception", "LoaderSites", "plain_loader"]

_ATTRIBUTE = "weight_loader"
_MISSING = object()

#: Called instead of a loader with (loader, parameter or None, args, kwargs); returns what the loader returns.
OnCall = Callable[[Callable[..., object], "torch.Tensor | None", tuple[Any, ...], dict[str, Any]], object]


class InterceptedLoader:
    """A loader that reports its calls. Looks like the loader it wraps; outlives its interception as a plain pass-through."""

    __slots__ = ("__wrapped__", "_interception", "_parameter")

    def __init__(
        self, loader: Callable[..., object], parameter: torch.Tensor | None, interception: LoaderInterception
    ) -> None:
        self.__wrapped__ = loader
        self._parameter = parameter
        self._interception = interception

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        interception = self._interception
        if interception.thread != get_ident():
            if interception.is_awaited_elsewhere(self._parameter, args):
                return interception.elsewhere(self.__wrapped__, self._parameter, args, kwargs)  # type: ignore[misc]
            return self.__wrapped__(*args, **kwargs)
        return interception.on_call(self.__wrapped__, self._parameter, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in InterceptedLoader.__slots__:  # not yet set: while it is copied
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __eq__(self, other: object) -> bool:
        return bool(self.__wrapped__ == plain_loader(other))

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)


def plain_loader(loader: Any) -> Any:
    """The loader itself, without the wrapping of any interception."""
    while isinstance(loader, InterceptedLoader):
        loader = loader.__wrapped__
    return loader


class _Descriptor:
    """Stands in for `weight_loader` on one class; `original` is what the class had under that name."""

    def __init__(self, interception: LoaderInterception, original: Any) -> None:
        self.interception = interception
        self.original = original
        self._stores = hasattr(type(original), "__set__")

    def __get__(self, instance: torch.Tensor | None, owner: type) -> Any:
        if instance is None:
            return self._from_class(None, owner)
        if self._stores:
            loader = self.original.__get__(instance, owner)
        else:
            loader = instance.__dict__.get(_ATTRIBUTE, _MISSING)
            if loader is _MISSING:
                loader = self._from_class(instance, owner)
        interception = self.interception
        key = id(instance)
        if interception.thread != get_ident() and not interception.is_awaited_elsewhere(instance, ()):
            return loader
        known = interception.known.get(key)
        if known is not None and known.__wrapped__ is loader:
            return known
        if not callable(loader):
            return loader
        made = InterceptedLoader(loader, instance, interception)
        if key in interception.known:
            interception.known[key] = made
        return made

    def __set__(self, instance: torch.Tensor, value: Any) -> None:
        value = plain_loader(value)
        if self._stores:
            self.original.__set__(instance, value)
        else:
            instance.__dict__[_ATTRIBUTE] = value

    def __delete__(self, instance: torch.Tensor) -> None:
        if hasattr(type(self.original), "__delete__"):
            self.original.__delete__(instance)
        elif instance.__dict__.pop(_ATTRIBUTE, _MISSING) is _MISSING:
            raise AttributeError(_ATTRIBUTE)

    def _from_class(self, instance: torch.Tensor | None, owner: type) -> Any:
        if self.original is _MISSING:
            raise AttributeError(f"type object {owner.__name__!r} has no attribute {_ATTRIBUTE!r}")
        get = getattr(type(self.original), "__get__", None)
        return get(self.original, instance, owner) if get else self.original


class LoaderInterception:
    """Context manager: inside it, in the thread that entered it, every loader call goes through `on_call`.

    Calls in other threads are not for it, unless they are for one of `tensors` and there is an `elsewhere` to give them to.

    `tensors` are those that are expected, whose classes may define `weight_loader` themselves; `default_loaders` are
    module-level functions that load parameters without a loader of their own: they are replaced under every name they
    were imported to, for the duration. `sites` remembers those names for whoever intercepts again and again; they are
    looked for anew when a module has been imported since.
    """

    def __init__(
        self,
        on_call: OnCall,
        tensors: Iterable[torch.Tensor] = (),
        default_loaders: Sequence[Callable[..., object]] = (),
        sites: LoaderSites | None = None,
        elsewhere: OnCall | None = None,
    ) -> None:
        self._sites = LoaderSites() if sites is None else sites
        self.on_call = on_call
        self.elsewhere = elsewhere
        self._classes: dict[type, _Descriptor] = {}
        self._tensors = list(tensors)
        self._pending = {type(tensor) for tensor in self._tensors} | {torch.Tensor, nn.Parameter}
        #: id of each of `tensors` -> its wrapped loader, once that was read. Others may go, and their id be used again.
        self.known: dict[int, InterceptedLoader | None] = dict.fromkeys(map(id, self._tensors))
        self._default_loaders = default_loaders
        self._replaced: list[tuple[dict[str, Any], str, Any, InterceptedLoader]] = []
        #: The thread that entered the context; None outside. Compared at every access of a loader and every call.
        self.thread: int | None = None

    def __enter__(self) -> LoaderInterception:
        if self.thread is not None:
            raise ProbeError("this interception is already active; make one per load")
        self.thread = get_ident()
        try:
            for cls in self._pending:
                self.cover(cls)
            self._replace_default_loaders()
        except BaseException:
            self._restore()
            raise
        return self

    def is_awaited_elsewhere(self, parameter: torch.Tensor | None, args: tuple[Any, ...]) -> bool:
        """Whether a call in another thread, while this is active, is for a tensor that is expected in this one."""
        if self.elsewhere is None or self.thread is None:
            return False
        return id(parameter) in self.known or (bool(args) and id(args[0]) in self.known)

    def cover(self, cls: type) -> None:
        """Make sure that instances of a tensor class are seen; for a class that appears during a load."""
        for base in cls.__mro__:
            if base in self._classes or not issubclass(base, torch.Tensor):
                continue
            original = base.__dict__.get(_ATTRIBUTE, _MISSING)
            if original is _MISSING and base is not torch.Tensor:
                continue
            descriptor = self._classes[base] = _Descriptor(self, original)
            setattr(base, _ATTRIBUTE, descriptor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        self.thread = None
        for namespace, name, function, wrapper in self._replaced:
            if namespace.get(name) is wrapper:
                namespace[name] = function
        self._replaced.clear()
        for cls, descriptor in self._classes.items():
            if cls.__dict__.get(_ATTRIBUTE) is descriptor:
                if descriptor.original is _MISSING:
                    delattr(cls, _ATTRIBUTE)
                else:
                    setattr(cls, _ATTRIBUTE, descriptor.original)
        self._classes.clear()

    def _replace_default_loaders(self) -> None:
        wrappers = {id(loader): InterceptedLoader(loader, None, self) for loader in self._default_loaders}
        if not wrappers:
            return
        for namespace, name in self._sites.find(self._default_loaders):
            value = namespace.get(name)
            wrapper = wrappers.get(id(value))
            if wrapper is not None and value is wrapper.__wrapped__:
                namespace[name] = wrapper
                self._replaced.append((namespace, name, value, wrapper))


class LoaderSites:
    """The module-level names under which default loaders stand, as of the last look."""

    def __init__(self) -> None:
        self._found: list[tuple[dict[str, Any], str]] = []
        self._modules = -1

    def find(self, loaders: Sequence[Callable[..., object]]) -> list[tuple[dict[str, Any], str]]:
        """(module dictionary, name) of each."""
        if self._modules != len(sys.modules):
            wanted = {id(loader) for loader in loaders}
            namespaces = [getattr(module, "__dict__", None) for module in list(sys.modules.values())]
            self._found = [
                (namespace, name)
                for namespace in namespaces
                if isinstance(namespace, dict)
                for name, value in list(namespace.items())
                if id(value) in wanted
            ]
            self._modules = len(sys.modules)
        return self._found
