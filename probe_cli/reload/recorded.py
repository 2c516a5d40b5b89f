"""From what a recording saw to a manifest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from probe_cli.checkpoint import Checkpoint
from probe_cli.dtypes import numel
from probe_cli.manifest import Manifest, checkpoint_identity
from probe_cli.manifest.coverage import Footprint, coverage
from probe_cli.manifest.identity import source_entry
from probe_cli.manifest.regions import contiguous
from probe_cli.manifest.schema import (
    Application,
    Coverage,
    EngineIdentity,
    Layer,
    ModelIdentity,
    Summary,
    TensorEntry,
    View,
    Write,
)
from probe_cli.model.dtypes import dtype_name
from probe_cli.model.inventory import Inventory, OwnedTensor
from probe_cli.topology import Rank

__all__ = ["RecordedKey", "recorded_manifest"]

#: Operators that write to some elements of what they are given only.
_PARTIAL = frozenset(
    {"index_put_", "_index_put_impl_", "index_copy_", "index_add_", "index_fill_", "scatter_", "scatter_add_"}
    | {"masked_fill_", "masked_scatter_", "put_"}
)


@dataclass
class RecordedKey:
    """One key of a contract while it is being recorded."""

    owned: OwnedTensor
    sources: tuple[str, ...]
    selectors: dict[str, Any]
    direct: bool
    attribution: Literal["storage", "stream"]
    count: int = 0
    #: (full name of the tensor written, its part) -> operator.
    writes: dict[tuple[str, View | None], str] = field(default_factory=dict)
    #: Those of `writes` that were added to what the tensor held before the load.
    accumulating: set[tuple[str, View | None]] = field(default_factory=set)
    #: What single calls wrote -> how many of them wrote just that.
    calls: dict[tuple[tuple[str, View | None], ...], int] = field(default_factory=dict)

    def add(self, writes: Iterable[tuple[tuple[str, View | None], str]]) -> None:
        """One more call, and its writes."""
        made = dict(writes)
        self.count += 1
        self.writes.update(made)
        call = tuple(made)
        self.calls[call] = self.calls.get(call, 0) + 1


def recorded_manifest(
    model: nn.Module,
    keys: Iterable[RecordedKey],
    checkpoint: Checkpoint,
    rank: Rank,
    engine: EngineIdentity,
    declined: int,
) -> Manifest:
    """The manifest of one rank."""
    keys = list(keys)
    inventory = Inventory(model)
    aliases = inventory.alias_groups()
    named = {owned.full_name: owned for owned in inventory.tensors()}
    layers = tuple(
        Layer(
            name=layer.name,
            class_name=type(layer.module).__name__,
            tensors=tuple(_tensor(owned, keys, aliases, named) for owned in layer.tensors.values()),
            applications=tuple(_application(key) for key in keys if key.owned.layer == layer.name),
        )
        for layer in inventory.layers.values()
    )
    used = {source for key in keys for source in key.sources}
    sources = [source for source in checkpoint.sources if source.name in used]
    architectures = (checkpoint.config or {}).get("architectures")
    return Manifest.build(
        engine=engine,
        topology=rank.topology,
        rank=rank,
        model=ModelIdentity(
            class_name=type(model).__name__,
            architecture=architectures[0] if isinstance(architectures, list) and architectures else None,
            config_digest=checkpoint.config_digest,
        ),
        checkpoint=checkpoint_identity(checkpoint),
        sources=[source_entry(source) for source in sources],
        layers=layers,
        summary=_summary(layers, declined, sum(source.nbytes for source in sources), len(sources)),
    )


def _application(key: RecordedKey) -> Application:
    own = key.owned.full_name
    source = 0 if key.sources else None
    return Application(
        sources=key.sources,
        tensor=key.owned.name,
        selectors=key.selectors,
        count=key.count,
        direct=key.direct,
        attribution=key.attribution,
        writes=tuple(
            Write(
                source=source,
                dst=view,
                tensor=None if name == own else name,
                exact=False,
                accumulates=(name, view) in key.accumulating,
            )
            for name, view in key.writes
        ),
    )


def _tensor(
    owned: OwnedTensor, keys: list[RecordedKey], aliases: dict[str, str], named: dict[str, OwnedTensor]
) -> TensorEntry:
    tensor = owned.tensor
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return TensorEntry(
        name=owned.name,
        dtype=dtype_name(tensor.dtype),
        shape=shape,
        stride=None if stride == contiguous(shape) else stride,
        kind=owned.kind,
        persistent=owned.persistent,
        alias=aliases.get(owned.full_name),
        storage_offset=int(tensor.storage_offset()),
        coverage=_coverage(owned, keys, aliases, named),
    )


def _through_alias(view: View | None, written: OwnedTensor, owned: OwnedTensor) -> View | None:
    """A part of one tensor as a part of another on the same storage; None where that cannot be said."""
    if view is None or written.tensor.dtype != owned.tensor.dtype:
        return None
    offset = view.offset + int(written.tensor.storage_offset()) - int(owned.tensor.storage_offset())
    return View(offset, view.shape, view.stride) if offset >= 0 else None


def _coverage(
    owned: OwnedTensor, keys: list[RecordedKey], aliases: dict[str, str], named: dict[str, OwnedTensor]
) -> Coverage | None:
    group = aliases.get(owned.full_name)
    shape = tuple(owned.tensor.shape)
    footprints: list[Footprint] = []
    exact = True
    for key in keys:
        for call, times in key.calls.items():
            views: list[View | None] = []
            for name, view in call:
                operator = key.writes[name, view]
                if name != owned.full_name:
                    if group is None or aliases.get(name) != group:
                        continue
                    view = _through_alias(view, named[name], owned)
                exact = exact and view is not None and operator.split("::")[-1] not in _PARTIAL
                views.append(view)
            if views:
                footprints.append((views, times))
    if footprints:
        return coverage(shape, footprints, tuple(owned.tensor.stride()), exact=exact)
    total = numel(shape)
    return Coverage(gap_elements=total, gaps=(tuple((0, size) for size in shape),)) if total else None


def _summary(layers: tuple[Layer, ...], declined: int, nbytes: int, used: int) -> Summary:
    tensors = [tensor for layer in layers for tensor in layer.tensors]
    applications = [application for layer in layers for application in layer.applications]
    covered = [(tensor.coverage, numel(tensor.shape)) for tensor in tensors if tensor.coverage is not None]
    unfed = sum(1 for found, total in covered if found.gap_elements == total)
    return Summary(
        layers=len(layers),
        tensors=len(tensors),
        applications=sum(application.count for application in applications),
        declined=declined,
        direct_writes=sum(application.count for application in applications if application.direct),
        computed=0,
        gaps=sum(1 for found, total in covered if 0 < found.gap_elements < total),
        overlaps=sum(1 for found, _ in covered if found.overlap_elements),
        unfed=unfed,
        sources_used=used,
        bytes_read=nbytes,
    )
