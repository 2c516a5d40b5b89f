"""The dispatch mode of a replay: no write reaches a tensor that was there before, and every write to a model tensor is
recorded with the source elements it would have brought.

Every operator of the load comes by here. Views are let through: they share their storage, and provenance is kept by
storage. New tensors get an origin. A write to something that the load itself made (scratch) is carried out where that is
possible without data. A write to a tensor of the model is recorded and not carried out. A write to anything else fails
the build.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from probe_cli.checkpoint import Source
from probe_cli.model.dispatch import OVERWRITES, DispatchMode, accumulates, tensors_in
from probe_cli.model.inventory import Inventory
from probe_cli.model.storage import storage_key
from probe_cli.probe.derive import derived_reads
from probe_cli.probe.ledger import Ledger
from probe_cli.probe.ops import Kind, OpInfo, depends_on_data, needs_data, op_info, to_meta
from probe_cli.probe.provenance import Piece, Read, cover, fresh, in_units, pieces_of, view_of
from probe_cli.probe.values import Recipe, ValueStore
from probe_cli.probe.writes import ModelWrite, code_line

__all__ = ["Recorder"]

aten = torch.ops.aten
_COPY = aten.copy_.default
_ITEM = aten._local_scalar_dense.default

_PLAIN_COPIES = frozenset({"copy_", "fill_", "_foreach_copy_"})


class Recorder(Ledger, DispatchMode):
    """See the module docstring. `on_write` gets the model writes of each operator as they happen."""

    def __init__(
        self,
        inventory: Inventory,
        values: ValueStore,
        sources: Sequence[Source],
        on_write: Callable[[list[ModelWrite]], None],
    ) -> None:
        DispatchMode.__init__(self)
        Ledger.__init__(self, inventory, values, sources, on_write)

    # Dispatch

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _COPY:
            target = args[0]
            owners = self.inventory.on_storage(storage_key(target))
            if owners:
                source = args[1]
                if source.shape == target.shape:
                    reads = self._reads(source)
                else:
                    reads = self._elementwise_reads(target, [source], False)
                if target.numel():
                    given = () if reads else tuple(self._given(source))
                    self._record(owners, target, reads, "aten::copy_", given=given)
                return target
        if func is _ITEM:  # expert maps are asked tens of thousands of times
            tensor = args[0]
            if tensor.device.type == "cpu":
                key = storage_key(tensor)
                if key not in self.values.stale and key not in self.origins:
                    return func(tensor)
        info = op_info(func)
        if info.kind is Kind.VIEW:
            return func(*args, **kwargs)
        if info.kind is Kind.MUTATE:
            return self._mutate(func, info, args, kwargs)
        if info.kind is Kind.VALUE:
            return self._value(func, info, args, kwargs)
        if info.kind is Kind.GEOMETRY:
            return self._geometry(func, info, args, kwargs)
        return self._pure(func, info, args, kwargs)

    # Operators that make something new

    def _pure(self, func: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = tensors_in(args, kwargs)
        if not inputs:
            result = func(*args, **kwargs)
            self._adopt_scratch(result)
            return result
        if info.name == "aten::_to_copy" and args[0].device.type == "meta":
            device = kwargs.get("device")
            if device is not None and torch.device(device).type != "meta":
                if self.values.can_follow(storage_key(args[0]), args[0]):
                    args = (self.values.of(args[0]), *args[1:])
                kwargs = {**kwargs, "device": args[0].device}
        if info.sized_by_data:
            self._check_sizes(func, args)
        if info.silent and any(self.inventory.on_storage(storage_key(tensor)) for tensor in inputs):
            raise self.fail(
                f"{info.name} takes {self.describe(inputs[0])}, returns nothing and declares no write, while loading "
                f"{self.loading()}, at {code_line()}",
                hint="declare what the operator writes to (mutates_args); a write that is not declared cannot be seen",
            )
        result = self._run(func, args, kwargs)
        keys = [storage_key(tensor) for tensor in inputs]
        obstacles = [self.values.obstacle(key, tensor) for key, tensor in zip(keys, inputs)]
        obstacle = next((why for why in obstacles if why is not None), None)
        for position, output in enumerate(tensors_in(result)):
            key = storage_key(output)
            if key in self.origins or self.inventory.on_storage(key):
                continue
            origin = self.origins[key] = fresh(output)
            self._keep(output)
            if info.geometry_only:
                continue
            at = view_of(output)
            if info.foreach:
                reads = self._elementwise_reads(output, _paired(args, position), True)
            elif info.elementwise:
                reads = self._elementwise_reads(output, inputs, True)
            else:
                exact = derived_reads(info.name, args, kwargs, output, self._reads)
                if exact is not None:
                    origin.pieces += exact
                    reads = []
                else:
                    reads = self._bounds(inputs)
            origin.pieces += pieces_of(reads, at, computed=True)
            if obstacle is None and output.device.type == "meta":
                self.values.add_recipe(key, Recipe(func, args, kwargs, position))
            elif obstacle is not None:
                self.values.spoil(key, obstacle)
        return result

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on whatever its arguments are: meta, real, or both; for real if it depends on data."""
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            tensors = tensors_in(args, kwargs)
            if not any(tensor.device.type == "meta" for tensor in tensors):
                raise
            if any(tensor.device.type != "meta" for tensor in tensors):
                try:
                    return func(*to_meta(args), **to_meta(kwargs))
                except (RuntimeError, NotImplementedError):
                    pass
            if not depends_on_data(error):
                raise
            return func(*self._real(func, args), **self._real(func, kwargs))

    def _check_sizes(self, func: OpOverload, args: tuple[Any, ...]) -> None:
        """The shape of what comes next depends on values: those of real tensors must be what the load would have."""
        decisive = tensors_in(args)
        if func is aten.index.Tensor:
            decisive = [index for index in tensors_in(args[1]) if index.dtype in (torch.bool, torch.uint8)]
        for tensor in decisive:
            if tensor.device.type != "meta":
                self.real_value(tensor, func._schema.name)

    def _adopt_scratch(self, result: Any) -> None:
        for output in tensors_in(result):
            key = storage_key(output)
            if key not in self.origins and not self.inventory.on_storage(key):
                self.origins[key] = fresh(output)
                self._keep(output)

    # Operators that hand back a value

    def _value(self, func: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*self._real(func, args), **self._real(func, kwargs))

    def _real(self, func: object, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.real_value(value, str(getattr(func, "_schema", func)).split("(")[0])
        if isinstance(value, (list, tuple)):
            return type(value)(self._real(func, item) for item in value)
        if isinstance(value, dict):
            return {name: self._real(func, item) for name, item in value.items()}
        return value

    # Operators that write

    def _mutate(self, func: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        base = info.name.split("::")[-1]
        targets: list[torch.Tensor] = []
        returned: list[Any] = []
        for position, name in info.mutated:
            value = args[position] if position < len(args) else kwargs.get(name)
            returned.append(value)
            targets += tensors_in(value)
        inputs = tensors_in(args, kwargs)
        owners = [self.inventory.on_storage(storage_key(target)) for target in targets]
        for target, found in zip(targets, owners):
            if not found and storage_key(target) not in self.origins:
                raise self.fail(
                    f"{info.name} writes to a {tuple(target.shape)} tensor that is neither the model's nor made by the "
                    f"load, while loading {self.loading()}, at {code_line()}",
                    hint="register the tensor as a parameter or buffer of the model",
                )
        if info.out and any(target.numel() == 0 and not found for target, found in zip(targets, owners)):
            self._size_outputs(func, targets, args, kwargs)
        suppressed = any(owners) or needs_data(targets, inputs)
        if suppressed:
            _rehearse(func, args, kwargs)
        effects = [self._effect(info, base, target, index, args, kwargs) for index, target in enumerate(targets)]
        adds = any(owners) and accumulates(func, args, kwargs)
        followed = all(self.values.can_follow(storage_key(tensor), tensor) for tensor in inputs)
        result: Any = None
        if not suppressed:
            result = self._run(func, args, kwargs)
        for target, found, (pieces, reads, partial) in zip(targets, owners, effects):
            if found and not target.numel():
                continue  # nothing is written
            if found:
                self._accumulating = adds and self._reads_initial(found, target, [*pieces, *reads])
                self._record_pieces(found, target, pieces, info.name) if pieces else self._record(
                    found, target, reads, info.name, partial
                )
                self._accumulating = False
            else:
                spoiled = suppressed or not followed or target.device.type == "meta"
                self._write_scratch(target, pieces, reads, partial, spoiled=spoiled)
        if not suppressed:
            return result
        if not func._schema.returns:
            return None
        return returned[0] if len(func._schema.returns) == 1 else tuple(returned)

    def _size_outputs(
        self, func: OpOverload, targets: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """An empty `out=` of the load's own takes the shape of the result."""
        with _disable_current_modes():
            made = tensors_in(func(*to_meta(args), **to_meta(kwargs)))
            for target, result in zip(targets, made):
                if target.device.type != "meta":
                    target.resize_(result.shape)
                self.origins[storage_key(target)] = fresh(target)

    def _effect(
        self, info: OpInfo, base: str, target: torch.Tensor, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Piece], list[Read], bool]:
        """What a write brings to `target`: pieces where it is known which part is written, else reads over all of it, and
        whether it may leave some of it as it was."""
        inputs = _paired(args, index) if info.foreach else tensors_in(args, kwargs)
        if base in OVERWRITES or info.partial or info.out:
            inputs = [value for value in inputs if value is not target]
        if not info.partial and (info.elementwise or base in _PLAIN_COPIES or info.foreach):
            return [], self._elementwise_reads(target, inputs, base not in _PLAIN_COPIES), False
        pieces = derived_reads(info.name, args, kwargs, target, self._reads)
        if pieces is not None and not info.partial:
            whole = view_of(target)
            pieces = [Piece(-1, whole, whole, False), *pieces]
        if pieces is not None:
            return pieces, [], False
        return [], self._bounds(inputs), info.partial

    def _write_scratch(
        self, target: torch.Tensor, pieces: list[Piece], reads: list[Read], partial: bool, *, spoiled: bool
    ) -> None:
        key = storage_key(target)
        origin = self._own_origin(key)
        self.values.touch(key)
        if origin is None:  # a new storage, made by resizing
            return
        at = in_units(view_of(target), target.dtype, origin.dtype)
        if at is None or (pieces and target.dtype.itemsize != origin.dtype.itemsize):
            at, partial = origin.base, True
            reads = [replace(read, part=None, computed=True, exact=False) for read in reads]
            reads += [
                Read(p.source, p.src, None, True, False, p.src_dtype, p.recalled) for p in pieces if p.source >= 0
            ]
            pieces = []
        if pieces:
            origin.pieces += pieces
        else:
            if partial:
                origin.blur()
                reads = [replace(read, exact=False) for read in reads]
            elif not cover(reads, tuple(target.shape)):
                origin.overwrite(at)
            origin.pieces += pieces_of(reads, at, computed=True)
        if spoiled:
            self.values.spoil(key)

    # Operators that change what a tensor object is

    def _geometry(self, func: OpOverload, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = args[0]
        base = info.name.split("::")[-1]
        if base == "set_":
            owners = self.inventory.owners(target)
            if owners:
                if len(args) < 2:
                    raise self.fail(
                        f"{info.name} empties {self.describe(target)} while loading {self.loading()}, at {code_line()}"
                    )
                with _disable_current_modes():
                    value = torch.empty(0, dtype=target.dtype, device=args[1].device)
                    func(value, *args[1:], **kwargs)
                self.replace_data(owners[0], target, value, info.name)
                return target
        elif base.startswith(("resize_", "_resize_")) and self.inventory.on_storage(storage_key(target)):
            wanted = args[1].shape if isinstance(args[1], torch.Tensor) else args[1]
            if tuple(wanted) != tuple(target.shape):
                raise self.fail(
                    f"{info.name} resizes {self.describe(target)} from {list(target.shape)} to {list(wanted)} while loading "
                    f"{self.loading()}, at {code_line()}",
                    hint="assign a new parameter or `.data` instead",
                )
            return target
        return func(*args, **kwargs)


def _paired(args: tuple[Any, ...], index: int) -> list[torch.Tensor]:
    """What a `_foreach_` operator brings together for one of its tensors."""
    found = [value[index] for value in args if isinstance(value, (list, tuple)) and index < len(value)]
    found += [value for value in args if isinstance(value, torch.Tensor)]
    return [value for value in found if isinstance(value, torch.Tensor)]


def _rehearse(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what the operator would raise (shapes, dtypes) if it were carried out."""
    with _disable_current_modes():
        try:
            func(*to_meta(args, fresh=True), **to_meta(kwargs, fresh=True))
        except (RuntimeError, NotImplementedError) as error:
            if not depends_on_data(error):
                raise
