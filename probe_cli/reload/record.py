"""Write a manifest from a real first load, for models that cannot be probed, and to prove that the dry run tells the
truth.

Contract, tensors and coverage are those that a probe finds. Which elements of a source are read is not traced: the
manifest says of each write that its source side is only an upper bound.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import Self

from probe_cli.checkpoint import Checkpoint, Source
from probe_cli.dtypes import numel
from probe_cli.errors import ReloadError
from probe_cli.manifest import Manifest, canonical_bytes
from probe_cli.manifest.schema import EngineIdentity, View
from probe_cli.model.assignments import SET_DATA, enter_unannounced, watch_assignments, watch_registrations
from probe_cli.model.dispatch import DispatchMode, accumulates, mutated_arguments, tensors_in
from probe_cli.model.dtypes import dtype_name
from probe_cli.model.inventory import Inventory, OwnedTensor
from probe_cli.model.loaders import LoaderInterception
from probe_cli.model.selectors import DEFAULT_CONTROL_FLAGS, Binder, loader_name
from probe_cli.model.storage import byte_range, storage_key
from probe_cli.reload.cold import ColdLoad
from probe_cli.reload.fingerprint import Fingerprints
from probe_cli.reload.processing import Processing
from probe_cli.reload.recorded import RecordedKey, recorded_manifest
from probe_cli.reload.text import some
from probe_cli.topology import Rank

__all__ = ["Recording", "record"]

_log = logging.getLogger("probe_cli.reload")

#: So many names are written out in a message.
_NAMED = 5


def record(
    model: nn.Module,
    *,
    rank: Rank | None = None,
    engine: EngineIdentity | None = None,
    checkpoint: Checkpoint | None = None,
    processing: Processing | None = None,
    control_flags: frozenset[str] = DEFAULT_CONTROL_FLAGS,
    default_loaders: Sequence[Callable[..., object]] = (),
) -> Recording:
    """Around the first load, before post-processing:

        with record(model) as recording:
            model.load_weights(stream)
        recording.cold.process()                       # or the engine's own, inside `recording.cold.processing()`
        session = ReloadSession(model, recording.manifest, cold=recording.cold)

    `checkpoint` is what the stream comes from; without it the sources that arrive are taken for a wire. The load runs
    as it would, with every operator watched. Raises ReloadError if a write cannot be attributed to a source, and at the
    end of the block if a tensor was written in a way that is not seen (NumPy, another thread): the weights are there
    then, but a contract without that write would be wrong. Sources that nothing was written from are logged.
    """
    return Recording(model, rank or Rank(), engine, checkpoint, processing, control_flags, default_loaders)


@dataclass
class _Write:
    owned: OwnedTensor
    view: View | None
    sources: tuple[str, ...]
    op: str
    accumulates: bool = False


@dataclass
class _Call:
    destination: OwnedTensor | None
    writes: list[_Write] = field(default_factory=list)


class Recording(DispatchMode):
    """See `record`. `manifest` and `cold` are there once the block is left."""

    manifest: Manifest
    cold: ColdLoad

    def __init__(
        self,
        model: nn.Module,
        rank: Rank,
        engine: EngineIdentity | None,
        checkpoint: Checkpoint | None,
        processing: Processing | None,
        control_flags: frozenset[str],
        default_loaders: Sequence[Callable[..., object]],
    ) -> None:
        super().__init__()
        self.model = model
        self.rank = rank
        self.engine = engine or EngineIdentity(name="live", version="1", torch=torch.__version__.split("+")[0])
        self.checkpoint = checkpoint
        self.declined = 0
        self._processing = processing
        self._inventory = Inventory(model)
        self._binder = Binder(self._inventory.names_of_modules, control_flags)
        self._interception = LoaderInterception(
            self._on_call,
            [owned.tensor for owned in self._inventory.tensors()],
            default_loaders,
            elsewhere=self._on_call_elsewhere,
        )
        self._watches = ExitStack()
        self._before: Fingerprints
        self._arrived: dict[str, Source] = {}
        self._current: str | None = None
        self._own_load: Any = None
        #: Storage -> the sources that its elements come from.
        self._origins: dict[int, tuple[str, ...]] = {}
        #: Of storages that are known here: lets go of their memory, but not of their identities for others to have.
        self._storages: list[StorageWeakRef] = []
        self._call: _Call | None = None
        self._written: dict[OwnedTensor, set[View | None]] = {}
        self._keys: dict[tuple[str, str, tuple[str, ...], bytes], RecordedKey] = {}

    # The block

    def __enter__(self) -> Self:
        self._own_load = self.model.__dict__.get("load_weights")
        load = self.model.load_weights
        if not callable(load):
            raise ReloadError(f"{type(self.model).__name__} has no load_weights to record")
        self._before = Fingerprints(self._inventory)
        with ExitStack() as stack:
            stack.enter_context(self._interception)
            stack.enter_context(watch_assignments(self._inventory, self._assigned, self._assigned_elsewhere))
            stack.enter_context(watch_registrations(self._inventory, self._interception, self._entered))
            self._watches = stack.pop_all()
        self.model.__dict__["load_weights"] = lambda weights, *args, **kwargs: load(
            self.track(weights), *args, **kwargs
        )
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self._watches.close()
        if self._own_load is None:
            self.model.__dict__.pop("load_weights", None)
        else:
            self.model.__dict__["load_weights"] = self._own_load
        if error is None:
            enter_unannounced(self.model, self._inventory, self._entered)
        self._origins.clear()
        self._storages.clear()
        if error is None:
            self._refuse_unseen()
            self._report_unused()
            self.manifest = recorded_manifest(
                self.model, self._keys.values(), self._sources(), self.rank, self.engine, self.declined
            )
            self.cold = ColdLoad(self.model, self._processing)
            self.cold.loaded(self.manifest)

    def _sources(self) -> Checkpoint:
        return self.checkpoint or Checkpoint(sources=tuple(self._arrived.values()), kind="wire")

    def track(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The stream with its sources known. `model.load_weights` is given this by itself inside the block."""
        for name, tensor in weights:
            self._current = name
            shape = tuple(tensor.shape)
            self._arrived[name] = Source(name, dtype_name(tensor.dtype), shape, tensor.nbytes)
            self._know(tensor, (name,))
            yield name, tensor
        self._current = None

    # What the load does

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.name == "aten::set_" and (owners := self._inventory.owners(args[0])):
            return self._move(owners[0], args[0], func._schema.name, lambda: func(*args, **kwargs))
        given = tensors_in(args, kwargs)
        written = tensors_in(*(args[p] if p < len(args) else kwargs.get(name) for p, name in mutated_arguments(func)))
        result = func(*args, **kwargs)
        sources = self._union(tensor for tensor in given if not any(tensor is other for other in written))
        if written:
            self._note(written, sources, func, accumulates(func, args, kwargs))
            return result
        for output in tensors_in(result):
            key = storage_key(output)
            if sources and key not in self._origins and not self._inventory.on_storage(key):
                self._know(output, sources)
        return result

    def _union(self, tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(n for tensor in tensors for n in self._origins.get(storage_key(tensor), ())))

    def _note(self, written: list[torch.Tensor], sources: tuple[str, ...], func: OpOverload, adds: bool) -> None:
        writes: list[_Write] = []
        for tensor in written:
            key = storage_key(tensor)
            owners = self._inventory.on_storage(key)
            if not owners:
                merged = dict.fromkeys((*self._origins.get(key, ()), *sources))
                if merged:
                    self._know(tensor, tuple(merged))
                continue
            aim = self._call.destination if self._call is not None else None
            owned = aim if aim is not None and any(aim is owner for owner in owners) else _owner(owners, tensor)
            view = _view(tensor, owned)
            initial = adds and bool(sources) and not self._is_written(owned, owners, view)
            writes.append(_Write(owned, view, sources, func._schema.name, initial))
            self._written.setdefault(owned, set()).add(view)
        if not writes:
            return
        if self._call is not None:
            self._call.writes += writes
            return
        joined = tuple(dict.fromkeys(name for write in writes for name in write.sources))
        if not joined:
            raise ReloadError(
                f"{func._schema.name} writes {writes[0].owned.full_name} outside any weight loader, with a value that "
                f"comes from no source, while loading {self._current}"
            )
        self._add(writes[0].owned, joined, {}, writes, direct=True)

    # What no operator does

    def _know(self, tensor: torch.Tensor, sources: tuple[str, ...]) -> None:
        self._origins[storage_key(tensor)] = sources
        self._storages.append(StorageWeakRef(tensor.untyped_storage()))

    def _assigned(self, owned: OwnedTensor, tensor: torch.Tensor, value: torch.Tensor) -> None:
        self._move(owned, tensor, ".data =", lambda: SET_DATA(tensor, value))

    def _move(self, owned: OwnedTensor, tensor: torch.Tensor, op: str, move: Callable[[], Any]) -> Any:
        """Carry out what may put a tensor of the model on other memory."""
        before = storage_key(tensor)
        self._storages.append(StorageWeakRef(tensor.untyped_storage()))
        result = move()
        if storage_key(tensor) != before:
            self._put(owned, tensor, op)
            self._inventory.add_storage(owned, tensor)
        return result

    def _entered(self, owned: OwnedTensor) -> None:
        self._put(owned, owned.tensor, "registration")

    def _put(self, owned: OwnedTensor, value: torch.Tensor, op: str) -> None:
        """A tensor of the model is now what memory from elsewhere holds. Memory that holds nothing of a source is not a
        write: it may be filled later."""
        sources = self._origins.get(storage_key(value), ())
        if not sources:
            return
        write = _Write(owned, View(0, tuple(value.shape), tuple(value.stride())), sources, op)
        self._written.setdefault(owned, set()).add(write.view)
        if self._call is not None:
            self._call.writes.append(write)
        else:
            self._add(owned, sources, {}, [write], direct=True)

    def _on_call_elsewhere(
        self,
        loader: Callable[..., object],
        parameter: torch.Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> object:
        owned = self._inventory.destination(parameter, args)
        raise _elsewhere(f"{loader_name(loader)} was called for {owned.full_name if owned else 'a tensor'}")

    def _assigned_elsewhere(self, owned: OwnedTensor) -> ReloadError:
        return _elsewhere(f"{owned.full_name}: .data =")

    def _refuse_unseen(self) -> None:
        now = Inventory(self.model)
        there = {owned.full_name for owned in now.tensors()}
        gone = [key.owned.full_name for key in self._keys.values() if key.owned.full_name not in there]
        if gone:
            raise ReloadError(f"{some(list(dict.fromkeys(gone)), _NAMED)} was loaded and is not in the model any more")
        written = {name for key in self._keys.values() for name, _ in key.writes}
        changed = self._before.changed(now, written)
        if changed:
            raise ReloadError(
                f"{some(changed, _NAMED)} changed during the load, and no write to it was seen (NumPy, bare memory, another "
                "thread); a contract without it would be wrong",
                hint="write to the tensor itself (copy_, item assignment), in the thread that load_weights runs in",
            )

    def _report_unused(self) -> None:
        used = {source for key in self._keys.values() for source in key.sources}
        unused = [name for name in self._arrived if name not in used]
        if unused:
            _log.warning("nothing was written from %s; an update without it counts as complete", some(unused, _NAMED))

    def _is_written(self, owned: OwnedTensor, owners: Sequence[OwnedTensor], view: View | None) -> bool:
        """Whether this load has written what a view shows, as far as can be told from whole views."""
        if any(other is not owned and other in self._written for other in owners):
            return True
        before = self._written.get(owned, set())
        if view in before or None in before:
            return True
        reached = sum(numel(other.shape) for other in before if other is not None)
        return reached >= owned.tensor.numel()

    def _on_call(
        self,
        loader: Callable[..., object],
        parameter: torch.Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> object:
        if self._call is not None:
            return loader(*args, **kwargs)
        call = self._call = _Call(self._inventory.destination(parameter, args))
        try:
            result = loader(*args, **kwargs)
        finally:
            self._call = None
        if result is False or not call.writes:
            if call.writes:
                raise ReloadError(
                    f"weight loader {loader_name(loader)} wrote {call.writes[0].owned.full_name} and then declined"
                )
            self.declined += 1
            return result
        bound = self._binder.bind(loader, args, kwargs)
        owned = call.destination or call.writes[0].owned
        others = [tensor for tensor in bound.tensors if tensor is not parameter and tensor is not owned.tensor]
        sources = dict.fromkeys(self._union(others))
        sources.update(dict.fromkeys(name for write in call.writes for name in write.sources))
        self._add(owned, tuple(sources), bound.selectors, call.writes, direct=False)
        return result

    def _add(
        self,
        owned: OwnedTensor,
        sources: tuple[str, ...],
        selectors: dict[str, Any],
        writes: list[_Write],
        *,
        direct: bool,
    ) -> None:
        attribution: Literal["storage", "stream"] = "storage"
        if not sources and self._current is not None:
            sources, attribution = (self._current,), "stream"
        key = (owned.layer, owned.name, sources, canonical_bytes(selectors) if selectors else b"")
        found = self._keys.get(key)
        if found is None:
            found = self._keys[key] = RecordedKey(owned, sources, selectors, direct, attribution)
        found.add(((write.owned.full_name, write.view), write.op) for write in writes)
        found.accumulating.update((write.owned.full_name, write.view) for write in writes if write.accumulates)


def _elsewhere(what: str) -> ReloadError:
    return ReloadError(
        f"{what} in another thread ({threading.current_thread().name})",
        hint="a recording follows the thread that load_weights runs in: load in it",
    )


def _owner(owners: Sequence[OwnedTensor], tensor: torch.Tensor) -> OwnedTensor:
    """Of the tensors on one storage, the first that holds all that is written."""
    start, end = byte_range(tensor)
    for owned in owners:
        low, high = byte_range(owned.tensor)
        if low <= start and end <= high:
            return owned
    return owners[0]


def _view(tensor: torch.Tensor, owned: OwnedTensor) -> View | None:
    """What is written as a view of the owned tensor, in its elements; None if the bytes are reinterpreted."""
    if tensor.dtype != owned.tensor.dtype:
        return None
    offset = int(tensor.storage_offset() - owned.tensor.storage_offset())
    return View(offset, tuple(tensor.shape), tuple(tensor.stride())) if offset >= 0 else None
