"""One unit's staging tensors: what weight loaders write to while the live tensors keep serving.

The tensor objects exist from the start of an update, so that `load_weights` can look them up; their memory does not.
Until memory is there they show one element for all (stride 0): harmless to read, an error to write. Memory comes from
the pool, or from the host when the pool is full, and may move from one to the other; the objects stay the same as
long as the device does.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator

import torch

from probe_cli.errors import ReloadError
from probe_cli.model.storage import storage_key
from probe_cli.reload.cold import ColdLoad, copy_boxes, fed_tensors, gaps_of
from probe_cli.reload.contract import Contract
from probe_cli.reload.device import Device
from probe_cli.reload.layout import TensorLayout
from probe_cli.reload.pool import StagingPool, padded
from probe_cli.reload.units import Unit

__all__ = ["Home", "StagedUnit", "StagingPlan"]

ObjectKey = tuple[str, str]


class Home(enum.Enum):
    """Where a unit's staging memory is."""

    NOWHERE = enum.auto()
    POOL = enum.auto()
    HOST = enum.auto()


class StagingPlan:
    """What is the same for all units of a session: where values that no source brings come from."""

    def __init__(self, cold: ColdLoad, contract: Contract, device: Device) -> None:
        self.cold = cold
        self.device = device
        fed = fed_tensors(contract)
        coverage = {
            f"{layer.name}.{tensor.name}" if layer.name else tensor.name: tensor.coverage
            for layer in contract.manifest.layers
            for tensor in layer.tensors
        }
        #: Full name -> boxes that are not written by any source (None: all of it).
        self.gaps = {
            tensor.full_name: gaps
            for layer in cold.layout.layers.values()
            for tensor in layer.tensors.values()
            if (gaps := gaps_of(tensor, cold.layout.cluster_of[tensor.full_name], fed, coverage.get(tensor.full_name)))
            != ()
        }

    def fill(self, tensor: TensorLayout, live: torch.Tensor | None, target: torch.Tensor) -> None:
        """Give `target` what the first load left where no source writes: as kept, else as it is in the live tensor."""
        if tensor.full_name not in self.gaps:
            return
        residue = self.cold.residue.get(tensor.full_name)
        if residue is not None:
            residue.fill(target)
        elif live is not None and live.shape == target.shape:
            copy_boxes(live.detach(), target, self.gaps[tensor.full_name])


class StagedUnit:
    """The staging tensors of one unit. `objects` are installed in the layers while weights are loaded."""

    def __init__(self, unit: Unit, plan: StagingPlan, poison: bool = False) -> None:
        self.unit = unit
        self.home = Home.NOWHERE
        self.objects: dict[ObjectKey, torch.Tensor] = {}
        self._plan = plan
        self._poison = poison
        self._device = plan.device
        self._piece: tuple[StagingPool, int] | None = None
        self._bytes: torch.Tensor | None = None
        self._host_objects: dict[ObjectKey, torch.Tensor] = {}
        #: Where each object's memory is, while there is any.
        self._addresses: dict[ObjectKey, int] = {}
        #: Memory of clusters on another device than the pool's (control tensors on the host), while staged.
        self._apart: dict[int, torch.Tensor] = {}
        self._placeholders: dict[int, torch.Tensor] = {}
        #: Storage of a placeholder -> the object that it stands for, also through `.data` and views taken early.
        self.placeholder_keys: dict[int, ObjectKey] = {}
        for member in self._members():
            key = (member.layer, member.name)
            placeholder = self._placeholders.get(member.identity)
            if placeholder is None:
                placeholder = self._placeholders[member.identity] = _placeholder(member)
                self.placeholder_keys[storage_key(placeholder)] = key
                self.objects[key] = _object(member, placeholder.detach())
            else:
                self.objects[key] = next(
                    self.objects[m.layer, m.name]
                    for m in self._members()
                    if m.identity == member.identity and (m.layer, m.name) in self.objects
                )

    def _members(self) -> Iterator[TensorLayout]:
        for cluster in self.unit.clusters:
            yield from cluster.members

    @property
    def nbytes(self) -> int:
        """Bytes that the unit takes in the pool or on the host."""
        return self.unit.nbytes

    def current_objects(self) -> dict[ObjectKey, torch.Tensor]:
        """The objects that hold the values now."""
        return self._host_objects or self.objects

    @property
    def moved(self) -> bool:
        """True while the values are in other objects than those that `load_weights` looked up."""
        return bool(self._host_objects)

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the unit's staging memory."""
        key = storage_key(tensor)
        memories = [*self._apart.values(), *([] if self._bytes is None else [self._bytes])]
        return any(storage_key(memory) == key for memory in memories)

    def home_of(self, key: ObjectKey) -> torch.Tensor:
        """The part of the staging memory that is this tensor's, whatever its object has been made of."""
        if self._bytes is None:
            raise ReloadError(f"layer {self.unit.name}: {key[1]} has no staging memory yet")
        return next(view for member, view in self._views(self._bytes) if (member.layer, member.name) == key)

    def moved_objects(self) -> list[ObjectKey]:
        """Objects that loading code has put other memory under."""
        objects = self.current_objects()
        return [key for key, address in self._addresses.items() if objects[key].data_ptr() != address]

    def key_of(self, tensor: torch.Tensor) -> ObjectKey | None:
        """The key of a staging object, None if the tensor is none."""
        for objects in (self.objects, self._host_objects):
            for key, made in objects.items():
                if made is tensor:
                    return key
        return None

    def owner_of(self, tensor: torch.Tensor) -> ObjectKey | None:
        """The first object whose memory a tensor shares."""
        if self._bytes is None:
            return None
        key, at = storage_key(tensor), tensor.storage_offset() * tensor.element_size()
        if key == storage_key(self._bytes):
            start = self._bytes.storage_offset()
            for cluster in self.unit.clusters:
                if start <= at < start + max(cluster.nbytes, 1) and cluster.index not in self._apart:
                    member = next((m for m in cluster.members if m.start <= at - start < m.start + m.nbytes), None)
                    return None if member is None else (member.layer, member.name)
                start += padded(cluster.nbytes)
        for cluster in self.unit.clusters:
            if cluster.index in self._apart and storage_key(self._apart[cluster.index]) == key:
                return cluster.members[0].layer, cluster.members[0].name
        return None

    def materialize(self, pool: StagingPool, live: Callable[[TensorLayout], torch.Tensor | None]) -> Home:
        """Get memory, from the pool if it has room, and fill in what no source brings."""
        taken = pool.take(self.nbytes)
        if taken is not None:
            self._piece = (pool, taken[0])
            self._settle_in(Home.POOL, taken[1])
        else:
            self._settle_in(Home.HOST, self._device.host_empty(self.nbytes))
        if self._poison and self._bytes is not None:
            self._bytes.fill_(0xFF)  # NaN in every float type, -1 in every signed integer
            for memory in self._apart.values():
                memory.fill_(0xFF)
        objects = self.current_objects()
        for member in self._members():
            self._plan.fill(member, live(member), objects[member.layer, member.name].detach())
        return self.home

    def spill(self) -> int:
        """Leave the pool for the host. Returns the bytes moved."""
        if self.home is not Home.POOL or self._bytes is None:
            return 0
        host = self._device.host_empty(self.nbytes)
        self._device.to_host(self._bytes[: self.nbytes], host)
        self._leave_pool()
        self._settle_in(Home.HOST, host)
        return self.nbytes

    def make_room(self, pool: StagingPool, others: Iterable[StagedUnit]) -> Iterator[int]:
        """Return from the host to the pool, where others leave it in their order until there is room. Yields the bytes that each
        of those moved. Raises ReloadError if even that is not enough."""
        leaving = iter([other for other in others if other.home is Home.POOL])
        while self.home is Home.HOST and not self.come_back(pool):
            other = next(leaving, None)
            if other is None:
                raise ReloadError(f"layer {self.unit.name}: staging memory is full ({pool.used} bytes in use)")
            yield other.spill()

    def come_back(self, pool: StagingPool) -> bool:
        """Return from the host to the pool; False if there is no room."""
        if self.home is not Home.HOST or self._bytes is None:
            return self.home is Home.POOL
        taken = pool.take(self.nbytes)
        if taken is None:
            return False
        host = self._bytes
        self._device.to_device(host, taken[1][: self.nbytes])
        self._device.release_host(host)
        self._piece = (pool, taken[0])
        self._settle_in(Home.POOL, taken[1])
        return True

    def release(self) -> None:
        """Let go of the memory. The objects turn into placeholders again, whoever still holds them."""
        self._leave_pool()
        if self.home is Home.HOST and self._bytes is not None:
            self._device.release_host(self._bytes)
        self._bytes = None
        self._apart = {}
        self._host_objects, self._addresses = {}, {}
        if self.home is not Home.NOWHERE:
            self._reset_objects()
        self.home = Home.NOWHERE

    # Memory

    def _settle_in(self, home: Home, memory: torch.Tensor) -> None:
        self.home = home
        self._bytes = memory
        if home is Home.HOST and self._device.host_is_apart:
            self._reset_objects()
            self._host_objects, self._addresses = {}, {}
            by_identity: dict[int, torch.Tensor] = {}
            for member, view in self._views(memory):
                if member.identity not in by_identity:
                    by_identity[member.identity] = _object(member, view)
                self._host_objects[member.layer, member.name] = by_identity[member.identity]
                self._addresses[member.layer, member.name] = view.data_ptr()
            return
        self._host_objects, self._addresses = {}, {}
        for member, view in self._views(memory):
            self.objects[member.layer, member.name].data = view
            self._addresses[member.layer, member.name] = view.data_ptr()

    def _views(self, memory: torch.Tensor) -> list[tuple[TensorLayout, torch.Tensor]]:
        views: list[tuple[TensorLayout, torch.Tensor]] = []
        offset = int(memory.storage_offset())
        for cluster in self.unit.clusters:
            storage, start = memory.untyped_storage(), offset
            if cluster.device != self._device.device:
                if cluster.index not in self._apart:
                    self._apart[cluster.index] = torch.empty(cluster.nbytes, dtype=torch.uint8, device=cluster.device)
                storage, start = self._apart[cluster.index].untyped_storage(), 0
            views += [(member, _view(member, storage, start)) for member in cluster.members]
            offset += padded(cluster.nbytes)
        return views

    def _leave_pool(self) -> None:
        if self._piece is not None:
            pool, offset = self._piece
            self._piece = None
            pool.give_back(offset, self.nbytes)

    def _reset_objects(self) -> None:
        for member in self._members():
            self.objects[member.layer, member.name].data = self._placeholders[member.identity]


def _placeholder(member: TensorLayout) -> torch.Tensor:
    one = torch.zeros(1, dtype=member.dtype, device=member.device)
    return one.as_strided(member.shape, (0,) * len(member.shape))


def _view(member: TensorLayout, storage: torch.UntypedStorage, start: int) -> torch.Tensor:
    itemsize = member.dtype.itemsize
    empty = torch.empty(0, dtype=member.dtype, device=storage.device)
    return empty.set_(storage, (start + member.start) // itemsize, member.shape, member.stride)


def _object(member: TensorLayout, data: torch.Tensor) -> torch.Tensor:
    """A tensor object like the one that the layout was taken from: class, attributes, `requires_grad`."""
    if member.cls is torch.Tensor:
        made = data
    else:
        made = torch.Tensor._make_subclass(member.cls, data, member.requires_grad)
    made.__dict__.update(member.attributes)
    return made
