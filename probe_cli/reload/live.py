"""The live tensors of the layers: what serving and captured graphs point to. They are taken aside while a layer is
loaded and put back as the very same objects."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch

from probe_cli.errors import ReloadError
from probe_cli.reload.layout import LayerLayout

__all__ = ["LiveLayer"]


class LiveLayer:
    """One layer's registered tensors as they are when this is made."""

    def __init__(self, layout: LayerLayout) -> None:
        self.layout = layout
        self.module = layout.module
        self.parameters = dict(layout.module._parameters)
        self.buffers = dict(layout.module._buffers)
        self.non_persistent = set(layout.module._non_persistent_buffers_set)
        #: What is to be registered now: what was, or the staging objects.
        self._registered = self.parameters, self.buffers, self.non_persistent
        #: The memory of the tensors, whatever loading code puts under the objects.
        self.homes = {name: tensor.detach() for name, tensor in self.tensors().items()}

    def get(self, name: str) -> torch.Tensor | None:
        """The live tensor of this name."""
        found = self.parameters.get(name)
        return found if found is not None else self.buffers.get(name)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All live tensors, parameters first."""
        return {
            name: tensor
            for registered in (self.parameters, self.buffers)
            for name, tensor in registered.items()
            if tensor is not None
        }

    def move_back(self) -> list[tuple[str, str]]:
        """Put tensors back that have left their memory. Returns which: (layer, name)."""
        moved = []
        for name, tensor in self.tensors().items():
            if tensor.data_ptr() != self.homes[name].data_ptr():
                tensor.data = self.homes[name]
                moved.append((self.layout.name, name))
        return moved

    def require_unchanged(self, during: str) -> None:
        """Raise ReloadError if something else is registered now: it would be gone when what was taken aside is put back."""
        parameters, buffers, non_persistent = self._registered
        module = self.module
        if (
            not _same(module._parameters, parameters)
            or not _same(module._buffers, buffers)
            or module._non_persistent_buffers_set != non_persistent
        ):
            raise ReloadError(
                f"{during}: tensors were registered or replaced in {self.layout.name or '(model)'} while it was open",
                hint="change the model between updates; loading code is to write to the tensors that are there (copy_)",
            )

    def put_back(self) -> None:
        """Register exactly what was registered before."""
        _refill(self.module._parameters, self.parameters)
        _refill(self.module._buffers, self.buffers)
        self.module._non_persistent_buffers_set.clear()
        self.module._non_persistent_buffers_set.update(self.non_persistent)
        self._registered = self.parameters, self.buffers, self.non_persistent

    def install(self, objects: Mapping[tuple[str, str], torch.Tensor], *, hooked: bool) -> None:
        """Register the loaded layout: staging objects where there are some, live tensors elsewhere. What
        post-processing has added (`hooked`) goes until it is processed again."""
        parameters: dict[str, torch.nn.Parameter | None] = {}
        buffers: dict[str, torch.Tensor | None] = {}
        for name, layout in self.layout.tensors.items():
            tensor = objects.get((self.layout.name, name))
            if tensor is None:
                tensor = self.get(name)
            if layout.kind == "parameter":
                parameters[name] = tensor  # type: ignore[assignment]
            else:
                buffers[name] = tensor
        for name, is_buffer in self.layout.empty.items() if hooked else ():
            if is_buffer:
                buffers[name] = None
            else:
                parameters[name] = None
        taken = parameters.keys() | buffers.keys()
        kept = {name for name, live in (self.parameters | self.buffers).items() if live is None or not hooked} - taken
        parameters.update((name, live) for name, live in self.parameters.items() if name in kept)
        buffers.update((name, live) for name, live in self.buffers.items() if name in kept)
        _refill(self.module._parameters, parameters)
        _refill(self.module._buffers, buffers)
        volatile = {name for name, layout in self.layout.tensors.items() if not layout.persistent}
        volatile |= self.non_persistent & self.layout.empty.keys()
        self.module._non_persistent_buffers_set.clear()
        self.module._non_persistent_buffers_set.update(volatile | (self.non_persistent - taken))
        self._registered = parameters, buffers, volatile | (self.non_persistent - taken)


def _same(now: Mapping[str, object], before: Mapping[str, object]) -> bool:
    return now.keys() == before.keys() and all(map(operator.is_, now.values(), map(before.__getitem__, now)))


def _refill(registered: dict, tensors: dict) -> None:  # type: ignore[type-arg]
    if registered.keys() == tensors.keys():
        registered.update(tensors)  # keeps the order, and whoever iterates
    else:
        registered.clear()
        registered.update(tensors)
