"""One update: begun, fed in any number of chunks, finished or aborted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from probe_cli.errors import IncompleteUpdate, ReloadError
from probe_cli.model.loaders import LoaderInterception
from probe_cli.model.storage import storage_key
from probe_cli.reload.audit import TensorMap, compare
from probe_cli.reload.contract import Expectation
from probe_cli.reload.intact import Intact
from probe_cli.reload.live import LiveLayer
from probe_cli.reload.pool import StagingPool
from probe_cli.reload.progress import Destination, Progress, UnitState, describe_missing
from probe_cli.reload.publish import Processed, process, publish
from probe_cli.reload.receipt import Ballot, Finding, Receipt
from probe_cli.reload.replaced import originals_in_place
from probe_cli.reload.scope import ScopeLike
from probe_cli.reload.staging import Home
from probe_cli.reload.state import StateSnapshot
from probe_cli.reload.stream import SourceStream
from probe_cli.reload.tracker import Tracker

if TYPE_CHECKING:
    from typing_extensions import Self

    from probe_cli.reload.session import ReloadSession

__all__ = ["Update"]

_log = logging.getLogger("probe_cli.reload")


class Update:
    """Made by `ReloadSession.update`. Between chunks the model holds its live tensors and can serve."""

    def __init__(self, session: ReloadSession, scope: ScopeLike, due: Sequence[Expectation]) -> None:
        self.session = session
        self.scope = scope
        self.number = session.number
        self.thread = threading.current_thread()
        self.open = True
        self.receipt: Receipt | None = None
        self._full = scope == "full"
        self._rank = str(session.manifest.rank)
        self._lock = threading.RLock()
        self._aborted = threading.Event()
        self._reason = ""
        self._loading = False
        self._failed = False
        #: A live tensor has been written to.
        self._mutated = False
        self._progress = Progress(session.contract, due)
        self._stream = SourceStream(session.contract, session.recall, self._check)
        self._pool = session.pool or StagingPool(session.device, session.staging_bytes)
        self._pool.peak = 0
        self._live: dict[str, LiveLayer] = {}
        self._states: list[UnitState] = []
        self._findings: list[Finding] = []
        #: Helper objects of layers that the snapshots of this update hold: many layers share one.
        self._noted: set[int] = set()
        self._ready: list[tuple[UnitState, Processed]] = []
        self._ballots: tuple[Ballot, ...] = ()
        #: Subjects that this rank has cast its ballot on.
        self._voted: set[str] = set()
        self._spills = 0
        self._spilled_bytes = 0
        self._published_bytes = 0
        self._start = session.device.clock()
        self._before: TensorMap | None = None

    # Life

    def begin(self) -> None:
        """Take the live tensors aside and lay out what is due. Touches nothing yet."""
        session = self.session
        layout = session.cold.layout
        self._live = {name: LiveLayer(layer) for name, layer in layout.layers.items()}
        self._intact = Intact(self._rank, self.number, self._live, self._states, layout.names_of_modules)
        if session.audit:
            self._before = TensorMap({name: layer.module for name, layer in layout.layers.items()})
        due = {e.index for e in self._progress.due}
        self._tracker = Tracker(
            session.contract,
            self._progress,
            self._stream,
            session.binder,
            prepare=self._prepare,
            completed=self._completed,
            check=self._check,
            declined=session.declined,
            rank=self._rank,
            verify_writes=session.verify_writes,
            watching=session.watch_direct_writes,
        )
        for unit in session.units:
            remaining = sum(e.count for e in unit.expectations if e.index in due)
            ceded = all(session.structure.is_gone(layer.name) for layer in unit.layers)
            in_place = session.in_place and not (ceded or unit.hooked) and self._is_loaded_layout(unit.layers)
            state = UnitState(unit, session.staged(unit), remaining, in_place=in_place, ceded=ceded)
            self._states.append(state)
            self._register(state)

    def _is_loaded_layout(self, layers: Iterable[object]) -> bool:
        return all(
            (live := self._live[layer.name].get(name)) is not None and id(live) == tensor.identity  # type: ignore[attr-defined]
            for layer in layers
            for name, tensor in layer.tensors.items()  # type: ignore[attr-defined]
        )

    def _register(self, state: UnitState) -> None:
        tracker = self._tracker
        for layer in state.unit.layers:
            tracker.states_by_layer[layer.name] = state
            for name, tensor in self._live[layer.name].tensors().items():
                destination = self._destination((layer.name, name), state, live=not state.in_place)
                tracker.destinations.setdefault(id(tensor), destination)
                tracker.storages.setdefault(storage_key(tensor), destination)
            if state.in_place:
                tracker.live[layer.name] = self._live[layer.name]
        if state.in_place:
            return
        for key, made in state.staged.objects.items():
            tracker.destinations.setdefault(id(made), self._destination(key, state))
        for storage, key in state.staged.placeholder_keys.items():
            tracker.storages.setdefault(storage, self._destination(key, state))

    def _destination(self, key: tuple[str, str], state: UnitState, *, live: bool = False) -> Destination:
        found = self.session.destinations.get((*key, live))
        if found is None:
            found = Destination(f"{key[0]}.{key[1]}" if key[0] else key[1], key, state, live)
            self.session.destinations[(*key, live)] = found
        found.state = state
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.open:
            return
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        else:
            self.finish()

    @property
    def abandoned(self) -> bool:
        """True if the thread that began this update has ended without ending it."""
        return self.open and not self.thread.is_alive()

    # Loading

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load one chunk of (name, tensor). A failure rolls the update back before it is raised."""
        with self.loading():
            self.session.load(self.track(weights))

    def track(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The stream to give to an engine's own `load_weights`, inside `loading()`."""
        return self._stream.track(weights)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around any call of the model's loading code: its loaders write to staging tensors, and every call is
        tracked."""
        with self._lock:
            self._require_open()
            session = self.session
            self._loading = True
            try:
                self._intact.require_tensors()
                originals = session.structure.originals()
                for state in self._states:
                    if not state.published or state.ceded:
                        self._install(state)
                tensors = [t for live in self._live.values() for t in live.tensors().values()]
                tensors += [made for state in self._states for made in state.staged.objects.values()]
                with ExitStack() as stack:
                    stack.enter_context(originals_in_place(originals))
                    stack.enter_context(session.device.context())
                    if session.loading is not None:
                        stack.enter_context(session.loading())
                    stack.enter_context(torch.no_grad())
                    stack.enter_context(
                        LoaderInterception(
                            self._tracker.on_call,
                            tensors,
                            session.default_loaders,
                            session.loader_sites,
                            elsewhere=self._tracker.on_call_elsewhere,
                        )
                    )
                    stack.enter_context(self._tracker.watch if session.watch_direct_writes else nullcontext())
                    stack.enter_context(self._intact.watching())
                    yield
                self._check()
                if self._intact.restructured:
                    with self._mutating():
                        session.structure.require()
                self._intact.require_tensors()
            except BaseException as error:
                self._loading = False
                self._fail(f"{type(error).__name__}: {error}")
                raise
            finally:
                self._loading = False
                self._stream.end_chunk()
                for state in self._states:
                    self._put_back(state)

    def _install(self, state: UnitState) -> None:
        if state.in_place or not state.unit.expectations:
            return
        objects = state.staged.objects
        for layer in state.unit.layers:
            self._live[layer.name].install(objects, hooked=layer.name in state.unit.hooked)

    def _put_back(self, state: UnitState, *, failed: bool = False) -> None:
        if (not state.in_place or failed) and state.unit.expectations:
            for layer in state.unit.layers:
                self._live[layer.name].put_back()

    def _prepare(self, state: UnitState) -> None:
        """Before the first application of a unit."""
        state.touched = True
        state.snapshots = [StateSnapshot(layer.module, self._noted) for layer in state.unit.layers]
        if state.in_place:
            self._mutated = True
            return
        with self.session.device.context():
            home = state.staged.materialize(self._pool, lambda member: self._live[member.layer].get(member.name))
        if home is Home.HOST:
            self._count_spill(state.staged.nbytes)

    def _count_spill(self, nbytes: int) -> None:
        self._spills += 1
        self._spilled_bytes += nbytes

    # Completion

    def _completed(self, state: UnitState) -> None:
        """The last application of a unit has arrived."""
        unit = state.unit
        self._event("complete", layer=unit.name)
        self._intact.require_memory(state)
        self._intact.require_registered(state)
        if state.in_place:
            state.published = True
            return
        if state.ceded:
            state.published = True
            state.staged.release()
            return
        deferred = any(self.session.cold.hooks_of.deferred(layer.name, layer.module) for layer in unit.layers)
        if self.session.commit == "layer" and not deferred:
            self._publish(state, self._process(state))
            if self._loading:
                self._put_back(state)

    def _process(self, state: UnitState) -> Processed:
        started = self.session.device.clock()
        objects = state.staged.current_objects
        try:
            if not state.unit.hooked:
                return process(state.unit, self._live, objects(), self.session.cold)
            self._bring_back(state)
            with self.session.device.context(), torch.no_grad():
                return process(state.unit, self._live, objects(), self.session.cold)
        finally:
            state.seconds += self.session.device.clock() - started

    def _bring_back(self, state: UnitState) -> None:
        """Post-processing runs on the device: make room for the unit, at the cost of those that waited longest."""
        waiting = sorted((other for other in self._states if other is not state), key=lambda other: other.last_used)
        for nbytes in state.staged.make_room(self._pool, [other.staged for other in waiting]):
            self._count_spill(nbytes)

    def _publish(self, state: UnitState, processed: Processed) -> None:
        started = self.session.device.clock()
        self._mutated = True
        with self.session.device.context():
            state.nbytes = publish(processed, self._live, state.staged, self._report_attribute)
        state.published = True
        self._published_bytes += state.nbytes
        state.staged.release()
        state.seconds += self.session.device.clock() - started
        self._event("published", layer=state.unit.name, nbytes=state.nbytes)

    def _report_attribute(self, layer: str, path: str, what: str) -> None:
        if what == "settled":
            message = "post-processing made a fresh tensor; its values are in the storage that was live before"
        else:
            message = "post-processing made a tensor of another dtype, shape or strides"
        self._findings.append(Finding(what, layer, path, message))

    # The end

    def finish(self) -> Receipt:
        """End the update: nothing may be missing, on any rank. Raises IncompleteUpdate that names what is."""
        with self._lock:
            self._require_open()
            try:
                self._intact.require_tensors()
                with self._mutating():
                    self._intact.require_live_memory()
                self.session.structure.require()
                self._judge()
                self._publish_rest()
                self._vote("outcome")
            except BaseException as error:
                self._fail(f"{type(error).__name__}: {error}")
                raise
            return self._close(ok=True)

    @contextmanager
    def _mutating(self) -> Iterator[None]:
        """Around a check that says, if it fails, that the model computes with other values than it did."""
        try:
            yield
        except ReloadError:
            self._mutated = True
            raise

    def _judge(self) -> None:
        missing = self._progress.missing()
        if missing:
            # Of what is loaded in place, the sources were there and no call was seen: what became of them is not known.
            arrived, states = set(self._stream.arrived), self._tracker.states_by_layer
            unseen = [e.layer for e, _ in missing if arrived.issuperset(e.key.sources) and e.layer in states]
            self._mutated = self._mutated or any(states[layer].in_place for layer in unseen)
            message, hint = describe_missing(missing, self._stream.unknown, self._stream.arrived)
            where = f" on {self._rank}" if self.session.voter is not None else ""
            raise IncompleteUpdate(message.replace("incomplete:", f"incomplete{where}:", 1), hint=hint)

    def _publish_rest(self) -> None:
        """What waits for the end: everything with commit="model", deferred layers, and hooks of layers without a
        contract."""
        waiting = [s for s in self._states if s.unit.expectations and s.in_scope and not s.published]
        hooks_of = self.session.cold.hooks_of
        idle = [s for s in self._states if not s.unit.expectations and s.unit.hooked and not s.ceded]
        is_deferred = {
            id(s): any(hooks_of.deferred(layer.name, layer.module) for layer in s.unit.layers)
            for s in (*waiting, *idle)
        }
        first = [s for s in waiting if not is_deferred[id(s)]]
        if self.session.commit == "model":
            self._ready = []
            for state in first:
                processed = self._process(state)
                if state.unit.hooked:
                    processed.keep(state.staged, to_host=self.session.device.host_is_apart)
                state.last_used = 0  # it waits for all others: first to leave the pool
                self._ready.append((state, processed))
            self._vote("publication")
            for state, processed in self._ready:
                self._publish(state, processed)
        else:
            for state in first:
                self._publish(state, self._process(state))
        rest = [s for s in self._states if is_deferred.get(id(s), False) or any(s is other for other in idle)]
        for state in rest:
            if not state.touched:
                self._prepare(state)
            self._publish(state, self._process(state))

    def _vote(self, subject: str) -> None:
        if self.session.voter is not None:
            self._voted.add(subject)
            self._ballots = self.session.voter.vote(self._ballot(True, ""), subject)

    def _ballot(self, ok: bool, reason: str) -> Ballot:
        return Ballot(self.session.manifest.rank.index, ok, self.session.bundle_digest, self.number, reason[:4000])

    def abort(self, reason: str = "aborted by the caller") -> None:
        """Give the update up, from any thread. Nothing published: the old weights are back. Else the model is
        undefined.

        While another thread is loading, that thread raises ReloadError at its next tensor, and rolls back.
        """
        self._reason = self._reason or reason
        self._aborted.set()
        self._tracker.aborted = self._stream.aborted = True
        if self._lock.acquire(timeout=_ABORT_SECONDS):
            try:
                if self.open and not self._loading:
                    self._fail(reason)
            finally:
                self._lock.release()

    def _check(self) -> None:
        if self._aborted.is_set():
            raise ReloadError(f"{self._rank}: update {self.number} was aborted: {self._reason}")

    def _require_open(self) -> None:
        self._check()
        if not self.open:
            outcome = "failed" if self._failed else "is finished"
            raise ReloadError(f"update {self.number} {outcome}; begin a new one")

    def _fail(self, reason: str) -> None:
        """Roll back what can be rolled back, and say what cannot."""
        if not self.open:
            return
        self._failed = True
        for state in self._states:
            self._put_back(state, failed=True)
            self._intact.move_back(state)
            if state.touched and not state.published:
                for snapshot in state.snapshots:
                    snapshot.restore()
        voter = self.session.voter
        if voter is not None:
            subjects = ("publication", "outcome") if self.session.commit == "model" else ("outcome",)
            for subject in [subject for subject in subjects if subject not in self._voted]:
                with suppress(ReloadError):  # that is what a ballot against comes to
                    voter.vote(self._ballot(False, reason), subject)
        undefined = f"update {self.number} failed after live tensors had changed: {reason}" if self._mutated else None
        if self._mutated:
            _log.error("%s: %s", self._rank, undefined)
        self._close(ok=False, error=reason, undefined=undefined)

    def _close(self, *, ok: bool, error: str = "", undefined: str | None = None) -> Receipt:
        session = self.session
        for state in self._states:
            state.staged.release()
        self._ready = []
        if session.keep_staging or self._pool.lend():
            session.pool = self._pool
        else:
            self._pool.close()
        session.device.synchronize()
        if self._before is not None:
            self._audit(self._before)
        self.open = False
        receipt = self.receipt = self._make_receipt(ok, error)
        session.ended(self, receipt, ("" if self._full else None) if ok else undefined)
        (_log.info if ok else _log.warning)("%s", receipt.line())
        self._event("finished" if ok else "failed", update=self.number, error=error)
        return receipt

    def _audit(self, before: TensorMap) -> None:
        layers = {name: layer.module for name, layer in self.session.cold.layout.layers.items()}
        reported = {(finding.layer, finding.path) for finding in self._findings}
        self._findings += compare(before, TensorMap(layers), reported)
        self._before = None

    def _make_receipt(self, ok: bool, error: str) -> Receipt:
        session, stream = self.session, self._stream
        return Receipt(
            ok=ok,
            update=self.number,
            manifest_digest=session.manifest.digest,
            contract_digest=session.manifest.contract_digest,
            rank=session.manifest.rank.index,
            scope=str(self.scope),
            commit=session.commit,
            unknown_sources=tuple(stream.unknown),
            sources=stream.count,
            bytes_received=stream.nbytes,
            bytes_published=self._published_bytes,
            seconds=round(session.device.clock() - self._start, 6),
            staging_budget=session.staging_bytes,
            staging_peak=self._pool.peak,
            spills=self._spills,
            spilled_bytes=self._spilled_bytes,
            findings=tuple(self._findings),
            hooks_required=session.cold.hooks is not None,
            ballots=self._ballots,
            error=error,
            **self._progress.tally(self._states),
        )

    def _event(self, name: str, **values: object) -> None:
        callback = self.session.on_event
        if callback is not None:
            try:
                callback(name, values)
            except Exception:
                _log.warning("%s: the callback for %r raised", self._rank, name, exc_info=True)


_ABORT_SECONDS = 30.0
