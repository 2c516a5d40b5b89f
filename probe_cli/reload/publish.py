"""Process a staged unit and publish it: new values into the storage that was live before, nothing else moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch

from probe_cli.errors import ReloadError
from probe_cli.reload.cold import ColdLoad
from probe_cli.reload.live import LiveLayer
from probe_cli.reload.processing import HookLog, watch_hooks
from probe_cli.reload.staging import StagedUnit
from probe_cli.reload.state import (
    MISSING,
    Change,
    StateSnapshot,
    current_value,
    enterable,
    holdings,
    put_value,
    settle,
)
from probe_cli.reload.text import some
from probe_cli.reload.units import Unit

__all__ = ["Processed", "process", "publish"]

#: Told of attributes that hold tensors: (layer, path, what happened).
Report = Callable[[str, str, str], None]


@dataclass
class Processed:
    """A unit that is ready: for each layer its new tensors, and what processing changed beside them. Nothing is live
    yet."""

    unit: Unit
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    #: (layer, the change, the new value, the live value).
    attributes: list[tuple[str, Change, Any, Any]] = field(default_factory=list)
    hooks: HookLog = field(default_factory=dict)

    def keep(self, staged: StagedUnit, *, to_host: bool) -> None:
        """Make the values last while other units use the staging memory: what post-processing made of it is copied
        (to host memory if asked), staging objects stay as they are, since they follow their memory."""
        for tensors in self.tensors.values():
            for name, tensor in tensors.items():
                if staged.key_of(tensor) is None and (to_host or staged.shares(tensor)):
                    tensors[name] = tensor.detach().to("cpu", copy=True) if to_host else tensor.detach().clone()
        self.attributes = [
            (layer, change, _unshared(new, staged), live) for layer, change, new, live in self.attributes
        ]


def process(
    unit: Unit, live: dict[str, LiveLayer], objects: dict[tuple[str, str], torch.Tensor], cold: ColdLoad
) -> Processed:
    """Run the unit's post-processing over its staging objects. The layers hold their live tensors and attributes
    again when this returns or raises. Raises ReloadError if the result does not fit the live tensors, or a hook did
    not run."""
    processed = Processed(unit)
    layers = [live[layer.name] for layer in unit.layers]
    if not unit.hooked:
        for layer in layers:
            name = layer.layout.name
            now = {local: objects.get((name, local), tensor) for local, tensor in layer.tensors().items()}
            processed.tensors[name] = _collect(layer, now, objects)
        return processed
    undone: list[tuple[Change, Any]] = []
    snapshots: dict[str, StateSnapshot] = {}
    try:
        for layer in layers:
            layer.install(objects, hooked=layer.layout.name in unit.hooked)
        for name in unit.hooked:
            for change in cold.changes.get(name, ()):
                undone.append((change, current_value(change.holder, change.name)))
                change.undo()
        for name in unit.hooked:
            snapshots[name] = StateSnapshot(live[name].module)
        if unit.hooked:
            with watch_hooks(cold.layout.names_of_modules, cold.hooks_of.hook_names) as processed.hooks:
                for name in unit.hooked:
                    _run_hook(name, live[name], cold)
            _require_hooks(unit, cold, processed.hooks)
        for layer in layers:
            module = layer.module
            processed.tensors[layer.layout.name] = _collect(layer, {**module._buffers, **module._parameters}, objects)
    finally:
        _take_attributes(processed, snapshots, undone)
        for layer in layers:
            layer.put_back()
    return processed


def _run_hook(name: str, layer: LiveLayer, cold: ColdLoad) -> None:
    try:
        cold.hooks_of.process(name, layer.module)
    except ReloadError:
        raise
    except Exception as error:
        raise ReloadError(
            f"layer {name or '(model)'}: post-processing failed: {type(error).__name__}: {error}"
        ) from error


def _require_hooks(unit: Unit, cold: ColdLoad, seen: HookLog) -> None:
    if cold.hooks is None:
        return
    for name in unit.hooked:
        lacking = cold.hooks.get(name, Counter()) - seen.get(name, Counter())
        if lacking:
            raise ReloadError(
                f"layer {name or '(model)'}: {some(sorted(lacking), 4)} ran when the weights were first loaded and did "
                "not run now; the layer would not be what a cold load makes of these weights",
                hint="make the hook run again, or keep what it depends on in an attribute that post-processing sets",
            )


def _collect(
    layer: LiveLayer, now: Mapping[str, torch.Tensor | None], objects: dict[tuple[str, str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The new value of each live tensor that has one in `now`."""
    name, found = layer.layout.name, {}
    for local, live in layer.tensors().items():
        new = now.get(local)
        if new is live:
            continue
        if new is None:
            if local in layer.layout.tensors:
                raise ReloadError(f"{name}.{local}: post-processing removed it, but the live layer has it")
            continue  # registered by someone else after the load
        if new.shape != live.shape or new.dtype != live.dtype:
            raise ReloadError(
                f"{name}.{local}: post-processing made {_spec(new)}, but the live tensor is {_spec(live)}",
                hint="give the session what ColdLoad captured before post-processing"
                if (name, local) in objects
                else None,
            )
        found[local] = new
    return found


def _take_attributes(
    processed: Processed, snapshots: dict[str, StateSnapshot], undone: Sequence[tuple[Change, Any]]
) -> None:
    before_undo = {(id(change.holder), change.name): value for change, value in undone}
    for layer, snapshot in snapshots.items():
        for change in snapshot.changes():
            new = current_value(change.holder, change.name)
            live = before_undo.get((id(change.holder), change.name), change.before)
            processed.attributes.append((layer, change, new, live))
    for _, change, _, _ in processed.attributes:
        change.undo()
    for change, value in reversed(undone):
        put_value(change.holder, change.name, value)


def _spec(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _unshared(value: Any, staged: StagedUnit, depth: int = 0, seen: set[int] | None = None) -> Any:
    """A value without tensors in staging memory; helper objects are changed where they are."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if staged.shares(value) else value
    if isinstance(value, tuple) and any(isinstance(item, torch.Tensor) for item in value):
        return tuple(_unshared(item, staged, depth, seen) for item in value)
    if depth >= 4 or id(value) in seen:
        return value
    if isinstance(value, FunctionType):
        seen.add(id(value))
        for cell in value.__closure__ or ():
            cell.cell_contents = _unshared(cell.cell_contents, staged, depth + 1, seen)
    elif enterable(value):
        seen.add(id(value))
        for holder, name, item in holdings(value):
            kept = _unshared(item, staged, depth + 1, seen)
            if kept is not item:
                put_value(holder, name, kept)
    return value


def publish(processed: Processed, live: dict[str, LiveLayer], staged: StagedUnit, report: Report) -> int:
    """Copy the new values into the live tensors. Returns the bytes copied. From the first copy on there is no way
    back."""
    current = staged.current_objects()
    copied = 0
    done: set[tuple[int, ...]] = set()
    with torch.no_grad():
        for name, tensors in processed.tensors.items():
            layer = live[name]
            for local, new in tensors.items():
                target = layer.get(local)
                if target is None:
                    continue
                key = (target.data_ptr(), *target.shape, *target.stride())
                if key in done:
                    continue  # a tied tensor
                done.add(key)
                mine = staged.key_of(new)
                new = new if mine is None else current[mine]
                with _inference(target):
                    target.detach().copy_(new.detach(), non_blocking=True)
                copied += target.numel() * target.element_size()
        for name, change, new, before in processed.attributes:
            if new is MISSING:
                continue
            put_value(change.holder, change.name, new)
            settle(change, before, lambda path, what, layer=name: report(layer, path, what))  # type: ignore[misc]
            # What could not stay where it was must not stay in staging memory, which other layers use next.
            put_value(change.holder, change.name, _unshared(current_value(change.holder, change.name), staged))
    return copied


def _inference(tensor: torch.Tensor) -> AbstractContextManager[object]:
    # Tensors made in inference mode may be written in inference mode only.
    return torch.inference_mode() if tensor.is_inference() else nullcontext()
