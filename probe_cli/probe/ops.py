"""What an operator does to its arguments, read from its schema once and remembered."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from probe_cli.model.dispatch import mutated_arguments

__all__ = ["Kind", "OpInfo", "depends_on_data", "needs_data", "op_info", "to_meta"]

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
    #: Changes the shape or the storage of a tensor object, not its elements.
    GEOMETRY = enum.auto()


_VALUE_OPS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.allclose.default}

#: In-place operators that write only some elements of what they are given.
_PARTIAL = frozenset(
    {
        "_index_put_impl_", "index_put_", "index_copy_", "index_add_", "index_fill_", "index_reduce_", "put_", "scatter_",
        "scatter_add_", "scatter_reduce_", "masked_fill_", "masked_scatter_", "fill_diagonal_", "embedding_renorm_",
    }
)  # fmt: skip

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
    input elements at the same (broadcast) place. `geometry_only`: no input element is read. `partial`: it may leave
    elements of what it writes to as they are. `sized_by_data`: the shape of the result depends on values. `silent`: it
    returns nothing and says of no argument that it writes to it. `foreach`: it works on lists, tensor by tensor.
    `out`: it writes its result to `out=`."""

    kind: Kind
    mutated: tuple[tuple[int, str], ...]
    elementwise: bool
    geometry_only: bool
    name: str
    partial: bool = False
    sized_by_data: bool = False
    silent: bool = False
    foreach: bool = False
    out: bool = False


_known: dict[OpOverload, OpInfo] = {}


def op_info(func: OpOverload) -> OpInfo:
    """The (cached) description of an operator."""
    info = _known.get(func)
    if info is None:
        info = _known[func] = _describe(func)
    return info


def _describe(func: OpOverload) -> OpInfo:
    schema = func._schema
    mutated = mutated_arguments(func)
    base = schema.name.split("::")[-1]
    ours = schema.name.startswith(("aten::", "prims::", "prim::"))
    if func in _VALUE_OPS or (torch.Tag.data_dependent_output in func.tags and not mutated):
        kind = Kind.VALUE
    elif torch.Tag.inplace_view in func.tags:
        kind = Kind.GEOMETRY
    elif mutated:
        kind = Kind.MUTATE
    elif schema.returns and all(r.alias_info is not None for r in schema.returns) and base != "lift_fresh":
        kind = Kind.VIEW
    else:
        kind = Kind.PURE
    elementwise = base in _ELEMENTWISE or torch.Tag.pointwise in func.tags
    return OpInfo(
        kind,
        mutated,
        elementwise,
        base in _GEOMETRY_ONLY,
        schema.name,
        partial=bool(mutated) and (base in _PARTIAL or not ours),
        sized_by_data=torch.Tag.dynamic_output_shape in func.tags,
        silent=not mutated and not schema.returns and not ours,
        foreach=base.startswith("_foreach_"),
        out=any(arg.is_out for arg in schema.arguments),
    )


def needs_data(targets: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    """Whether real memory would have to be filled from tensors that have no data."""
    return any(t.device.type != "meta" for t in targets) and any(t.device.type == "meta" for t in inputs)


def depends_on_data(error: Exception) -> bool:
    """Whether an operator failed on meta tensors because it needs values."""
    text = str(error)
    return isinstance(error, NotImplementedError) or "meta" in text.lower() or "data-dependent" in text


def to_meta(value: Any, *, fresh: bool = False) -> Any:
    """The arguments of an operator with every tensor on meta; `fresh` makes new ones even of those that are there."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta" and not fresh:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(to_meta(item, fresh=fresh) for item in value)
    if isinstance(value, dict):
        return {name: to_meta(item, fresh=fresh) for name, item in value.items()}
    return value
