"""Units: the layers that are staged, processed and published together because they share memory or a loader's
writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from probe_cli.reload.contract import Contract, Expectation
from probe_cli.reload.layout import Cluster, LayerLayout, LoadedLayout
from probe_cli.reload.pool import padded

__all__ = ["Unit", "units_of"]


@dataclass(eq=False)
class Unit:
    """Layers in model order. Almost always one; more where weights are tied or viewed across layers."""

    index: int
    layers: tuple[LayerLayout, ...]
    expectations: tuple[Expectation, ...]
    #: What is staged: clusters that the contract feeds and, if there is post-processing, the rest of the layers' too.
    clusters: tuple[Cluster, ...]
    #: Names of layers with a post-processing hook.
    hooked: tuple[str, ...]
    #: Staging bytes of the clusters.
    nbytes: int

    @property
    def name(self) -> str:
        """The layer that the unit is called after: the first with a contract."""
        return self.expectations[0].layer if self.expectations else self.layers[0].name

    @property
    def total(self) -> int:
        """Applications that the unit waits for."""
        return sum(expectation.count for expectation in self.expectations)


def units_of(layout: LoadedLayout, contract: Contract, has_hook: Callable[[str, nn.Module], bool]) -> list[Unit]:
    """All layers, grouped, in model order."""
    parent = {name: name for name in layout.layers}

    def find(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for cluster in layout.clusters:
        for member in cluster.members[1:]:
            parent[find(member.layer)] = find(cluster.members[0].layer)
    fed: set[int] = set()
    for expectation in contract.expectations:
        for full_name in expectation.written:
            layer = full_name.rpartition(".")[0]
            parent[find(layer)] = find(expectation.layer)
            fed.add(layout.cluster_of[full_name].index)
    groups: dict[str, list[LayerLayout]] = {}
    for layer_layout in layout.layers.values():
        groups.setdefault(find(layer_layout.name), []).append(layer_layout)
    return [_unit(index, group, layout, contract, has_hook, fed) for index, group in enumerate(groups.values())]


def _unit(
    index: int,
    layers: list[LayerLayout],
    layout: LoadedLayout,
    contract: Contract,
    has_hook: Callable[[str, nn.Module], bool],
    fed: set[int],
) -> Unit:
    expectations = tuple(e for layer in layers for e in contract.by_layer.get(layer.name, ()))
    hooked = tuple(layer.name for layer in layers if has_hook(layer.name, layer.module))
    clusters: dict[int, Cluster] = {}
    if expectations or hooked:
        for layer in layers:
            for tensor in layer.tensors.values():
                cluster = layout.cluster_of[tensor.full_name]
                if cluster.device.type != "meta" and (cluster.index in fed or layer.name in hooked):
                    clusters[cluster.index] = cluster
    nbytes = sum(padded(cluster.nbytes) for cluster in clusters.values())
    return Unit(index, tuple(layers), expectations, tuple(clusters.values()), hooked, nbytes)
