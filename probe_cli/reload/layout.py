"""The loaded layout of a model: what its tensors are while weight loaders fill them, before post-processing.

Post-processing may replace parameters by packed ones without a loader. A reload loads into tensors of the *loaded*
layout, so it is captured before post-processing runs, as metadata only; no tensor is kept alive by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from probe_cli.model.inventory import Inventory, OwnedTensor
from probe_cli.model.storage import byte_range

__all__ = ["Cluster", "LayerLayout", "LoadedLayout", "Place", "TensorLayout"]


@dataclass(frozen=True, eq=False)
class TensorLayout:
    """One tensor under one name. `identity` is equal for the names of one tensor object."""

    layer: str
    name: str
    full_name: str
    kind: str
    persistent: bool
    cls: type
    #: The tensor's own attributes: its loader, its sharding hints.
    attributes: dict[str, Any]
    requires_grad: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    identity: int
    #: Bytes from the start of its cluster.
    start: int
    nbytes: int


@dataclass(eq=False)
class Cluster:
    """Tensors whose memory overlaps: a tensor, its ties, and its views."""

    index: int
    nbytes: int
    device: torch.device
    members: list[TensorLayout] = field(default_factory=list)


@dataclass(eq=False)
class LayerLayout:
    """One layer: its module and the tensors that it directly owns, in order of registration."""

    name: str
    module: nn.Module
    tensors: dict[str, TensorLayout] = field(default_factory=dict)
    #: Names that are registered without a tensor, and whether as buffers: post-processing may fill them.
    empty: dict[str, bool] = field(default_factory=dict)


class Place(NamedTuple):
    """Where a module stood: `holder.name` was `module`. A module may have several places."""

    holder: nn.Module
    name: str
    module: nn.Module

    @property
    def occupant(self) -> nn.Module | None:
        """What stands there now."""
        return self.holder._modules.get(self.name)


class LoadedLayout:
    """Layers in model order, and the clusters of their tensors. `also` names modules that count as layers without
    owning a tensor, since they have post-processing."""

    def __init__(self, model: nn.Module, also: Callable[[str, nn.Module], bool] = lambda name, module: False) -> None:
        inventory = Inventory(model)
        self.model = model
        self.names_of_modules = inventory.names_of_modules
        self.places = [
            Place(holder, name, child)
            for holder in inventory.names_of_modules
            for name, child in holder._modules.items()
            if child is not None
        ]
        self.layers: dict[str, LayerLayout] = {
            name: LayerLayout(name, module)
            for module, name in inventory.names_of_modules.items()
            if name in inventory.layers or also(name, module)
        }
        for layer_layout in self.layers.values():
            module = layer_layout.module
            for is_buffer, registered in ((False, module._parameters), (True, module._buffers)):
                layer_layout.empty.update((name, is_buffer) for name, tensor in registered.items() if tensor is None)
        self.clusters: list[Cluster] = []
        self.cluster_of: dict[str, Cluster] = {}
        for group in _overlapping(inventory.tensors()):
            self._add_cluster(group)
        for layer in inventory.layers.values():  # clusters come in order of memory; names in order of registration
            tensors = self.layers[layer.name].tensors
            self.layers[layer.name].tensors = {name: tensors[name] for name in layer.tensors}

    def tensor(self, full_name: str) -> TensorLayout:
        """The tensor of this name. Raises KeyError."""
        layer, _, name = full_name.rpartition(".")
        return self.layers[layer].tensors[name]

    def find(self, full_name: str) -> TensorLayout | None:
        """The tensor of this name, None if there is none."""
        layer, _, name = full_name.rpartition(".")
        found = self.layers.get(layer)
        return None if found is None else found.tensors.get(name)

    def _add_cluster(self, group: list[tuple[int, int, OwnedTensor]]) -> None:
        base = group[0][0]
        cluster = Cluster(len(self.clusters), max(end for _, end, _ in group) - base, group[0][2].tensor.device)
        self.clusters.append(cluster)
        for start, end, owned in group:
            tensor = owned.tensor
            layout = TensorLayout(
                layer=owned.layer,
                name=owned.name,
                full_name=owned.full_name,
                kind=owned.kind,
                persistent=owned.persistent,
                cls=type(tensor),
                attributes=dict(tensor.__dict__),
                requires_grad=tensor.requires_grad,
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                stride=tuple(tensor.stride()),
                device=tensor.device,
                identity=id(tensor),
                start=start - base,
                nbytes=end - start,
            )
            cluster.members.append(layout)
            self.layers[owned.layer].tensors[owned.name] = layout
            self.cluster_of[owned.full_name] = cluster


def _overlapping(tensors: Iterable[OwnedTensor]) -> list[list[tuple[int, int, OwnedTensor]]]:
    """Groups of tensors whose byte ranges overlap within one storage."""
    by_storage: dict[object, list[tuple[int, int, OwnedTensor]]] = {}
    for owned in tensors:
        start, end = byte_range(owned.tensor)
        # Tensors without elements may share a storage that is none; they overlap with nothing.
        key: object = owned.tensor.untyped_storage()._cdata if end > start else (id(owned.tensor), owned.full_name)
        by_storage.setdefault(key, []).append((start, end, owned))
    groups: list[list[tuple[int, int, OwnedTensor]]] = []
    for entries in by_storage.values():
        entries.sort(key=lambda entry: entry[:2])
        reach = -1
        for entry in entries:
            if entry[0] < reach:
                groups[-1].append(entry)
            else:
                groups.append([entry])
            reach = max(reach, entry[1])
    return groups
