"""Writes to model tensors that `load_weights` makes itself, seen as they are dispatched.

Active only while a load runs outside any weight loader, and only where the contract has direct writes (or when asked
for), and around calls that the contract does not know, to see whether they write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from probe_cli.model.dispatch import DispatchMode, mutated_arguments, tensors_in

__all__ = ["WriteWatch"]


class WriteWatch(DispatchMode):
    """`stand_in` is asked for each tensor argument (it may put a staging tensor in its place). `on_write` is told of
    the tensors that an operator is about to write to, and of all that it is given; unless it returns False, the
    operator runs, and `wrote` is called."""

    def __init__(
        self,
        stand_in: Callable[[torch.Tensor], torch.Tensor],
        on_write: Callable[[list[torch.Tensor], list[torch.Tensor]], bool],
        wrote: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._stand_in = stand_in
        self._on_write = on_write
        self._wrote = wrote

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        args = self._replaced(args)
        kwargs = {name: self._replaced(value) for name, value in kwargs.items()}
        positions = mutated_arguments(func)
        if not positions:
            return func(*args, **kwargs)
        written = tensors_in(*(args[at] if at < len(args) else kwargs.get(name) for at, name in positions))
        if written and not self._on_write(written, tensors_in(args, kwargs)):
            return args[0] if func._schema.returns else None
        result = func(*args, **kwargs)
        if written and self._wrote is not None:
            self._wrote()
        return result

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._stand_in(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._replaced(item) for item in value)
        return value
