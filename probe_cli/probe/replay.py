"""One dry run: the model's own loading code, fed with stand-ins for every source, with every write suppressed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import AsyncGeneratorType, CoroutineType, GeneratorType

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from probe_cli.checkpoint import Checkpoint
from probe_cli.engines.base import Engine
from probe_cli.errors import EngineError, ProbeError, ProbeManifestError, described
from probe_cli.model.assignments import enter_unannounced, watch_assignments, watch_registrations
from probe_cli.model.dtypes import torch_dtype
from probe_cli.model.inventory import Inventory, LayerTensors, OwnedTensor
from probe_cli.model.loaders import LoaderInterception
from probe_cli.model.selectors import Binder
from probe_cli.probe.applications import Collector, Entry
from probe_cli.probe.eager import run_eagerly
from probe_cli.probe.memory import guard_memory
from probe_cli.probe.recorder import Recorder
from probe_cli.probe.snapshot import ModelSnapshot
from probe_cli.probe.threads import watch_threads
from probe_cli.probe.values import ValueStore

__all__ = ["DEFAULT_VALUE_LIMIT", "Progress", "Recording", "replay", "stand_in"]

#: Bytes up to which a source is read for real when the load asks for its value.
DEFAULT_VALUE_LIMIT = 1 << 16

_CHUNK = 256

#: Called with (sources fed so far, sources in all), every few hundred sources.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TensorState:
    """A tensor at the end of the load: geometry only, so that it outlives the restored model."""

    owned: OwnedTensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int


@dataclass(frozen=True)
class Recording:
    """What one replay saw."""

    #: Layer -> key -> entry, layers in model order.
    contracts: dict[str, dict[tuple[object, ...], Entry]]
    layers: dict[str, LayerTensors]
    #: Layer -> tensor name -> geometry at the end of the load.
    tensors: dict[str, dict[str, TensorState]]
    aliases: dict[str, str]
    declined: int
    #: Indices of sources that were fed / offered to a loader that declined / used.
    fed: frozenset[int]
    offered: frozenset[int]
    consumed: frozenset[int]
    keys: dict[str, dict[tuple[object, ...], int]]

    def unused(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Source -> why this rank does not use it: "declined", "skipped" or "unread"."""
        reasons: dict[str, str] = {}
        for index, source in enumerate(checkpoint.sources):
            if index in self.consumed:
                continue
            if index in self.offered:
                reasons[source.name] = "declined"
            else:
                reasons[source.name] = "skipped" if index in self.fed else "unread"
        return reasons


def stand_in(name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A meta tensor with the geometry of a source. Two F4 values make one element, as torch packs them."""
    kind = torch_dtype(dtype, what=f"source {name}")
    if dtype == "F4":
        if not shape or shape[-1] % 2:
            raise ProbeError(f"source {name}: F4 needs an even last dimension, its shape is {list(shape)}")
        shape = (*shape[:-1], shape[-1] // 2)
    return torch.empty(shape, dtype=kind, device="meta")


def replay(
    model: nn.Module,
    checkpoint: Checkpoint,
    engine: Engine,
    *,
    value_limit: int = DEFAULT_VALUE_LIMIT,
    progress: Progress | None = None,
    restore: bool = True,
) -> Recording:
    """Run the model's loading code on stand-ins and record what it does. The model is left as it was.

    With `restore=False` no tensor is written either, but Python state that the loading code sets is kept: for a model that
    is thrown away afterwards. Raises ProbeError for what cannot be a contract, EngineError if the loading code fails.
    """
    with _one_at_a_time:
        return _replay(model, checkpoint, engine, value_limit, progress, restore)


#: A replay replaces attributes of torch's classes for its duration.
_one_at_a_time = threading.RLock()


def _replay(
    model: nn.Module,
    checkpoint: Checkpoint,
    engine: Engine,
    value_limit: int,
    progress: Progress | None,
    restore: bool,
) -> Recording:
    inventory = Inventory(model)
    snapshot = ModelSnapshot(model) if restore else None
    collector = Collector(engine, Binder(inventory.names_of_modules, engine.control_flags))
    recorder = Recorder(inventory, ValueStore(checkpoint, value_limit), checkpoint.sources, collector.on_write)
    collector.recorder = recorder
    loaders = LoaderInterception(
        collector.on_call, (owned.tensor for owned in inventory.tensors()), engine.default_loaders()
    )
    stream = _Stream(checkpoint, recorder, progress)
    try:
        with ExitStack() as stack:
            stack.enter_context(engine.loading(model))
            stack.enter_context(loaders)
            stack.enter_context(watch_assignments(inventory, recorder.assigned, recorder.assigned_elsewhere))
            stack.enter_context(guard_memory(recorder))
            stack.enter_context(watch_registrations(inventory, loaders, recorder.entered))
            stack.enter_context(watch_threads(recorder))
            stack.enter_context(run_eagerly())
            stack.enter_context(recorder)
            _refuse_unfinished(engine.load_weights(model, iter(stream)), model)
            enter_unannounced(model, inventory, recorder.entered)
        if recorder.failure is not None:
            raise recorder.failure
        recorder.current = None
        return _recording(model, inventory, collector, stream)
    except ProbeManifestError:
        raise
    except Exception as error:
        if recorder.failure is not None:
            raise recorder.failure from error
        raise EngineError(
            f"load_weights of {type(model).__name__} failed at {recorder.loading()}: {described(error)}"
        ) from error
    finally:
        if snapshot is not None:
            snapshot.restore()


def _refuse_unfinished(result: object, model: nn.Module) -> None:
    """A result that stands for work not done yet: nobody would do it, and the contract would lack it."""
    if isinstance(result, (GeneratorType, CoroutineType, AsyncGeneratorType, map, filter)):
        if isinstance(result, (GeneratorType, CoroutineType)):
            result.close()
        raise EngineError(
            f"load_weights of {type(model).__name__} returned a {type(result).__name__}, so it has not loaded yet",
            hint="it must load before it returns; of a generator or an async function, wrap the call in one that runs it",
        )


class _Stream:
    """Feeds the sources, each as a fresh tensor, and tells the recorder which one is being loaded."""

    def __init__(self, checkpoint: Checkpoint, recorder: Recorder, progress: Progress | None) -> None:
        self._checkpoint = checkpoint
        self._recorder = recorder
        self._progress = progress
        self._thread = threading.get_ident()
        self.fed = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        sources = self._checkpoint.sources
        recorder = self._recorder
        for start in range(0, len(sources), _CHUNK):
            chunk = sources[start : start + _CHUNK]
            # Stand-ins are made outside of what is recorded: the consumer's modes are active in this generator, and
            # leaving them costs too much to do it for each.
            recorder.forget_scratch()
            with _disable_current_modes():
                tensors = [stand_in(source.name, source.dtype, source.shape) for source in chunk]
            if self._progress is not None:
                self._progress(start, len(sources))
            for index, (source, tensor) in enumerate(zip(chunk, tensors), start):
                recorder.add_source(index, tensor)
                # Read ahead by another thread: it says nothing about what is being loaded.
                recorder.current = index if threading.get_ident() == self._thread else None
                self.fed = index + 1
                yield source.name, tensor
        recorder.current = None
        if self._progress is not None:
            self._progress(len(sources), len(sources))


def _recording(model: nn.Module, inventory: Inventory, collector: Collector, stream: _Stream) -> Recording:
    # What the model owns now: parameters that appeared or were replaced during the load are in, deleted ones are out.
    final = Inventory(model)
    contracts = {name: collector.contracts[name] for name in final.layers if name in collector.contracts}
    for name, keys in collector.contracts.items():
        if name not in contracts:
            tensor = next(iter(keys.values())).owned.full_name
            raise ProbeError(
                f"layer {name}: the load wrote {tensor}, but the layer owns no tensor when the load is over",
                hint="loading code must not drop the tensors it has loaded",
            )
    tensors = {
        layer.name: {
            owned.name: TensorState(
                owned,
                owned.tensor.dtype,
                tuple(owned.tensor.shape),
                owned.tensor.stride(),
                int(owned.tensor.storage_offset()),
            )
            for owned in layer.tensors.values()
        }
        for layer in final.layers.values()
    }
    return Recording(
        contracts=contracts,
        layers=final.layers,
        tensors=tensors,
        aliases=final.alias_groups(),
        declined=collector.declined,
        fed=frozenset(range(stream.fed)),
        offered=frozenset(collector.offered),
        consumed=frozenset(collector.consumed),
        keys=collector.keys(),
    )
