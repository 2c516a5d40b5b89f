"""Watching operators as they are dispatched: the mode, and what an operator is given and writes to."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OVERWRITES", "DispatchMode", "accumulates", "mutated_arguments", "tensors_in"]

#: In-place operators that do not read what they overwrite.
OVERWRITES = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "_foreach_copy_"}
    | {"_foreach_zero_"}
)
#: Those that overwrite some elements, unless they are told to accumulate, and leave the others.
_SELECTIVE = frozenset(
    {"index_copy_", "index_fill_", "index_put_", "_index_put_impl_", "put_", "scatter_", "masked_fill_"}
    | {"masked_scatter_", "fill_diagonal_"}
)


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that sees every operator as it is."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would wrap every dispatched operator in dynamo's "disable", and import dynamo for it: seconds, and then
        # several times the cost of watching.
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


_mutated: dict[OpOverload, tuple[tuple[int, str], ...]] = {}


def mutated_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """(position, name) of each argument that an operator writes to."""
    found = _mutated.get(func)
    if found is None:
        found = _mutated[func] = tuple(
            (index, argument.name)
            for index, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
    return found


def accumulates(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what an operator of torch writes is made of what was there before, as with `add_`."""
    name = func._schema.name
    if not name.startswith("aten::") or not mutated_arguments(func):
        return False
    base = name.removeprefix("aten::")
    if base in OVERWRITES or any(argument.is_out for argument in func._schema.arguments):
        return False
    if base not in _SELECTIVE:
        return True
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs
    return bool(given.get("accumulate")) or "reduce" in given


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """All tensors among values, in lists, tuples and dicts too, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found
