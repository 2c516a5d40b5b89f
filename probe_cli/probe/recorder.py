"""The dispatch mode of a replay: no write reaches a tensor that was there before, and every write to a model tensor is
recorded with the source elements it would have brought.

Every operator of the load comes by here. Views are let through: they share their storage, and provenance is kept by storage. New
tensors get an origin. A write to something that the load itself made (scratch) is carried out where that is possible without data. A
write to a tensor of the model is recorded and not carried out. A write to anything else fails the build.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from probe_cli.checkpoint import Source
from probe_cli.errors import ProbeError
from probe_cli.manifest.schema import View
from probe_cli.model.inventory import Inventory, OwnedTensor, storage_key
from probe_cli.probe.derive import derived_reads
from probe_cli.probe.ops import Kind, OpInfo, op_info, tensors_in
from probe_cli.probe.provenance import Origin, Piece, Read, broadcast, fresh, in_units, pieces_of, view_of
from probe_cli.probe.values import Recipe, ValueStore

__all__ = ["ModelWrite", "Recorder", "code_line"]

aten = torch.ops.aten
_COPY = aten.copy_.default

#: Real memory that a load may make before what it has dropped is let go.
_SCRATCH_BYTES = 64 << 20

#: In-place operators that do not read what they overwrite.
_OVERWRITES = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "_foreach_copy_"}
    | {"_foreach_zero_", "_index_put_impl_", "index_put_", "index_copy_", "index_fill_", "set_"}
)
_PLAIN_COPIES = frozenset({"copy_", "_foreach_copy_"})


@dataclass(frozen=True)
class ModelWrite:
    """One suppressed write to a model tensor. `dst` is relative to the tensor, in elements of `dst_dtype` (None: the
    tensor's own); `src` likewise for the source. `source` is None if no source element is read."""

    owned: OwnedTensor
    dst: View
    source: int | None
    src: View | None
    computed: bool
    exact: bool
    src_dtype: torch.dtype | None
    dst_dtype: torch.dtype | None
    op: str


def code_line() -> str:
    """`file:line in function` of the innermost frame that belongs neither to torch nor to this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "probe_cli.probe", "probe_cli.model.")) and name != "torch":
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown line"


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """See the module docstring. `on_write` gets the model writes of each operator as they happen."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would wrap every dispatched operator in dynamo's "disable": several times the cost of recording it.
        return False

    def __init__(
        self,
        inventory: Inventory,
        values: ValueStore,
        sources: Sequence[Source],
        on_write: Callable[[list[ModelWrite]], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inventory = inventory
        self.values = values
        self.sources = sources
        self.on_write = on_write
        #: By storage. A source stands as its index until something asks for more: most are only declined.
        self.origins: dict[int, Origin | int] = {}
        #: The parameter and the arguments of the loader call that is running.
        self.call: tuple[torch.Tensor | None, tuple[Any, ...]] | None = None
        self.current: int | None = None
        #: The first error, for loading code that swallows exceptions.
        self.failure: ProbeError | None = None
        self._stand_ins: dict[int, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []
        self._real_bytes = 0
        values.source_of = self._source_of

    # Sources

    def add_source(self, index: int, tensor: torch.Tensor) -> None:
        """Know `tensor` (contiguous, with a storage of its own) as source `index`."""
        self.origins[storage_key(tensor)] = index
        self._stand_ins[index] = tensor
        if self._real_bytes > _SCRATCH_BYTES:
            self.forget_scratch()

    def forget_scratch(self) -> None:
        """Let go of what the load made and nobody holds any more: neither its memory nor its origin is needed."""
        kept: list[torch.Tensor] = []
        while self._alive:
            tensor = self._alive.pop()
            key = storage_key(tensor)
            # Of the storage: the tensor and its Python object. Of the tensor: this name and the call's argument. A view, a
            # recipe or the load itself would hold one more.
            if torch._C._storage_Use_Count(key) <= 2 and sys.getrefcount(tensor) == 2:
                self.origins.pop(key, None)
                self.values.forget(key)
            else:
                kept.append(tensor)
        self._alive = kept[::-1]
        self._real_bytes = 0

    def _keep(self, tensor: torch.Tensor) -> None:
        self._alive.append(tensor)
        if tensor.device.type != "meta":
            self._real_bytes += tensor.nbytes

    def _source_of(self, key: int) -> Source | None:
        origin = self.origins.get(key)
        return self.sources[origin] if isinstance(origin, int) else None

    def sources_of(self, tensor: torch.Tensor) -> list[int]:
        """The sources behind any element of a tensor's storage."""
        origin = self.origins.get(storage_key(tensor))
        if origin is None:
            return []
        return [origin] if isinstance(origin, int) else origin.sources()

    def fail(self, message: str, hint: str | None = None) -> ProbeError:
        """Make the error that ends this replay."""
        error = ProbeError(message, hint=hint)
        if self.failure is None:
            self.failure = error
        return error

    def loading(self) -> str:
        """The source being loaded, for messages."""
        return "no source" if self.current is None else f"source {self.sources[self.current].name}"

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
                self._record(owners, target, reads, "aten::copy_")
                return target
        info = op_info(func)
        if info.kind is Kind.VIEW:
            return func(*args, **kwargs)
        if info.kind is Kind.MUTATE:
            return self._mutate(func, info, args, kwargs)
        if info.kind is Kind.VALUE:
            return self._value(func, info, args, kwargs)
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
        result = self._run(func, args, kwargs)
        keys = [storage_key(tensor) for tensor in inputs]
        followed = all(self.values.can_follow(key, tensor) for key, tensor in zip(keys, inputs))
        for position, output in enumerate(tensors_in(result)):
            key = storage_key(output)
            if key in self.origins or self.inventory.on_storage(key):
                continue
            origin = self.origins[key] = fresh(output)
            self._keep(output)
            if info.geometry_only:
                continue
            at = view_of(output)
            if info.elementwise:
                reads = self._elementwise_reads(output, inputs, True)
            else:
                exact = derived_reads(info.name, args, kwargs, output, self._reads)
                if exact is not None:
                    origin.pieces += exact
                    reads = []
                else:
                    reads = self._bounds(inputs)
            origin.pieces += pieces_of(reads, at, computed=True)
            if followed and output.device.type == "meta":
                self.values.add_recipe(key, Recipe(func, args, kwargs, position))
            elif not followed:
                self.values.spoil(key)
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
                    return func(*_to_meta(args), **_to_meta(kwargs))
                except (RuntimeError, NotImplementedError):
                    pass
            if not _depends_on_data(error):
                raise
            return func(*self._real(func, args), **self._real(func, kwargs))

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

    def real_value(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """The tensor with its real values, or the error that names source, operator and line."""
        try:
            return self.values.of(tensor)
        except ProbeError as reason:
            raise self.fail(
                f"{self._describe(tensor)}: the load reads its value ({op}) at {code_line()}, but {reason}",
                hint="give the checkpoint with its data, or raise the limit for values read for real (--value-limit)",
            ) from None

    def _describe(self, tensor: torch.Tensor) -> str:
        key = storage_key(tensor)
        owners = self.inventory.on_storage(key)
        if owners:
            return f"tensor {owners[0].full_name}"
        origin = self.origins.get(key)
        if origin is not None and self.sources_of(tensor):
            return "source " + " + ".join(self.sources[index].name for index in self.sources_of(tensor))
        return f"a {tuple(tensor.shape)} tensor made during the load of {self.loading()}"

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
        suppressed = any(owners) or _needs_data(targets, inputs)
        paired = base.startswith("_foreach_")
        reads = [
            self._reads_for(info, base, target, index, args, kwargs, paired) for index, target in enumerate(targets)
        ]
        result: Any = None
        if not suppressed:
            result = self._run(func, args, kwargs)
        for target, found, (pieces, read) in zip(targets, owners, reads):
            if found:
                self._record_pieces(found, target, pieces, info.name) if pieces else self._record(
                    found, target, read, info.name
                )
            else:
                self._write_scratch(target, pieces, read, spoiled=suppressed or target.device.type == "meta")
        if not suppressed:
            return result
        if not func._schema.returns:
            return None
        return returned[0] if len(func._schema.returns) == 1 else tuple(returned)

    def _reads_for(
        self,
        info: OpInfo,
        base: str,
        target: torch.Tensor,
        index: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        paired: bool,
    ) -> tuple[list[Piece], list[Read]]:
        """What a write brings to `target`: pieces where only a part of it is written, else reads over all of it."""
        if paired:
            inputs = [value[index] for value in args if isinstance(value, (list, tuple)) and index < len(value)]
            inputs = [value for value in inputs if isinstance(value, torch.Tensor)]
        else:
            inputs = tensors_in(args, kwargs)
        out = any(position >= len(args) or info.mutated[0][1] == "out" for position, _ in info.mutated)
        if base in _OVERWRITES or out:
            inputs = [value for value in inputs if value is not target]
        if not inputs:
            return [], []
        if info.elementwise or base in _PLAIN_COPIES or paired:
            return [], self._elementwise_reads(target, inputs, base not in _PLAIN_COPIES)
        pieces = derived_reads(info.name, args, kwargs, target, self._reads)
        if pieces is not None:
            return pieces, []
        return [], self._bounds(inputs)

    def _write_scratch(self, target: torch.Tensor, pieces: list[Piece], reads: list[Read], *, spoiled: bool) -> None:
        key = storage_key(target)
        origin = self.origins[key]
        if isinstance(origin, int):  # a loader changes the source tensor in place
            stand_in = self._stand_ins[origin]
            base = view_of(stand_in)
            origin = self.origins[key] = Origin(base, stand_in.dtype, [Piece(origin, base, base, False)])
        at = in_units(view_of(target), target.dtype, origin.dtype)
        if at is None:
            at = origin.base
            reads = [Read(r.source, r.src, None, True, False, r.src_dtype) for r in reads]
        if pieces:
            origin.pieces += pieces
        elif reads:
            origin.pieces += list(pieces_of(reads, at, computed=True))
        else:
            origin.pieces.append(Piece(-1, at, at, False))
        if spoiled:
            self.values.spoil(key)

    # Reads

    def _reads(self, tensor: torch.Tensor, view: View | None = None) -> list[Read]:
        origin = self.origins.get(storage_key(tensor))
        if origin is None:
            return []
        view = view or view_of(tensor)
        if isinstance(origin, int):
            dtype = tensor.dtype
            other = None if dtype is self._stand_ins[origin].dtype else dtype
            return [Read(origin, view, None, False, True, other)]
        return origin.reads(view, tensor.dtype)

    def _elementwise_reads(self, target: torch.Tensor, inputs: Sequence[torch.Tensor], computed: bool) -> list[Read]:
        reads: list[Read] = []
        shape = tuple(target.shape)
        for tensor in inputs:
            view = view_of(tensor)
            if view.shape != shape:
                expanded = broadcast(view, shape)
                if expanded is None:
                    raise RuntimeError(
                        f"The size of tensor a {shape} must match the size of tensor b {tuple(tensor.shape)}"
                    )
                view = expanded
            found = self._reads(tensor, view)
            if computed:
                found = [Read(r.source, r.src, r.part, True, r.exact, r.src_dtype) for r in found]
            reads += found
        return reads

    def _bounds(self, inputs: Sequence[torch.Tensor]) -> list[Read]:
        return [
            Read(read.source, read.src, None, True, False, read.src_dtype)
            for tensor in inputs
            for read in self._reads(tensor)
        ]

    # Model writes

    def destination(self, parameter: torch.Tensor | None, args: tuple[Any, ...]) -> OwnedTensor | None:
        """The model tensor that a loader was called for: it wins where several tensors share a storage."""
        for tensor in (*args[:2], parameter):
            if isinstance(tensor, torch.Tensor):
                owners = self.inventory.owners(tensor)
                if owners:
                    return owners[0]
        return None

    def _owner(self, owners: list[OwnedTensor], target: torch.Tensor) -> OwnedTensor:
        if len(owners) == 1:
            return owners[0]
        destination = None if self.call is None else self.destination(*self.call)
        if destination is not None and any(owned is destination for owned in owners):
            return destination
        for owned in owners:
            if owned.tensor is target:
                return owned
        return next((owned for owned in owners if owned.tensor.shape == target.shape), owners[0])

    def _record(self, owners: list[OwnedTensor], target: torch.Tensor, reads: list[Read], op: str) -> None:
        owned = self._owner(owners, target)
        own = owned.tensor
        at = view_of(target)
        other = None if target.dtype == own.dtype else target.dtype
        start = int(own.storage_offset())
        if start:
            start = start * own.dtype.itemsize // target.dtype.itemsize
            at = View(at.offset - start, at.shape, at.stride)
        if reads:
            writes = [
                ModelWrite(
                    owned, read.of(at), read.source, read.src, read.computed, read.exact, read.src_dtype, other, op
                )
                for read in reads
            ]
        else:
            writes = [ModelWrite(owned, at, None, None, False, True, None, other, op)]
        key = storage_key(target)
        self._remember(key, own, writes, start)
        self.values.spoil(key)
        self.on_write(writes)

    def _record_pieces(self, owners: list[OwnedTensor], target: torch.Tensor, pieces: list[Piece], op: str) -> None:
        owned = self._owner(owners, target)
        start = int(owned.tensor.storage_offset())
        writes = [
            ModelWrite(
                owned,
                View(piece.at.offset - start, piece.at.shape, piece.at.stride),
                None if piece.source < 0 else piece.source,
                None if piece.source < 0 else piece.src,
                piece.computed,
                piece.exact,
                piece.src_dtype,
                None if target.dtype == owned.tensor.dtype else target.dtype,
                op,
            )
            for piece in pieces
        ]
        key = storage_key(target)
        self._remember(key, owned.tensor, writes, start)
        self.values.spoil(key)
        self.on_write(writes)

    def _remember(self, key: int, own: torch.Tensor, writes: list[ModelWrite], start: int) -> None:
        """Let what is later computed from this model tensor know its sources."""
        origin = self.origins.get(key)
        if origin is None:
            origin = self.origins[key] = fresh(own)
        if isinstance(origin, int):
            return
        for write in writes:
            at = View(write.dst.offset + start, write.dst.shape, write.dst.stride)
            exact = write.exact
            if write.dst_dtype is not None:
                scaled = in_units(at, write.dst_dtype, own.dtype)
                at, exact = (scaled, exact) if scaled is not None else (view_of(own), False)
            if write.source is None:
                origin.pieces.append(Piece(-1, at, at, False, exact))
            else:
                brought = write.src if write.src is not None else at
                origin.pieces.append(Piece(write.source, at, brought, write.computed, exact, write.src_dtype))

    def assign(self, owned: OwnedTensor, value: torch.Tensor, op: str) -> None:
        """A model tensor gets another storage (`.data =`, `set_`, a new parameter under an old name)."""
        at = view_of(value)
        reads = self._reads(value)
        relative = View(0, at.shape, at.stride)
        other = None if value.dtype == owned.tensor.dtype else value.dtype
        if reads:
            writes = [
                ModelWrite(
                    owned,
                    read.of(relative),
                    read.source,
                    read.src,
                    read.computed,
                    read.exact,
                    read.src_dtype,
                    other,
                    op,
                )
                for read in reads
            ]
            self.on_write(writes)


def _needs_data(targets: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    return any(t.device.type != "meta" for t in targets) and any(t.device.type == "meta" for t in inputs)


def _depends_on_data(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, NotImplementedError) or "meta" in text.lower() or "data-dependent" in text


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_to_meta(item) for item in value)
    if isinstance(value, dict):
        return {name: _to_meta(item) for name, item in value.items()}
    return value
