"""The few writes and reads that no dispatch mode sees: `.data =`, `.tolist()`, `.numpy()`, and tensors that are registered
with a module during the load."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from probe_cli.model.inventory import Inventory, OwnedTensor, storage_key
from probe_cli.model.loaders import LoaderInterception
from probe_cli.probe.recorder import Recorder

__all__ = ["watch_assignments", "watch_registrations"]

# The getset descriptor of C++; `data` on `torch.Tensor` is what is patched.
_DATA: Any = vars(torch._C.TensorBase)["data"]
_GET_DATA = _DATA.__get__
_SET_DATA = _DATA.__set__


@contextmanager
def watch_assignments(recorder: Recorder) -> Iterator[None]:
    """Record `parameter.data = value`; answer `tolist()` and `numpy()` of meta tensors with real values or an error."""
    thread = threading.get_ident()

    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        owners = recorder.inventory.owners(tensor) if threading.get_ident() == thread else []
        if not owners:
            _SET_DATA(tensor, value)
            return
        if storage_key(value) != storage_key(tensor):
            recorder.assign(owners[0], value, ".data =")
        if tensor.device == value.device:
            _SET_DATA(tensor, value)
            recorder.inventory.add_storage(owners[0], tensor)
        # A stand-in cannot be the data of a real tensor: the assignment is recorded and not carried out.

    def reader(name: str) -> Any:
        original = getattr(torch._C.TensorBase, name)

        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.device.type == "meta" and threading.get_ident() == thread:
                tensor = recorder.real_value(tensor, name)
            return original(tensor, *args, **kwargs)

        return read

    patched = {"data": property(_GET_DATA, set_data), "tolist": reader("tolist"), "numpy": reader("numpy")}
    for name, value in patched.items():
        setattr(torch.Tensor, name, value)
    try:
        yield
    finally:
        for name in patched:
            delattr(torch.Tensor, name)


@contextmanager
def watch_registrations(inventory: Inventory, recorder: Recorder, loaders: LoaderInterception) -> Iterator[None]:
    """Know parameters and buffers that are registered during the load, and record what they already hold."""
    thread = threading.get_ident()

    def registered(kind: Literal["parameter", "buffer"], module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        layer = inventory.names_of_modules.get(module)
        if tensor is None or layer is None or threading.get_ident() != thread:
            return
        known = inventory.layers[layer].tensors.get(name) if layer in inventory.layers else None
        if known is not None and known.tensor is tensor:
            return
        loaders.cover(type(tensor))
        persistent = kind == "parameter" or name not in module._non_persistent_buffers_set
        owned = OwnedTensor(layer, name, tensor, module, kind, persistent)
        if not any(other.full_name == owned.full_name for other in inventory.on_storage(storage_key(tensor))):
            recorder.assign(owned, tensor, "registration")
        inventory.add(owned)

    hooks = (
        nn_module.register_module_parameter_registration_hook(lambda m, n, t: registered("parameter", m, n, t)),
        nn_module.register_module_buffer_registration_hook(lambda m, n, t: registered("buffer", m, n, t)),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
