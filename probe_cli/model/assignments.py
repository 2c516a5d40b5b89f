"""Writes that no dispatch mode sees: `.data =`, and tensors that are registered with a module during the load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from probe_cli.model.inventory import Inventory, OwnedTensor, owned_tensors
from probe_cli.model.loaders import LoaderInterception
from probe_cli.model.patched import patched
from probe_cli.model.storage import storage_key

__all__ = ["SET_DATA", "enter_unannounced", "watch_assignments", "watch_registrations"]

# The getset descriptor of C++; `data` on `torch.Tensor` is what is patched.
_DATA: Any = vars(torch._C.TensorBase)["data"]
_GET_DATA = _DATA.__get__
#: What `tensor.data = value` does, whether or not it is watched.
SET_DATA: Callable[[torch.Tensor, torch.Tensor], None] = _DATA.__set__

#: Called with a tensor of the model that was not known, or with a new one under a known name, before it is entered.
OnEntered = Callable[[OwnedTensor], None]


@contextmanager
def watch_assignments(
    inventory: Inventory,
    on_assigned: Callable[[OwnedTensor, torch.Tensor, torch.Tensor], None],
    elsewhere: Callable[[OwnedTensor], Exception],
) -> Iterator[None]:
    """Inside: `tensor.data = value` on a tensor of the model calls `on_assigned(owned, tensor, value)`, which is to carry
    it out. In another thread, what `elsewhere` gives is raised."""
    thread = threading.get_ident()

    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        owners = inventory.owners(tensor)
        if owners and threading.get_ident() != thread:
            raise elsewhere(owners[0])
        if owners:
            on_assigned(owners[0], tensor, value)
        else:
            SET_DATA(tensor, value)

    with patched(torch.Tensor, data=property(_GET_DATA, set_data)):
        yield


def enter_unannounced(model: nn.Module, inventory: Inventory, on_entered: OnEntered) -> None:
    """Enter tensors that were put into `_parameters` or `_buffers`, or in a module into `_modules`, behind the module's
    back."""
    for name, module in model.named_modules():
        inventory.names_of_modules.setdefault(module, name)
        for owned in owned_tensors(name, module):
            if not inventory.owners(owned.tensor):
                _enter(owned, inventory, on_entered)


def _enter(owned: OwnedTensor, inventory: Inventory, on_entered: OnEntered) -> None:
    if not any(other.full_name == owned.full_name for other in inventory.on_storage(storage_key(owned.tensor))):
        on_entered(owned)
    inventory.add(owned)


@contextmanager
def watch_registrations(inventory: Inventory, loaders: LoaderInterception, on_entered: OnEntered) -> Iterator[None]:
    """Know parameters, buffers and modules that are registered during the load. Those of another thread are found by
    `enter_unannounced`."""
    thread = threading.get_ident()

    def registered(
        kind: Literal["parameter", "buffer"], module: nn.Module, name: str, tensor: torch.Tensor | None
    ) -> None:
        layer = inventory.names_of_modules.get(module)
        if tensor is None or layer is None or threading.get_ident() != thread:
            return
        known = inventory.layers[layer].tensors.get(name) if layer in inventory.layers else None
        if known is not None and known.tensor is tensor:
            return
        loaders.cover(type(tensor))
        persistent = kind == "parameter" or name not in module._non_persistent_buffers_set
        _enter(OwnedTensor(layer, name, tensor, module, kind, persistent), inventory, on_entered)

    def appeared(holder: nn.Module, name: str, child: nn.Module | None) -> None:
        above = inventory.names_of_modules.get(holder)
        if child is None or above is None or threading.get_ident() != thread:
            return
        for path, module in child.named_modules(prefix=f"{above}.{name}" if above else name):
            if module in inventory.names_of_modules:
                continue
            inventory.names_of_modules[module] = path
            for owned in owned_tensors(path, module):
                loaders.cover(type(owned.tensor))
                _enter(owned, inventory, on_entered)

    hooks = (
        nn_module.register_module_module_registration_hook(appeared),
        nn_module.register_module_parameter_registration_hook(lambda m, n, t: registered("parameter", m, n, t)),
        nn_module.register_module_buffer_registration_hook(lambda m, n, t: registered("buffer", m, n, t)),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
