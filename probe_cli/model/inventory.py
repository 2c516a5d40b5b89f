"""The layers of a model: modules that directly own tensors, in model order, with their storages and aliases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from probe_cli.errors import EngineError
from probe_cli.model.storage import storage_key

__all__ = ["Inventory", "LayerTensors", "OwnedTensor"]


@dataclass(frozen=True, eq=False)
class OwnedTensor:
    """A parameter or buffer under the name that its layer gives it."""

    layer: str
    name: str
    tensor: torch.Tensor
    module: nn.Module
    kind: Literal["parameter", "buffer"]
    persistent: bool = True

    @property
    def full_name(self) -> str:
        return f"{self.layer}.{self.name}" if self.layer else self.name


@dataclass(eq=False)
class LayerTensors:
    """One layer: its module and the tensors it directly owns, parameters first, in order of registration."""

    name: str
    module: nn.Module
    tensors: dict[str, OwnedTensor] = field(default_factory=dict)


class Inventory:
    """All layers of a model, and the way from a tensor or a storage back to the names that own it.

    A module that is reachable under several names counts once, under the first. A tensor that several layers own (tied
    weights) is in each of them; `owners` gives all.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers: dict[str, LayerTensors] = {}
        self.names_of_modules: dict[nn.Module, str] = {}
        self._by_storage: dict[int, list[OwnedTensor]] = {}
        self._by_identity: dict[int, list[OwnedTensor]] = {}
        for name, module in model.named_modules():
            self.names_of_modules[module] = name
            for owned in owned_tensors(name, module):
                self.add(owned)

    def add(self, owned: OwnedTensor) -> None:
        """Enter a tensor. A tensor that was registered under the same name before is replaced in its layer, but its
        storage stays known."""
        layer = self.layers.setdefault(owned.layer, LayerTensors(owned.layer, owned.module))
        layer.tensors[owned.name] = owned
        self._by_identity.setdefault(id(owned.tensor), []).append(owned)
        self.add_storage(owned)

    def add_storage(self, owned: OwnedTensor, tensor: torch.Tensor | None = None) -> None:
        """Know the storage of `tensor` (by default the owned tensor's own) as one that `owned` lives on."""
        self._by_storage.setdefault(_key(tensor if tensor is not None else owned.tensor, owned), []).append(owned)

    def owners(self, tensor: torch.Tensor) -> list[OwnedTensor]:
        """The names under which this very tensor object is registered; empty if it is none of the model's."""
        return self._by_identity.get(id(tensor), [])

    def destination(self, parameter: torch.Tensor | None, args: Sequence[object]) -> OwnedTensor | None:
        """The tensor that a loader was called for, from its first arguments or the parameter that it hangs on."""
        for tensor in (*args[:2], parameter):
            if isinstance(tensor, torch.Tensor):
                owners = self.owners(tensor)
                if owners:
                    return owners[0]
        return None

    def on_storage(self, key: int) -> list[OwnedTensor]:
        """The tensors that live on a storage, in model order."""
        return self._by_storage.get(key, [])

    def tensors(self) -> Iterator[OwnedTensor]:
        """Every tensor under every name, in model order."""
        for layer in self.layers.values():
            yield from layer.tensors.values()

    def alias_groups(self) -> dict[str, str]:
        """Full name of each tensor that shares its storage -> full name of the first on that storage."""
        groups: dict[str, str] = {}
        for owners in self._by_storage.values():
            current = [owned for owned in owners if self.layers[owned.layer].tensors.get(owned.name) is owned]
            if len(current) > 1:
                groups.update({owned.full_name: current[0].full_name for owned in current})
        return groups


def owned_tensors(name: str, module: nn.Module) -> Iterable[OwnedTensor]:
    """The tensors that a module directly owns, parameters first."""
    for local, parameter in module._parameters.items():
        if parameter is not None:
            yield OwnedTensor(name, local, parameter, module, "parameter")
    for local, buffer in module._buffers.items():
        if buffer is not None:
            persistent = local not in module._non_persistent_buffers_set
            yield OwnedTensor(name, local, buffer, module, "buffer", persistent)


def _key(tensor: torch.Tensor, owned: OwnedTensor) -> int:
    try:
        return storage_key(tensor)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise EngineError(
            f"{owned.full_name}: a {type(tensor).__name__} has no storage of its own: {str(error).splitlines()[0]}",
            hint="uninitialized and wrapper-subclass tensors cannot be followed; create the plain tensor before the load",
        ) from None
