"""`ReloadSession`: a live model bound to its rank's manifest, through any number of updates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn

from probe_cli.errors import ReloadError, UsageError
from probe_cli.manifest import Manifest, digest
from probe_cli.manifest.schema import EngineIdentity
from probe_cli.model.loaders import LoaderSites
from probe_cli.model.selectors import DEFAULT_CONTROL_FLAGS, Binder
from probe_cli.reload.cold import ColdLoad
from probe_cli.reload.contract import Contract
from probe_cli.reload.counters import Counters
from probe_cli.reload.device import Device, device_of
from probe_cli.reload.pool import StagingPool
from probe_cli.reload.processing import Processing
from probe_cli.reload.progress import Destination
from probe_cli.reload.recall import Recall
from probe_cli.reload.receipt import Receipt
from probe_cli.reload.scope import ScopeLike, resolve
from probe_cli.reload.staging import StagedUnit, StagingPlan
from probe_cli.reload.structure import Structure
from probe_cli.reload.text import some
from probe_cli.reload.units import Unit, units_of
from probe_cli.reload.update import Update
from probe_cli.reload.verify import placement, verify
from probe_cli.reload.votes import Voter, voter_for
from probe_cli.topology import Rank, Topology

__all__ = ["ReloadSession"]

State = Literal["ready", "updating", "undefined", "closed"]

_registry_lock = threading.RLock()  # refusing an update may end an abandoned one
#: Model -> the update that has it now.
_active: WeakKeyDictionary[nn.Module, Update] = WeakKeyDictionary()
#: Models whose weights are a mixture, since an update failed half way: model -> why.
_undefined: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


class ReloadSession:
    """Verifies model and manifest against each other before anything is touched, then takes updates.

    model: the live model; its weights are loaded. manifest: of this rank. cold: what was captured around the cold
    load; without it the live tensors are taken for the loaded layout. load: what loads a chunk (default
    `model.load_weights`). loading: a context to load in. staging_bytes: budget (default the largest unit x 2).
    in_place: load straight into live tensors where no post-processing stands between (a failed update then leaves the
    model undefined). commit: "layer" publishes each layer when it is complete, "model" all at the end or none. group:
    a process group; all its ranks succeed or none. audit: compare all that captured graphs may see before and after
    each update. watch_direct_writes: see writes that `load_weights` makes outside loaders (None: where the contract
    has some, or a tensor that it needs has no loader). verify_writes: see every loader's writes, not just trust its return value.
    keep_staging: keep staging memory between updates (on Linux hosts it is kept in any case, but the system may take
    it). poison: fill fresh staging memory with NaN (for tests).
    Raises ReloadError if the manifest is not this model's, its loading adds to values from before the load, or another
    session's update is under way.
    """

    def __init__(
        self,
        model: nn.Module,
        manifest: Manifest,
        *,
        cold: ColdLoad | None = None,
        processing: Processing | None = None,
        load: Callable[[Any], object] | None = None,
        loading: Callable[[], Any] | None = None,
        rank: Rank | int | None = None,
        topology: Topology | None = None,
        engine: EngineIdentity | None = None,
        control_flags: frozenset[str] = DEFAULT_CONTROL_FLAGS,
        declined: Callable[[object], bool] = lambda result: result is False,
        default_loaders: tuple[Callable[..., object], ...] = (),
        staging_bytes: int | None = None,
        in_place: bool = False,
        commit: Literal["layer", "model"] = "layer",
        group: Any = None,
        vote_timeout: float = 60.0,
        audit: bool = True,
        placement_of: Callable[[nn.Module], Mapping[str, object]] = placement,
        watch_direct_writes: bool | None = None,
        verify_writes: bool = False,
        keep_staging: bool = False,
        poison: bool = False,
        on_event: Callable[[str, Mapping[str, object]], None] | None = None,
        device: Device | None = None,
    ) -> None:
        if commit not in ("layer", "model"):
            raise UsageError(f'commit={commit!r}, expected "layer" or "model"')
        if cold is not None and cold.model is not model:
            raise UsageError("cold: captured from another model")
        with _registry_lock:
            _refuse_if_active(model)
        if cold is None:
            cold = ColdLoad(model, processing)
            verify(model, manifest, cold, rank=rank, topology=topology, engine=engine)
            cold.loaded(manifest)
        else:
            if processing is not None:
                cold.hooks_of = processing
            verify(model, manifest, cold, rank=rank, topology=topology, engine=engine)
        self.model = model
        self.manifest = manifest
        self.cold = cold
        self.contract = Contract(manifest)
        if self.contract.accumulating:
            raise ReloadError(
                f"loading adds to what {some(list(self.contract.accumulating), 4)} held before the first load; that is gone, so a "
                "reload would not give what a cold load gives",
                hint="let the loader write the tensor first (`zero_`, `copy_`)",
            )
        self.commit = commit
        self.in_place = in_place and commit == "layer"
        self.audit = audit
        self.verify_writes = verify_writes
        self.watch_direct_writes = (
            self._has_direct_writes(default_loaders) if watch_direct_writes is None else watch_direct_writes
        )
        self.keep_staging = keep_staging
        self.poison = poison
        self.declined = declined
        self.default_loaders = default_loaders
        self.loader_sites = LoaderSites()
        self.loading = loading
        self.on_event = on_event
        self.counters = Counters(manifest.rank.index)
        self.receipts: list[Receipt] = []
        self.number = 0
        self.device = device or device_of(_main_device(cold))
        self.units: list[Unit] = units_of(cold.layout, self.contract, cold.hooks_of.has_hook)
        self.plan = StagingPlan(cold, self.contract, self.device)
        self.binder = Binder(cold.layout.names_of_modules, control_flags)
        #: What loader calls came to, and the tensors that they were for, kept over updates.
        self.recall = Recall(self.contract)
        self.destinations: dict[tuple[str, str, bool], Destination] = {}
        self.structure = Structure(cold, self.contract)
        #: Kept between updates if `keep_staging`, or where the system can take the memory when it needs it.
        self.pool: StagingPool | None = None
        self.bundle_digest = _bundle_digest(manifest)
        self.voter: Voter | None = None if group is None else voter_for(group, vote_timeout)
        self.staging_bytes = self._budget(staging_bytes)
        self._load = load
        self._closed = False
        self._placement_of = placement_of
        self._placement = dict(placement_of(model))
        self._staged: dict[int, StagedUnit] = {}

    def _has_direct_writes(self, default_loaders: tuple[Callable[..., object], ...]) -> bool:
        """Whether `load_weights` writes some tensor itself: as the contract says, or because the tensor has no loader
        and nobody said which functions load such ones (to the engine that built the manifest, they were loaders)."""
        if self.contract.direct_tensors:
            return True
        if default_loaders:
            return False
        needed = {expectation.key.full_tensor for expectation in self.contract.expectations}
        return any(
            tensor is not None and f"{layer.name}.{name}".lstrip(".") in needed and not hasattr(tensor, "weight_loader")
            for layer in self.cold.layout.layers.values()
            for registered in (layer.module._parameters, layer.module._buffers)
            for name, tensor in registered.items()
        )

    # State

    @property
    def state(self) -> State:
        """`ready`; `updating`; `undefined`: an update failed after it had changed live tensors, only a full update
        repairs that; `closed`."""
        if self._closed:
            return "closed"
        active = _active.get(self.model)
        if active is not None and active.session is self and active.open:
            return "updating"
        return "undefined" if self.model in _undefined else "ready"

    @property
    def undefined_reason(self) -> str:
        """Why the model is undefined; empty if it is not."""
        return _undefined.get(self.model, "")

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of the last update, finished or failed."""
        return self.receipts[-1] if self.receipts else None

    def invalidate(self, reason: str) -> None:
        """The live weights are lost: the model is undefined until a full update. An update under way is aborted."""
        active = _active.get(self.model)
        if active is not None and active.session is self:
            active.abort(reason)
        with _registry_lock:
            _undefined[self.model] = reason

    def revalidate(self) -> None:
        """All weights were written anew by means that this session does not see: the model is as good as those are."""
        with _registry_lock:
            _undefined.pop(self.model, None)

    def cede(self, layers: Iterable[str]) -> None:
        """These layers gave their place to another model's after the load, which is updated on its own. From now on nothing is
        written to what stands there, and their sources still have to arrive. A layer that the model has nowhere else lets its tensors
        go; one that it has under another name too goes on being updated.

        Raises ReloadError if a layer is not there, or was not replaced, or an update is under way.
        """
        if self.state == "updating":
            raise ReloadError("layers cannot be ceded while an update is under way; finish or abort it first")
        self.structure.cede(layers)

    def close(self) -> None:
        """End the session. An update under way is aborted."""
        active = _active.get(self.model)
        if active is not None and active.session is self:
            active.abort("the session was closed")
        self._closed = True
        self.pool = None

    # Updates

    def update(self, scope: ScopeLike = "full") -> Update:
        """Begin an update. Use it as a context manager: leaving the block finishes it, an exception aborts it.

        Raises ReloadError, before anything is touched, if the scope cuts through what is processed as one, the model
        is undefined and the scope is not full, the expert placement is not what it was, the module of a layer
        that sources are for was replaced and not ceded, a tensor that they are for is gone, or another update has the model.
        """
        self.number += 1
        if self._closed:
            raise ReloadError("this session is closed")
        due = resolve(scope, self.contract, [[layer.name for layer in unit.layers] for unit in self.units])
        if not due:
            raise ReloadError("the contract is empty: there is nothing to update")
        reason = self.undefined_reason
        if reason and scope != "full":
            raise ReloadError(
                f"the model's weights are undefined ({reason}); a partial update cannot repair that",
                hint='deliver a full update: session.update(scope="full")',
            )
        self._refuse_other_placement()
        self.structure.require()
        with _registry_lock:
            _refuse_if_active(self.model)
            update = Update(self, scope, due)
            _active[self.model] = update
        try:
            update.begin()
        except BaseException:
            with _registry_lock:
                update.open = False
                _active.pop(self.model, None)
            raise
        return update

    def load(self, weights: Any) -> object:
        """Run the model's own loading code on a stream."""
        if self._load is not None:
            return self._load(weights)
        return self.model.load_weights(weights)  # type: ignore[operator]

    def staged(self, unit: Unit) -> StagedUnit:
        """The staging objects of a unit; made once, without memory of their own."""
        found = self._staged.get(unit.index)
        if found is None:
            found = self._staged[unit.index] = StagedUnit(unit, self.plan, self.poison)
        return found

    def ended(self, update: Update, receipt: Receipt, undefined: str | None) -> None:
        """Called by an update when it is over. `undefined`: None leaves the model's standing as it is, "" clears it."""
        with _registry_lock:
            if _active.get(self.model) is update:
                del _active[self.model]
            if undefined:
                _undefined[self.model] = undefined
            elif undefined == "":
                _undefined.pop(self.model, None)
        self.receipts.append(receipt)
        del self.receipts[:-32]
        self.counters.add(receipt)

    def _refuse_other_placement(self) -> None:
        now = dict(self._placement_of(self.model))
        if now != self._placement:
            changed = sorted(key for key in {**now, **self._placement} if now.get(key) != self._placement.get(key))
            raise ReloadError(
                f"the expert placement has changed since the contract was bound: {', '.join(changed[:4])}",
                hint="probe the model again for a manifest of the new placement and make a new session with it",
            )

    def _budget(self, asked: int | None) -> int:
        staged = [unit for unit in self.units if unit.clusters]
        largest = max(staged, key=lambda unit: unit.nbytes, default=None)
        if largest is None:
            return 0
        if asked is None:
            return largest.nbytes * 2
        hooked = max((unit for unit in staged if unit.hooked), key=lambda unit: unit.nbytes, default=None)
        if hooked is not None and hooked.nbytes > asked:
            raise UsageError(
                f"staging_bytes={asked} does not hold layer {hooked.name or '(model)'}, which takes "
                f"{hooked.nbytes} bytes",
                hint=f"give at least {hooked.nbytes}",
            )
        return asked


def _refuse_if_active(model: nn.Module) -> None:
    active = _active.get(model)
    if active is None or not active.open:
        return
    if active.abandoned:
        active.abort("its thread has ended")
        return
    raise ReloadError(
        f"another session is updating this model (update {active.number}, begun in thread {active.thread.name!r})",
        hint="finish or abort that update first",
    )


def _main_device(cold: ColdLoad) -> torch.device:
    sizes: dict[torch.device, int] = {}
    for cluster in cold.layout.clusters:
        if cluster.device.type != "meta":
            sizes[cluster.device] = sizes.get(cluster.device, 0) + cluster.nbytes
    return max(sizes, key=lambda device: sizes[device], default=torch.device("cpu"))


def _bundle_digest(manifest: Manifest) -> str:
    document = manifest.document
    return digest([document.engine, document.topology, document.model, document.checkpoint])
