"""Watching operators as they are dispatched: the mode, and what an operator is given and writes to."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DispatchMode", "mutated_arguments", "tensors_in"]


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
