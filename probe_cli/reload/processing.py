"""Post-processing: which hook a layer has, how it is run, and which hooks have run.

An engine plugs in its own by giving a `Processing` to the session.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from torch import nn

__all__ = ["DefaultProcessing", "HookLog", "Processing", "watch_hooks"]

HOOK_NAME = "process_weights_after_loading"


class Processing(Protocol):
    """What follows the load of a layer. Methods run in the thread that loads, without gradients."""

    #: Names of functions that count as hooks when they are called while a layer is processed.
    hook_names: frozenset[str]

    def has_hook(self, name: str, module: nn.Module) -> bool:
        """Whether this layer has post-processing. Asked once, when the session is made."""

    def deferred(self, name: str, module: nn.Module) -> bool:
        """True for a layer that is processed after all others are published (attention over derived weights)."""

    def process(self, name: str, module: nn.Module) -> None:
        """Run the layer's post-processing. Its tensors are in loaded layout and filled; they may be replaced."""


class DefaultProcessing:
    """The layer's own `process_weights_after_loading()`, else `quant_method.process_weights_after_loading(layer)`."""

    hook_names = frozenset({HOOK_NAME})

    def has_hook(self, name: str, module: nn.Module) -> bool:
        return callable(getattr(module, HOOK_NAME, None)) or callable(
            getattr(getattr(module, "quant_method", None), HOOK_NAME, None)
        )

    def deferred(self, name: str, module: nn.Module) -> bool:
        return False

    def process(self, name: str, module: nn.Module) -> None:
        own = getattr(module, HOOK_NAME, None)
        if callable(own):
            own()
        quant_method = getattr(module, "quant_method", None)
        hook = getattr(quant_method, HOOK_NAME, None)
        if callable(hook):
            hook(module)


#: Layer name -> hooks that ran on it (`module.Class.function`), with how often.
HookLog = dict[str, Counter[str]]


@contextmanager
def watch_hooks(names_of_modules: Mapping[nn.Module, str], hook_names: frozenset[str]) -> Iterator[HookLog]:
    """Note every call of a function with one of these names, also on objects that processing makes on its way.

    A call belongs to the first module of the model among its arguments, else to the layer of the call around it. Only
    this thread is watched.
    """
    log: HookLog = {}
    layers: list[str] = []
    profiled: list[FrameType] = []
    previous = sys.getprofile()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_name not in hook_names:
            return
        if event == "call":
            arguments = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
            found = [
                names_of_modules[value]
                for value in arguments
                if isinstance(value, nn.Module) and value in names_of_modules
            ]
            layer = found[0] if found else (layers[-1] if layers else "")
            layers.append(layer)
            profiled.append(frame)
            owner = type(arguments[0]) if arguments and arguments[0] is not None else None
            where = f"{owner.__module__}.{owner.__qualname__}" if owner is not None else frame.f_globals["__name__"]
            log.setdefault(layer, Counter())[f"{where}.{code.co_name}"] += 1
        elif event == "return" and profiled and profiled[-1] is frame:
            profiled.pop()
            layers.pop()

    sys.setprofile(profile)
    try:
        yield log
    finally:
        # A profiler written in C (cProfile) is no function and cannot be set again from here.
        sys.setprofile(previous if callable(previous) else None)
        profiled.clear()
