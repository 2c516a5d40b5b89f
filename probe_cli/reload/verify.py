"""Before anything is touched: does this manifest belong to this model, on this rank, as it is placed now?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from probe_cli.errors import ReloadError
from probe_cli.manifest import Manifest
from probe_cli.manifest.schema import EngineIdentity
from probe_cli.model.dtypes import dtype_name
from probe_cli.reload.cold import ColdLoad
from probe_cli.reload.state import enterable, items_of
from probe_cli.topology import Rank, Topology

__all__ = ["placement", "verify"]

_SHOWN = 12


def verify(
    model: nn.Module,
    manifest: Manifest,
    cold: ColdLoad,
    *,
    rank: Rank | int | None = None,
    topology: Topology | None = None,
    engine: EngineIdentity | None = None,
) -> None:
    """Raise ReloadError that lists what differs between a model and its manifest. Reads metadata only."""
    differences = [*_identity(model, manifest, rank, topology, engine), *_tensors(manifest, cold)]
    if differences:
        shown = "\n".join(f"  {line}" for line in differences[:_SHOWN])
        more = f"\n  and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise ReloadError(
            f"the manifest ({manifest.rank}, {manifest.digest[:19]}) is not this model's:\n{shown}{more}",
            hint="build the manifest for this model, engine, topology and rank; give the session the ColdLoad if "
            "post-processing has replaced tensors",
        )


def _identity(
    model: nn.Module,
    manifest: Manifest,
    rank: Rank | int | None,
    topology: Topology | None,
    engine: EngineIdentity | None,
) -> Iterator[str]:
    document = manifest.document
    index = rank.index if isinstance(rank, Rank) else rank
    if index is not None and index != manifest.rank.index:
        yield f"rank: the manifest is for rank {manifest.rank.index}, this is rank {index}"
    elif isinstance(rank, Rank) and rank != manifest.rank:
        yield f"rank: the manifest is for {manifest.rank}, this is {rank}"
    if topology is not None and topology != manifest.topology:
        yield f"topology: the manifest is for {manifest.topology}, this is {topology}"
    if engine is not None:
        for field in ("name", "version", "target"):
            theirs, ours = getattr(document.engine, field), getattr(engine, field)
            if theirs != ours:
                yield f"engine {field}: the manifest was built with {theirs}, this is {ours}"
    if document.model.class_name not in _class_names(type(model)):
        yield f"model: the manifest is for {document.model.class_name}, this is {type(model).__qualname__}"


def _class_names(cls: type) -> set[str]:
    return {cls.__name__, cls.__qualname__, f"{cls.__module__}.{cls.__qualname__}"}


def _tensors(manifest: Manifest, cold: ColdLoad) -> Iterator[str]:
    layout = cold.layout
    expected = {layer.name: layer for layer in manifest.layers}
    for name, layer_layout in layout.layers.items():
        if name not in expected and layer_layout.tensors:
            yield f"layer {name or '(model)'}: in the model, not in the manifest"
    for name, layer in expected.items():
        found = layout.layers.get(name)
        if found is None:
            yield f"layer {name or '(model)'}: in the manifest, not in the model"
            continue
        tensors = {tensor.name: tensor for tensor in layer.tensors}
        prefix = f"{name}." if name else ""
        for local in found.tensors:
            if local not in tensors:
                yield f"tensor {prefix}{local}: in the model, not in the manifest"
        for local, entry in tensors.items():
            mine = found.tensors.get(local)
            if mine is None:
                yield f"tensor {prefix}{local}: in the manifest, not in the model"
                continue
            stride = entry.stride if entry.stride is not None else contiguous(entry.shape)
            theirs = f"{entry.dtype}{list(entry.shape)}"
            ours = f"{dtype_name(mine.dtype)}{list(mine.shape)}"
            if theirs != ours:
                yield f"tensor {prefix}{local}: the manifest says {theirs}, the model has {ours}"
            elif stride != mine.stride and all(size > 1 for size in entry.shape):
                theirs, ours = str(list(stride)), str(list(mine.stride))
                yield f"tensor {prefix}{local}: the manifest says strides {theirs}, the model has {ours}"
    groups = {}
    for layer in manifest.layers:
        for entry in layer.tensors:
            if entry.alias is not None:
                groups[f"{layer.name}.{entry.name}" if layer.name else entry.name] = entry.alias
    for name, first in groups.items():
        cluster, other = layout.cluster_of.get(name), layout.cluster_of.get(first)
        if cluster is not None and other is not None and cluster is not other:
            yield f"tensor {name}: tied to {first} in the manifest, not in the model"


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def placement(model: nn.Module) -> dict[str, str]:
    """What tells which experts are where: a digest of every integer tensor or list whose name speaks of expert maps.

    Path -> digest. Compared between the making of a session and each update; an engine whose placement shows
    elsewhere gives the session a function of its own.
    """
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        for path, value in _named_values(module):
            if not _speaks_of_placement(path):
                continue
            if isinstance(value, torch.Tensor):
                if value.is_floating_point() or value.device.type == "meta" or value.numel() > 1 << 20:
                    continue
                text = repr((tuple(value.shape), value.tolist()))
            else:
                text = repr(value)
            found[f"{name}.{path}" if name else path] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def _speaks_of_placement(path: str) -> bool:
    # Load counters and the like change all the time; maps and index tables are what places experts.
    lowered = path.lower()
    return "expert" in lowered and any(word in lowered for word in ("map", "physical", "logical", "placement", "local"))


def _named_values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    names = (*module._parameters, *module._buffers, *module._modules, *module.__dict__)
    if "expert" not in " ".join(names).lower():
        return  # most modules
    for registered in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in registered.items() if tensor is not None)
    for name, value in items_of(module):
        if "expert" not in name.lower():
            continue
        if isinstance(value, (torch.Tensor, int)) or _integers(value):
            yield name, value
        elif enterable(value):
            yield from (
                (f"{name}.{step}", inner)
                for step, inner in items_of(value)
                if isinstance(inner, (torch.Tensor, int)) or _integers(inner)
            )


def _integers(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(type(item) is int for item in value)
