"""The hot path of an update: one call for each weight loader call. Decide what it is, run it where it may write, tick
it off."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._C import (  # what torch.utils._python_dispatch itself is made of (torch 2.5 to 2.14)
    _get_dispatch_stack_at,
    _len_torch_dispatch_stack,
    _pop_torch_dispatch_stack,
    _push_on_torch_dispatch_stack,
)

from probe_cli.errors import ReloadError
from probe_cli.model.dtypes import dtype_name
from probe_cli.model.selectors import Binder, loader_name
from probe_cli.model.storage import storage_key
from probe_cli.reload.contract import Contract, Expectation
from probe_cli.reload.direct import WriteWatch
from probe_cli.reload.held import HeldCall, copied
from probe_cli.reload.live import LiveLayer
from probe_cli.reload.progress import Destination, Progress, UnitState
from probe_cli.reload.recall import KnownCall, are_plain
from probe_cli.reload.stream import SourceStream

__all__ = ["Tracker"]

_log = logging.getLogger("probe_cli.reload")


class Tracker:
    """Sorts loader calls and direct writes into applications, extras, declined and late calls.

    `prepare(state)` gets a unit ready to be written to; `completed(state)` is called when its last application has
    arrived; `check()` raises if the update was aborted.
    """

    def __init__(
        self,
        contract: Contract,
        progress: Progress,
        stream: SourceStream,
        binder: Binder,
        *,
        prepare: Callable[[UnitState], None],
        completed: Callable[[UnitState], None],
        check: Callable[[], None],
        declined: Callable[[object], bool],
        rank: str,
        verify_writes: bool = False,
        watching: bool = False,
    ) -> None:
        self.contract = contract
        self.progress = progress
        self.stream = stream
        self._binder = binder
        self._prepare = prepare
        self._completed = completed
        self._check = check
        self._declined = declined
        self._rank = rank
        self._verify_writes = verify_writes
        #: `watch` is on the mode stack outside loaders.
        self.watching = watching
        #: id of a tensor object -> destination, for staging and for live objects.
        self.destinations: dict[int, Destination] = {}
        #: Storage -> destination, for placeholders and live storages.
        self.storages: dict[int, Destination] = {}
        self.states_by_layer: dict[str, UnitState] = {}
        #: Layers that are loaded in place.
        self.live: dict[str, LiveLayer] = {}
        self._inside = False
        self._applied: Counter[int] = Counter()
        self._held: dict[int, list[HeldCall]] = {}
        #: Set from another thread; the next call raises.
        self.aborted = False
        self._clock = 0
        self.watch = WriteWatch(self.stand_in, self._before_direct_write, self._after_direct_write)
        self._direct: tuple[Expectation | None, Destination, list[str]] | None = None
        self._wrote = False
        self._call_watch = WriteWatch(self.stand_in, self._on_call_write)

    # Loader calls

    def on_call(
        self,
        loader: Callable[..., object],
        parameter: torch.Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> object:
        """Stand in for one call of a weight loader."""
        if self._inside:  # a loader that calls another: the outer one counts
            return loader(*args, **kwargs)
        if self.watching and _pause(self.watch):  # what the runtime itself writes is no direct write
            try:
                return self.on_call(loader, parameter, args, kwargs)
            finally:
                _push_on_torch_dispatch_stack(self.watch)
        # Thousands of times per update: calls cost more than lines here, and each object that is touched has left the
        # caches since the last call, which copied more than they hold.
        if self.aborted:
            self._check()
        target: torch.Tensor | None = None
        destination = self.destinations.get(id(args[0])) if args else None
        if destination is not None:
            target = args[0]
        else:
            destination = self._destination(parameter, args)
            if destination is None:
                return loader(*args, **kwargs)
        stream = self.stream
        source, call = stream.source, None
        if source is not None and len(args) > 1 and (args[1] is stream.tensor or stream.is_current(args[1])):
            position = source.position
            if position < len(source.calls):
                known = source.calls[position]
                if known.destination is destination and known.loader == loader:
                    try:
                        if known.keywords == kwargs and known.arguments == args[2:]:
                            call = known
                            source.position = position + 1
                    except RuntimeError:  # a tensor where there was a plain value does not compare
                        call = None
            if call is None:
                call = self._resolve(destination, loader, parameter, args, kwargs)
                if are_plain(args, kwargs):
                    source.remember(call)
        else:
            call = self._resolve(destination, loader, parameter, args, kwargs)
        expectation, state = call.expectation, destination.state
        if state.published:
            return self._late(loader, destination, call.sources)
        if not state.in_scope:
            self.progress.out_of_scope += 1
            return True if self._binder.accepts(loader, "return_success") else None
        if not state.touched:
            self._prepare(state)
        if not state.in_place:
            self._clock += 1
            state.last_used = self._clock
        queue = call.queue
        if queue is not None and expectation is not None and self._has_to_wait(expectation, queue):
            return self._hold(HeldCall(destination, loader, args, kwargs), expectation)
        if expectation is None or self._verify_writes:
            result, wrote = self._run_watched(loader, destination, args, kwargs)
        else:
            wrote = True
            if not state.in_place and (
                target is None or destination.live or state.staged.moved or type(loader) is functools.partial
            ):
                loader, args, kwargs = self._redirected(loader, args, kwargs, destination)
                target = None
            if target is None:
                target = self._object(destination)
            address = 0 if target is None else target.data_ptr()
            self._inside = True
            try:
                result = loader(*args, **kwargs)
            except Exception as error:
                self._annotate(error, loader, destination)
                raise
            finally:
                self._inside = False
                if target is not None and target.data_ptr() != address:
                    self._take_over(target, destination)
        if result is False or not wrote or (result is not True and result is not None and self._declined(result)):
            if expectation is not None and self.progress.seen[expectation.index] < expectation.count:
                raise self._placement(expectation)
            self._count_declined(state_layer(destination))
            return result
        if expectation is None:
            self._absorb(destination, call.sources)
        else:
            self._tick(expectation, state)
            if queue is not None:
                self._applied[expectation.index] += 1
                self._apply_held(queue)
        return result

    def on_call_elsewhere(
        self,
        loader: Callable[..., object],
        parameter: torch.Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> object:
        """A loader call for a tensor of this model in a thread that is not the load's: what it brings cannot be told."""
        destination = self._destination(parameter, args)
        name = "a tensor of the model" if destination is None else destination.full_name
        raise ReloadError(
            f"{self._rank}: {loader_name(loader)} was called for {name} in another thread "
            f"({threading.current_thread().name}); nothing was written",
            hint="an update follows the thread that load_weights runs in: load in it",
        )

    # Applications that overlap

    def _has_to_wait(self, expectation: Expectation, queue: Sequence[Expectation]) -> bool:
        """Whether one that comes before it in the cold load has not been applied; extras do not wait."""
        if self.progress.seen[expectation.index] >= expectation.count:
            return False
        earlier = queue[: queue.index(expectation)]
        return any(self._applied[other.index] < other.count for other in earlier)

    def _hold(self, held: HeldCall, expectation: Expectation) -> object:
        """Keep a call until its turn. The sender may reuse its buffer, so what it brings is copied."""
        own = held.args[0] if held.args else None
        held.args = tuple(copied(value, self.destinations, own) for value in held.args)
        held.kwargs = {name: copied(value, self.destinations, own) for name, value in held.kwargs.items()}
        self.progress.seen[expectation.index] += 1
        self._held.setdefault(expectation.index, []).append(held)
        return True if self._binder.accepts(held.loader, "return_success") else None

    def _apply_held(self, queue: Sequence[Expectation]) -> None:
        for expectation in queue:
            for held in self._held.pop(expectation.index, ()):
                result, _ = self._run_watched(held.loader, held.destination, held.args, held.kwargs)
                if result is False or self._declined(result):
                    raise self._placement(expectation)
                self._applied[expectation.index] += 1
                state = held.destination.state
                state.remaining -= 1
                if state.remaining == 0:
                    self._completed(state)
            if self._applied[expectation.index] < expectation.count:
                return

    def _resolve(
        self,
        destination: Destination,
        loader: Callable[..., object],
        parameter: torch.Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> KnownCall:
        """What a call is: the expectation that it fulfils, and the sources that its tensors are known to be."""
        stream = self.stream
        bound = self._binder.bind(loader, args, kwargs)
        sources: list[str] = []
        for tensor in bound.tensors:
            if tensor is not parameter:
                name = stream.names_of(tensor)
                if name is not None:
                    sources.append(name)
        expectation = self.contract.find(destination.full_name, bound.selectors, sources, stream.current)
        queue = None if expectation is None else self.contract.queues.get(expectation.index)
        return KnownCall(destination, loader, args[2:], kwargs, expectation, queue, sources)

    def _destination(self, parameter: torch.Tensor | None, args: tuple[Any, ...]) -> Destination | None:
        known = self.destinations
        if args:
            found = known.get(id(args[0]))
            if found is not None:
                return found
        for tensor in args[:2]:
            found = known.get(id(tensor))
            if found is not None:
                return found
        return known.get(id(parameter))

    def _run_watched(
        self, loader: Callable[..., object], destination: Destination, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[object, bool]:
        """Run a loader with its writes watched: (its result, whether it wrote to a tensor of the model)."""
        self._wrote = False
        if not destination.state.in_place:
            loader, args, kwargs = self._redirected(loader, args, kwargs, destination)
        target = self._object(destination)
        address = 0 if target is None else target.data_ptr()
        self._inside = True
        try:
            with self._call_watch:
                result = loader(*args, **kwargs)
        except Exception as error:
            self._annotate(error, loader, destination)
            raise
        finally:
            self._inside = False
            if target is not None and target.data_ptr() != address:
                self._take_over(target, destination)
                self._wrote = True
        return result, self._wrote

    def _object(self, destination: Destination) -> torch.Tensor | None:
        """The tensor object that a loader writes to for this destination, if it has memory now."""
        state = destination.state
        if state.in_place:
            return self.live[destination.key[0]].get(destination.key[1])
        return state.staged.current_objects().get(destination.key) if state.touched else None

    def _take_over(self, target: torch.Tensor, destination: Destination) -> None:
        """A loader has put other memory under its tensor (`param.data = ...`, `set_`): the sender's, maybe, which may use
        it again. The values go to where they belong, and the tensor is what it was."""
        given = target.detach()
        state = destination.state
        layer, name = destination.key
        home = self.live[layer].homes[name] if state.in_place else state.staged.home_of(destination.key)
        target.data = home
        if given.shape != home.shape or given.dtype != home.dtype:
            raise ReloadError(
                f"{self._rank}: {destination.full_name} was given a {dtype_name(given.dtype)}{list(given.shape)} tensor by its "
                f"loader, the contract has {dtype_name(home.dtype)}{list(home.shape)}"
            )
        home.copy_(given)

    def _tick(self, expectation: Expectation, state: UnitState) -> None:
        seen = self.progress.seen
        seen[expectation.index] += 1
        if seen[expectation.index] > expectation.count:
            self._count_extra(
                state, expectation.layer, f"{expectation.key} arrived more often than the contract requires"
            )
            return
        state.remaining -= 1
        if state.remaining == 0:
            self._completed(state)

    def _absorb(self, destination: Destination, sources: Iterable[str]) -> None:
        names = " + ".join(sources) or self.stream.current or "no source"
        layer = state_layer(destination)
        self._count_extra(
            destination.state,
            layer,
            f"{names} was loaded into {destination.full_name}, which the contract does not know",
        )

    def _count_extra(self, state: UnitState, layer: str, what: str) -> None:
        self.progress.extras[layer] += 1
        if not state.warned:
            state.warned = True
            _log.warning("%s: layer %s: extra application: %s", self._rank, layer or "(model)", what)

    def _late(self, loader: Callable[..., object], destination: Destination, sources: Sequence[str]) -> object:
        """A call for a published layer: never run."""
        layer = state_layer(destination)
        if self._binder.accepts(loader, "return_success"):
            self._count_declined(layer)
            return False
        names = sources or ((self.stream.current,) if self.stream.current is not None else ())
        if names and not any(e.layer == layer for name in names for e in self.contract.by_source.get(name, ())):
            self._count_declined(layer)
            return None
        raise ReloadError(
            f"{self._rank}: layer {layer or '(model)'} is published already, and {loader_name(loader)} was called "
            f"again for {destination.full_name} with {' + '.join(names) or 'no source'}; the live tensors were not "
            "touched",
            hint="send each tensor once per update",
        )

    def _count_declined(self, layer: str) -> None:
        """The source being loaded is another rank's, or another layer's: known well enough not to be reported."""
        self.progress.declined[layer] += 1
        if self.stream.current is not None:
            self.stream.unknown.pop(self.stream.current, None)

    def _placement(self, expectation: Expectation) -> ReloadError:
        return ReloadError(
            f"{self._rank}: the loader declined {expectation.key}, which the contract requires: this rank's placement "
            "has changed since the manifest was built",
            hint="build the manifest for the placement as it is now, or probe the model again",
        )

    def _annotate(self, error: BaseException, loader: Callable[..., object], destination: Destination) -> None:
        note = (
            f"{self._rank}, layer {state_layer(destination) or '(model)'}: loader {loader_name(loader)} of "
            f"{destination.full_name} was loading source {self.stream.current}"
        )
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:
            error.__notes__ = [*getattr(error, "__notes__", []), note]

    # Redirection and direct writes

    def _redirected(
        self, loader: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any], destination: Destination
    ) -> tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]:
        if type(loader) is functools.partial:
            loader = functools.partial(
                loader.func, *map(self._swap, loader.args), **{k: self._swap(v) for k, v in loader.keywords.items()}
            )
        args = tuple(map(self._swap, args))
        if args:
            self._require_whole(args[0], destination)
        return loader, args, {name: self._swap(value) for name, value in kwargs.items()}

    def _require_whole(self, given: Any, destination: Destination) -> None:
        """A part of a tensor that was taken before the unit had memory, or of the live one, is not where values are to go."""
        staged = self._object(destination)
        if staged is None or not isinstance(given, torch.Tensor):
            return
        key = storage_key(given)
        found = self.storages.get(key)
        if found is not None and found.key == destination.key and key != storage_key(staged):
            raise ReloadError(
                f"{self._rank}: the loader of {destination.full_name} was given a part of it that was taken before it had staging "
                "memory; nothing was written",
                hint="give loaders the whole parameter, or update in place (in_place=True)",
            )

    def _swap(self, value: Any) -> Any:
        return self.stand_in(value) if isinstance(value, torch.Tensor) else value

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor to use for one that load code holds: the staging tensor, for an object or placeholder of a
        staged unit."""
        destination = self.destinations.get(id(tensor))
        if destination is None:
            destination = self.storages.get(tensor.untyped_storage()._cdata)
            if destination is None:
                return tensor
        state = destination.state
        if state.in_place or state.published or not state.in_scope:
            return tensor
        if not state.touched:
            self._prepare(state)
        staged = state.staged.current_objects().get(destination.key)
        return tensor if staged is None or staged.shape != tensor.shape else staged

    def _on_call_write(self, written: list[torch.Tensor], read: list[torch.Tensor]) -> bool:
        self._wrote = self._wrote or any(self._owner(tensor) is not None for tensor in written)
        return True

    def _owner(self, tensor: torch.Tensor) -> Destination | None:
        found = self.destinations.get(id(tensor)) or self.storages.get(tensor.untyped_storage()._cdata)
        if found is not None:
            return found
        for state in dict.fromkeys(self.states_by_layer.values()):
            key = state.staged.owner_of(tensor)
            if key is not None:
                return Destination(f"{key[0]}.{key[1]}" if key[0] else key[1], key, state)
        return None

    def _before_direct_write(self, written: list[torch.Tensor], given: list[torch.Tensor]) -> bool:
        self._direct = None
        owner = next((found for tensor in written if (found := self._owner(tensor)) is not None), None)
        if owner is None:
            return True
        self._check()
        state = owner.state
        if state.published:
            raise ReloadError(
                f"{self._rank}: layer {state_layer(owner) or '(model)'} is published already, and load_weights writes "
                f"{owner.full_name} again (source {self.stream.current}); the live tensors were not touched",
                hint="send each tensor once per update",
            )
        if not state.in_scope:
            self.progress.out_of_scope += 1
            return False
        if not state.touched:  # in place: staged units were prepared when their stand-in was asked for
            self._prepare(state)
        sources = list(dict.fromkeys(n for tensor in given if (n := self.stream.names_of(tensor)) is not None))
        self._direct = (self.contract.find(owner.full_name, {}, sources, self.stream.current), owner, sources)
        return True

    def _after_direct_write(self) -> None:
        direct, self._direct = self._direct, None
        if direct is None:
            return
        expectation, owner, sources = direct
        if expectation is None:
            self._absorb(owner, sources)
        else:
            self._tick(expectation, owner.state)


def state_layer(destination: Destination) -> str:
    """The layer that a destination belongs to."""
    return destination.key[0]


def _pause(mode: WriteWatch) -> bool:
    """Take a mode off the stack if it is on top; True if the caller must push it again."""
    depth = _len_torch_dispatch_stack()
    if depth == 0 or _get_dispatch_stack_at(depth - 1) is not mode:
        return False
    _pop_torch_dispatch_stack(None)
    return True
