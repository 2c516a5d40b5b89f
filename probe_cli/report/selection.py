"""What `show` picks out of a rank's manifest: layers and sources by glob, tensors with gaps or overlaps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import translate

from probe_cli.manifest import Manifest
from probe_cli.manifest.schema import Application, Layer, TensorEntry

__all__ = ["PickedLayer", "Selection", "full_name", "is_unfed"]


@dataclass(frozen=True)
class Selection:
    """Globs over layer and source names (`*` crosses dots), and which coverage is wanted. Empty picks everything."""

    layer: str | None = None
    source: str | None = None
    gaps: bool = False
    overlaps: bool = False

    @property
    def empty(self) -> bool:
        return self.layer is None and self.source is None and not self.gaps and not self.overlaps

    def pick(self, manifest: Manifest) -> Iterator[PickedLayer]:
        """The layers that match, each with the tensors and applications that match, in model order."""
        layers, sources = _matcher(self.layer), _matcher(self.source)
        for layer in manifest.layers:
            if layers is not None and layers.match(layer.name) is None:
                continue
            tensors, applications = layer.tensors, layer.applications
            if sources is not None:
                applications = tuple(a for a in applications if any(map(sources.match, a.sources)))
            if self.gaps or self.overlaps:
                tensors = tuple(tensor for tensor in tensors if self._covered_oddly(tensor))
                kept = {tensor.name for tensor in tensors}
                applications = tuple(a for a in applications if a.tensor in kept)
            elif sources is not None:
                kept = {application.tensor for application in applications}
                tensors = tuple(tensor for tensor in tensors if tensor.name in kept)
            if tensors and (sources is None or applications):
                yield PickedLayer(layer, tensors, applications)

    def _covered_oddly(self, tensor: TensorEntry) -> bool:
        found = tensor.coverage
        if found is None:
            return False
        return bool((self.gaps and found.gap_elements) or (self.overlaps and found.overlap_elements))


@dataclass(frozen=True)
class PickedLayer:
    """A layer with those of its tensors and applications that a selection wants."""

    layer: Layer
    tensors: tuple[TensorEntry, ...]
    applications: tuple[Application, ...]


def _matcher(glob: str | None) -> re.Pattern[str] | None:
    return None if glob is None else re.compile(translate(glob))


def full_name(layer: str, tensor: str) -> str:
    """The tensor's name in the model."""
    return f"{layer}.{tensor}" if layer else tensor


def is_unfed(tensor: TensorEntry) -> bool:
    """True if no application writes any element."""
    if tensor.coverage is None:
        return False
    count = 1
    for size in tensor.shape:
        count *= size
    return tensor.coverage.gap_elements == count
