"""What an operator does to its arguments, read from its schema once and remembered."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = ["Kind", "OpInfo", "op_info", "tensors_in"]

aten = torch.ops.aten


class Kind(enum.Enum):
    """How the recorder treats an operator."""

    #: Returns a view: provenance follows the storage.
    VIEW = enum.auto()
    #: Returns something new, changes nothing.
    PURE = enum.auto()
    #: Writes to some of its arguments.
    MUTATE = enum.auto()
    #: Hands back a value to Python.
    VALUE = enum.auto()


_VALUE_OPS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.allclose.default}

#: New tensors that take only geometry from their arguments.
_GEOMETRY_ONLY = frozenset(
    {
        "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
        "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
    }
)  # fmt: skip

#: One output element for each input element, in place; not tagged pointwise by torch.
_ELEMENTWISE = frozenset({"clone", "_to_copy", "copy", "contiguous", "lift_fresh_copy", "view_copy", "alias_copy"})


@dataclass(frozen=True)
class OpInfo:
    """`mutated`: (position, name) of each argument that is written to. `elementwise`: each output element is made of the
    input elements at the same (broadcast) place. `geometry_only`: no input element is read."""

    kind: Kind
    mutated: tuple[tuple[int, str], ...]
    elementwise: bool
    geometry_only: bool
    name: str


_known: dict[OpOverload, OpInfo] = {}


def op_info(func: OpOverload) -> OpInfo:
    """The (cached) description of an operator."""
    info = _known.get(func)
    if info is None:
        info = _known[func] = _describe(func)
    return info


def _describe(func: OpOverload) -> OpInfo:
    schema = func._schema
    mutated = tuple(
        (index, arg.name)
        for index, arg in enumerate(schema.arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    )
    base = schema.name.split("::")[-1]
    if func in _VALUE_OPS:
        kind = Kind.VALUE
    elif mutated:
        kind = Kind.MUTATE
    elif schema.returns and all(r.alias_info is not None for r in schema.returns):
        kind = Kind.VIEW
    else:
        kind = Kind.PURE
    elementwise = base in _ELEMENTWISE or torch.Tag.pointwise in func.tags
    return OpInfo(kind, mutated, elementwise, base in _GEOMETRY_ONLY, schema.name)


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """All tensors among arguments, one level of lists and dicts deep, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found
