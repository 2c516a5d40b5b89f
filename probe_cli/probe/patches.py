"""Writes that no dispatch mode sees: `.data =`, and tensors that are registered with a module during the load."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from probe_cli.model.inventory import Inventory, OwnedTensor, owned_tensors
from probe_cli.model.loaders import LoaderInterception
from probe_cli.model.storage import storage_key
from probe_cli.probe.ledger import SET_DATA
from probe_cli.probe.memory import patched
from probe_cli.probe.recorder import Recorder
from probe_cli.probe.writes import code_line

__all__ = ["note_unannounced", "run_eagerly", "watch_assignments", "watch_registrations"]

# The getset descriptor of C++; `data` on `torch.Tensor` is what is patched.
_DATA: Any = vars(torch._C.TensorBase)["data"]
_GET_DATA = _DATA.__get__


@contextmanager
def watch_assignments(recorder: Recorder) -> Iterator[None]:
    """Record `parameter.data = value`, and carry it out."""
    thread = threading.get_ident()

    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        owners = recorder.inventory.owners(tensor)
        if owners and threading.get_ident() != thread:
            raise recorder.fail(f"{owners[0].full_name}: .data = in another thread, at {code_line()}")
        if owners:
            recorder.replace_data(owners[0], tensor, value, ".data =")
        else:
            SET_DATA(tensor, value)

    with patched(torch.Tensor, data=property(_GET_DATA, set_data)):
        yield


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Inside, functions under `torch.compile` run as they are written: its tracer would trace the recorder with them."""

    def compiled(model: Any = None, **options: Any) -> Any:
        return model if model is not None else lambda function: function

    with ExitStack() as stack:
        stack.enter_context(patched(torch, compile=compiled))
        # What was compiled before brought the tracer with it; importing it for nothing takes seconds.
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def note_unannounced(model: nn.Module, inventory: Inventory, recorder: Recorder) -> None:
    """Record what tensors hold that were put into `_parameters` or `_buffers`, or in a module into `_modules`, behind the
    module's back."""
    for name, module in model.named_modules():
        inventory.names_of_modules.setdefault(module, name)
        for owned in owned_tensors(name, module):
            if not inventory.owners(owned.tensor):
                _enter(owned, inventory, recorder)


def _enter(owned: OwnedTensor, inventory: Inventory, recorder: Recorder) -> None:
    if not any(other.full_name == owned.full_name for other in inventory.on_storage(storage_key(owned.tensor))):
        recorder.assign(owned, owned.tensor, "registration")
    inventory.add(owned)


@contextmanager
def watch_registrations(inventory: Inventory, recorder: Recorder, loaders: LoaderInterception) -> Iterator[None]:
    """Know parameters, buffers and modules that are registered during the load, and record what they already hold."""
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
        _enter(OwnedTensor(layer, name, tensor, module, kind, persistent), inventory, recorder)

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
                _enter(owned, inventory, recorder)

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
