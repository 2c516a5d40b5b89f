"""What a replay knows: which source elements every storage holds, and which writes to the model it has seen.

The recorder feeds it operator by operator; it never runs one itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from probe_cli.checkpoint import Source
from probe_cli.dtypes import numel
from probe_cli.errors import ProbeError
from probe_cli.manifest.coverage import Footprint, coverage
from probe_cli.manifest.schema import View
from probe_cli.model.assignments import SET_DATA
from probe_cli.model.dispatch import tensors_in
from probe_cli.model.inventory import Inventory, OwnedTensor
from probe_cli.model.storage import byte_range, storage_key
from probe_cli.probe.provenance import (
    Origin,
    Piece,
    Read,
    broadcast,
    cover,
    fresh,
    in_units,
    next_turn,
    pieces_of,
    view_of,
)
from probe_cli.probe.values import ValueStore
from probe_cli.probe.writes import ModelWrite, code_line, of_piece, within

__all__ = ["Ledger"]

#: Real memory that a load may make before what it has dropped is let go.
_SCRATCH_BYTES = 64 << 20

#: A tensor with more writes than this is not looked at element by element again.
_MAX_WRITES = 1 << 12


def _gaps(shape: tuple[int, ...], footprints: list[Footprint], stride: tuple[int, ...]) -> int:
    if not footprints:
        return numel(shape)
    found = coverage(shape, footprints, stride)
    return 0 if found is None else found.gap_elements


class Ledger:
    """See the module docstring. `on_write` gets the model writes of each operator as they happen."""

    def __init__(
        self,
        inventory: Inventory,
        values: ValueStore,
        sources: Sequence[Source],
        on_write: Callable[[list[ModelWrite]], None],
    ) -> None:
        self.inventory = inventory
        self.values = values
        self.sources = sources
        self.on_write = on_write
        #: By storage. A source stands as its index until something asks for more: most are only declined.
        self.origins: dict[int, Origin | int] = {}
        #: The parameter and the arguments of the loader call that is running.
        self.call: tuple[torch.Tensor | None, tuple[Any, ...]] | None = None
        self.current: int | None = None
        #: The load has seen the value of a source: what it makes from now on may be made of it.
        self.values_taken = False
        #: The first error, for loading code that swallows exceptions.
        self.failure: ProbeError | None = None
        #: What has been written to each tensor of the model.
        self._written: dict[OwnedTensor, list[ModelWrite]] = {}
        #: What is being recorded is added to what the tensor held before the load.
        self._accumulating = False
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

    def _given(self, tensor: torch.Tensor) -> list[int]:
        return [] if self.inventory.on_storage(storage_key(tensor)) else self.sources_of(tensor)

    def fail(self, message: str, hint: str | None = None) -> ProbeError:
        """Make the error that ends this replay."""
        error = ProbeError(message, hint=hint)
        if self.failure is None:
            self.failure = error
        return error

    def loading(self) -> str:
        """The source being loaded, for messages."""
        if self.call is not None:
            given = [source for tensor in tensors_in(*self.call[1]) for source in self._given(tensor)]
            if given and given != [self.current]:
                return "source " + " + ".join(self.sources[index].name for index in dict.fromkeys(given))
        return "no source" if self.current is None else f"source {self.sources[self.current].name}"

    def real_value(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """The tensor with its real values, or the error that names source, operator and line."""
        if self.sources_of(tensor):
            self.values_taken = True
        try:
            return self.values.of(tensor)
        except ProbeError as reason:
            raise self.fail(
                f"{self.describe(tensor)}: the load reads its value ({op}) at {code_line()}, but {reason}",
                hint="give the checkpoint with its data, or raise the limit for values read for real (--value-limit)",
            ) from None

    def describe(self, tensor: torch.Tensor) -> str:
        """What a tensor is to the load, for messages."""
        key = storage_key(tensor)
        owners = self.inventory.on_storage(key)
        if owners:
            return f"tensor {owners[0].full_name}"
        origin = self.origins.get(key)
        if origin is not None and self.sources_of(tensor):
            return "source " + " + ".join(self.sources[index].name for index in self.sources_of(tensor))
        return f"a {tuple(tensor.shape)} tensor made during the load of {self.loading()}"

    def _own_origin(self, key: int) -> Origin | None:
        """The origin of a storage that is about to change: a source becomes a tensor like any other."""
        origin = self.origins.get(key)
        if isinstance(origin, int):
            stand_in = self._stand_ins[origin]
            base = view_of(stand_in)
            origin = self.origins[key] = Origin(base, stand_in.dtype, [Piece(origin, base, base, False)])
        return origin

    # Reads

    def _reads(self, tensor: torch.Tensor, view: View | None = None) -> list[Read]:
        origin = self.origins.get(storage_key(tensor))
        if origin is None:
            return []
        view = view_of(tensor) if view is None else view
        if isinstance(origin, int):
            dtype = tensor.dtype
            other = None if dtype is self._stand_ins[origin].dtype else dtype
            return [Read(origin, view, None, False, True, other)]
        reads = origin.reads(view, tensor.dtype)
        if reads and self.inventory.on_storage(storage_key(tensor)):
            reads = [replace(read, recalled=True) for read in reads]
        return reads

    def _elementwise_reads(self, target: torch.Tensor, inputs: Sequence[torch.Tensor], computed: bool) -> list[Read]:
        reads: list[Read] = []
        shape = tuple(target.shape)
        for tensor in inputs:
            view = view_of(tensor)
            if view.shape != shape:
                expanded = broadcast(view, shape)
                if expanded is None and computed:
                    reads += self._bounds([tensor])
                    continue
                if expanded is None:
                    raise RuntimeError(
                        f"The size of tensor a {shape} must match the size of tensor b {tuple(tensor.shape)}"
                    )
                view = expanded
            found = self._reads(tensor, view)
            if computed:
                found = [replace(read, computed=True) for read in found]
            reads += found
        return reads

    def _bounds(self, inputs: Sequence[torch.Tensor]) -> list[Read]:
        return [
            replace(read, part=None, computed=True, exact=False) for tensor in inputs for read in self._reads(tensor)
        ]

    # Model writes

    def _owner(self, owners: list[OwnedTensor], target: torch.Tensor) -> OwnedTensor | None:
        """Which of the tensors on a storage is written through `target`; None if no single one holds all of it."""
        if len(owners) > 1:
            low, high = byte_range(target)
            owners = [o for o in owners if byte_range(o.tensor)[0] <= low and high <= byte_range(o.tensor)[1]]
            destination = None if self.call is None else self.inventory.destination(*self.call)
            if destination is not None and any(owned is destination for owned in owners):
                return destination
            for owned in owners:
                if owned.tensor is target:
                    return owned
        return next((owned for owned in owners if owned.tensor.shape == target.shape), owners[0] if owners else None)

    def _record(
        self,
        owners: list[OwnedTensor],
        target: torch.Tensor,
        reads: list[Read],
        op: str,
        partial: bool = False,
        given: tuple[int, ...] = (),
    ) -> None:
        owned = self._owner(owners, target)
        at = view_of(target)
        whole = True
        if reads and (partial or reads[0].part is not None):
            if partial:
                reads = [replace(read, part=None, exact=False) for read in reads]
            whole = partial or cover(reads, at.shape)
        if owned is None or not within(owned.tensor, target):
            pieces = [] if reads and whole else [Piece(-1, at, at, False, not partial)]
            self._record_pieces(owners, target, [*pieces, *pieces_of(reads, at, computed=False)], op)
            return
        own = owned.tensor
        other = None if target.dtype == own.dtype else target.dtype
        start = int(own.storage_offset())
        if start:
            start = start * own.dtype.itemsize // target.dtype.itemsize
            at = View(at.offset - start, at.shape, at.stride)
        writes = [
            ModelWrite(
                owned,
                read.of(at),
                read.source,
                read.src,
                read.computed,
                read.exact,
                read.src_dtype,
                other,
                op,
                read.recalled,
                partial,
            )
            for read in reads
        ]
        if not writes or not whole:
            constant = ModelWrite(
                owned, at, None, None, False, not partial, None, other, op, partial=partial, given=given
            )
            writes.insert(0, constant)
        self._commit(owned, storage_key(target), writes, start)

    def _reads_initial(self, owners: list[OwnedTensor], target: torch.Tensor, brought: Sequence[Piece | Read]) -> bool:
        """Whether an operator that reads what it writes adds a source to something that this load has not written."""
        owned = self._owner(owners, target)
        if owned is None or not any(part.source >= 0 and not part.recalled for part in brought):
            return False
        if any(other is not owned and other in self._written for other in owners):
            return False  # written under another name
        written = self._written.get(owned, [])
        if not written:
            return True
        if target.dtype != owned.tensor.dtype or not within(owned.tensor, target) or len(written) > _MAX_WRITES:
            return False
        at = view_of(target)
        at = View(at.offset - int(owned.tensor.storage_offset()), at.shape, at.stride)
        shape, stride = tuple(owned.tensor.shape), tuple(owned.tensor.stride())
        before: list[Footprint] = [([w.dst], 1) for w in written if w.dst_dtype is None and not w.partial]
        return _gaps(shape, [*before, ([at], 1)], stride) < _gaps(shape, before, stride)

    def _record_pieces(self, owners: list[OwnedTensor], target: torch.Tensor, pieces: list[Piece], op: str) -> None:
        """Record what was written to parts of a storage; the parts may belong to several tensors."""
        owned = self._owner(owners, target)
        if owned is None or not within(owned.tensor, target):
            self._spread(owners, target, pieces, op)
            return
        start = int(owned.tensor.storage_offset()) * owned.tensor.dtype.itemsize // target.dtype.itemsize
        other = None if target.dtype == owned.tensor.dtype else target.dtype
        writes = [of_piece(piece, owned, piece.at, start, other, op) for piece in pieces]
        self._commit(owned, storage_key(target), writes, start)

    def _spread(self, owners: list[OwnedTensor], target: torch.Tensor, pieces: list[Piece], op: str) -> None:
        """A write that goes beyond any single tensor of the model: each tensor under it gets its part."""
        low, high = byte_range(target)
        seen: set[View] = set()
        for owned in owners:
            own = owned.tensor
            first, last = byte_range(own)
            view = view_of(own)
            if last <= low or high <= first or view in seen:
                continue
            seen.add(view)
            origin = Origin(view_of(target), target.dtype, [piece for piece in pieces if piece.source >= 0])
            contained = low <= first and last <= high and own.dtype == target.dtype
            constant = Piece(-1, view, view, False, contained and all(piece.exact for piece in pieces))
            found = [constant, *pieces_of(origin.reads(view, own.dtype), view, computed=False)]
            start = int(own.storage_offset())
            writes = [of_piece(piece, owned, piece.at, start, None, op) for piece in found]
            if not contained:
                writes = [replace(write, partial=True) for write in writes]
            self._commit(owned, storage_key(target), writes, start)

    def _commit(self, owned: OwnedTensor, key: int, writes: list[ModelWrite], start: int) -> None:
        """Enter writes of one tensor. Later reads of it know their sources; its value is not what it would be."""
        self._remember(key, owned.tensor, writes, start)
        if self._accumulating:
            writes = [replace(write, accumulates=True) for write in writes]
        self._written.setdefault(owned, []).extend(writes)
        self.values.spoil(key)
        self.on_write(writes)

    def _remember(self, key: int, own: torch.Tensor, writes: list[ModelWrite], start: int) -> None:
        origin = self._own_origin(key)
        if origin is None:
            origin = self.origins[key] = fresh(own)
        turn = next_turn() if len(writes) > 1 else 0
        for write in writes:
            at = View(write.dst.offset + start, write.dst.shape, write.dst.stride)
            exact = write.exact
            unit = own.dtype if write.dst_dtype is None else write.dst_dtype
            if unit != origin.dtype:
                scaled = in_units(at, unit, origin.dtype)
                at, exact = (scaled, exact) if scaled is not None else (origin.base, False)
            if write.source is not None and write.src is not None:
                brought = write.src
                if exact and at.shape != brought.shape:
                    exact = False
                how = (write.computed, exact, write.src_dtype, True, turn)
                origin.pieces.append(Piece(write.source, at, brought, *how))
            elif exact:
                origin.overwrite(at)
            else:
                origin.blur()

    # Model tensors that get another storage

    def entered(self, owned: OwnedTensor) -> None:
        """A tensor was registered with a module."""
        self.assign(owned, owned.tensor, "registration")

    def assigned(self, owned: OwnedTensor, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """`tensor.data = value` is to happen."""
        self.replace_data(owned, tensor, value, ".data =")

    def assigned_elsewhere(self, owned: OwnedTensor) -> ProbeError:
        return self.fail(f"{owned.full_name}: .data = in another thread, at {code_line()}")

    def assign(self, owned: OwnedTensor, value: torch.Tensor, op: str) -> None:
        """A model tensor gets what `value` holds (`.data =`, `set_`, a new parameter under an old name)."""
        at = view_of(value)
        relative = View(0, at.shape, at.stride)
        other = None if value.dtype == owned.tensor.dtype else value.dtype
        pieces = list(pieces_of(self._reads(value), relative, computed=False))
        if pieces:
            writes = [of_piece(piece, owned, piece.at, 0, other, op) for piece in pieces]
            self._written.setdefault(owned, []).extend(writes)
            self.on_write(writes)

    def replace_data(self, owned: OwnedTensor, tensor: torch.Tensor, value: torch.Tensor, op: str) -> None:
        """Carry out `tensor.data = value`. A real tensor cannot stand on meta: it gets memory that is never written."""
        if storage_key(value) != storage_key(tensor):
            self.assign(owned, value, op)
            if value.device != tensor.device:
                with _disable_current_modes():
                    kept = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=tensor.device)
                origin = self.origins[storage_key(kept)] = fresh(kept)
                origin.pieces += pieces_of(self._reads(value), view_of(kept), computed=False)
                self.values.spoil(storage_key(kept))
                self._keep(kept)
                value = kept
        SET_DATA(tensor, value)
        self.inventory.add_storage(owned, tensor)
