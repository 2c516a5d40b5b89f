"""What only the cold load can tell: the loaded layout, the values no source brings, the hooks that ran, what they
changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from probe_cli.manifest import Manifest
from probe_cli.manifest.schema import Box, Coverage
from probe_cli.reload.contract import Contract
from probe_cli.reload.layout import Cluster, LoadedLayout, TensorLayout
from probe_cli.reload.processing import DefaultProcessing, HookLog, Processing, watch_hooks
from probe_cli.reload.state import Change, StateSnapshot

__all__ = ["ColdLoad", "Residue", "copy_boxes", "fed_tensors", "gaps_of", "live_tensor"]


@dataclass(frozen=True, eq=False)
class Residue:
    """Values that the first load left where no source writes. `boxes` None: the whole tensor is one piece."""

    boxes: tuple[Box, ...] | None
    values: tuple[torch.Tensor, ...]

    def fill(self, target: torch.Tensor) -> None:
        """Write the values into a tensor of the same shape."""
        if self.boxes is None:
            target.copy_(self.values[0])
            return
        for box, value in zip(self.boxes, self.values):
            cut(target, box).copy_(value)

    @property
    def nbytes(self) -> int:
        return sum(value.numel() * value.element_size() for value in self.values)


class ColdLoad:
    """Made after the model is built and before post-processing; `loaded` after its weights are there, `processing`
    around the post-processing. A session that is given none of this takes the live tensors for the loaded ones."""

    def __init__(self, model: nn.Module, processing: Processing | None = None) -> None:
        self.model = model
        self.hooks_of: Processing = processing or DefaultProcessing()
        self.layout = LoadedLayout(model, self.hooks_of.has_hook)
        self.residue: dict[str, Residue] = {}
        #: None until the cold load's post-processing was watched.
        self.hooks: HookLog | None = None
        #: Layer -> what its processing changed beside parameters and buffers.
        self.changes: dict[str, list[Change]] = {}

    def loaded(self, manifest: Manifest, *, every_layer: bool = False) -> None:
        """The weights are there and not yet processed: keep what no source brings, for layers that will be
        processed. In others the live tensors still have it; `every_layer` is for live memory that may be given up."""
        self.layout = LoadedLayout(self.model, self.hooks_of.has_hook)
        fed = fed_tensors(Contract(manifest))
        coverage = {
            f"{layer.name}.{tensor.name}" if layer.name else tensor.name: tensor.coverage
            for layer in manifest.layers
            for tensor in layer.tensors
        }
        for layer in self.layout.layers.values():
            if not every_layer and not self.hooks_of.has_hook(layer.name, layer.module):
                continue
            for tensor in layer.tensors.values():
                live = live_tensor(layer.module, tensor)
                gaps = gaps_of(tensor, self.layout.cluster_of[tensor.full_name], fed, coverage.get(tensor.full_name))
                if live is not None and live.device.type != "meta" and gaps != ():
                    self.residue[tensor.full_name] = keep(live.detach(), gaps)

    @contextmanager
    def processing(self) -> Iterator[None]:
        """Around the cold load's post-processing: note which hooks run on which layer, and what they change."""
        before = {
            layer.name: StateSnapshot(layer.module)
            for layer in self.layout.layers.values()
            if self.hooks_of.has_hook(layer.name, layer.module)
        }
        with watch_hooks(self.layout.names_of_modules, self.hooks_of.hook_names) as log:
            yield
        self.hooks = log
        self.changes = {name: changes for name, snapshot in before.items() if (changes := snapshot.changes())}

    def process(self) -> None:
        """Run the post-processing of every layer in model order, watched."""
        layers = [layer for layer in self.layout.layers.values() if self.hooks_of.has_hook(layer.name, layer.module)]
        layers.sort(key=lambda layer: self.hooks_of.deferred(layer.name, layer.module))
        with self.processing(), torch.no_grad():
            for layer in layers:
                self.hooks_of.process(layer.name, layer.module)


def fed_tensors(contract: Contract) -> set[str]:
    """Full names of all tensors that some application writes."""
    return {name for expectation in contract.expectations for name in expectation.written}


def gaps_of(tensor: TensorLayout, cluster: Cluster, fed: set[str], coverage: Coverage | None) -> tuple[Box, ...] | None:
    """The boxes of a tensor that no source writes; None for all of it, or where that is not known exactly."""
    if tensor.nbytes == 0:
        return ()
    if tensor.full_name in fed:
        if coverage is None:
            return ()
        return coverage.gaps if coverage.exact else None
    # An alias is filled through the tensor that it aliases.
    return () if any(member.full_name in fed for member in cluster.members) else None


def keep(tensor: torch.Tensor, boxes: tuple[Box, ...] | None) -> Residue:
    """Copies of these boxes of a tensor, where the tensor is."""
    if boxes is None:
        return Residue(None, (tensor.clone(),))
    return Residue(boxes, tuple(cut(tensor, box).clone() for box in boxes))


def copy_boxes(source: torch.Tensor, target: torch.Tensor, boxes: tuple[Box, ...] | None) -> None:
    """Copy these boxes (None: everything) from one tensor to another of the same shape."""
    if boxes is None:
        target.copy_(source)
        return
    for box in boxes:
        cut(target, box).copy_(cut(source, box))


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of a tensor that a box selects."""
    for dimension, (start, stop) in enumerate(box):
        tensor = tensor.narrow(dimension, start, stop - start)
    return tensor


def live_tensor(module: nn.Module, tensor: TensorLayout) -> torch.Tensor | None:
    """The tensor that is registered under a layout's name now."""
    found = module._parameters.get(tensor.name)
    return found if found is not None else module._buffers.get(tensor.name)
