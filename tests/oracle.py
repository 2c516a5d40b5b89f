"""The oracle: what a manifest says about a load, held against what the load really does.

Everything is compared byte by byte in the storages of the model: where an exact, uncomputed write says that source
elements land, they must lie; where no write reaches, the sentinel must still stand; what no region reads must not
matter.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from safetensors.torch import save_file
from torch import nn

from probe_cli.checkpoint import Checkpoint
from probe_cli.manifest import Manifest
from probe_cli.manifest.regions import whole
from probe_cli.manifest.schema import Application, TensorEntry, View, Write
from probe_cli.model.dtypes import torch_dtype

__all__ = [
    "LoadingModel",
    "applications",
    "check",
    "checkpoint_of",
    "each",
    "random_examples",
    "read_bytes",
    "snapshot_of",
    "state_of",
    "tensor",
]

#: For the random tests. More of them: PROBE_MANIFEST_EXAMPLES=2000.
random_examples = settings(
    max_examples=int(os.environ.get("PROBE_MANIFEST_EXAMPLES", "50")), deadline=None, derandomize="CI" in os.environ
)

Weights = Iterable[tuple[str, torch.Tensor]]


def checkpoint_of(path: Path, tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    """A real safetensors file with these tensors, in this order of names."""
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, str(path / "model.safetensors"))
    return Checkpoint.open(path).reordered(list(tensors))


class LoadingModel(nn.Module):
    """A model whose `load_weights` is the function it was given."""

    def __init__(self, load: Callable[[Any, Weights], object], **tensors: torch.Tensor) -> None:
        super().__init__()
        self.load = load
        for name, value in tensors.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def load_weights(self, weights: Weights) -> object:
        return self.load(self, weights)


def each(step: Callable[[Any, str, torch.Tensor], object]) -> Callable[[Any, Weights], None]:
    """A `load_weights` that does one step for each source."""

    def load(model: Any, weights: Weights) -> None:
        for name, value in weights:
            step(model, name, value)

    return load


def applications(manifest: Manifest) -> list[Application]:
    """All applications of a manifest, layer by layer."""
    return [application for layer in manifest.layers for application in layer.applications]


def tensor(manifest: Manifest, layer: str, name: str) -> TensorEntry:
    """One tensor's entry."""
    return next(t for found in manifest.layers if found.name == layer for t in found.tensors if t.name == name)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the bytes of every tensor of a model."""
    return {name: _bytes(value) for name, value in _tensors(model).items()}


def snapshot_of(model: nn.Module) -> dict[str, Any]:
    """All that a probe must leave alone, by identity: tensors, storages, versions, flags, attributes."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[f"{name}.__dict__"] = {key: id(value) for key, value in vars(module).items()}
        for key, value in vars(module).items():
            if isinstance(value, (list, dict, set)):
                found[f"{name}.{key}"] = copy.copy(value)
    for name, value in _tensors(model).items():
        found[name] = (
            id(value),
            value.untyped_storage()._cdata,
            value.storage_offset(),
            tuple(value.shape),
            value.stride(),
            value.dtype,
            value.requires_grad,
            id(value.grad_fn),
            None if value.is_inference() else value._version,
            dict(vars(value)),
        )
    return found


def check(
    manifest: Manifest, load: Callable[[Mapping[str, torch.Tensor]], nn.Module], sources: Mapping[str, torch.Tensor]
) -> None:
    """Hold a manifest against real loads. `load` makes a fresh model with sentinels and really loads it."""
    untouched = load({})
    loaded = load(sources)
    _check_writes(manifest, untouched, loaded, sources)
    _check_reads(manifest, load, loaded, sources)


def read_bytes(manifest: Manifest, sources: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """For every source, a mask over its bytes: which of them some region reads."""
    masks = {name: torch.zeros(value.nbytes, dtype=torch.bool) for name, value in sources.items()}
    for application in applications(manifest):
        for write in application.writes:
            if write.source is not None:
                name = application.sources[write.source]
                masks[name][_source_positions(write, sources[name]).reshape(-1)] = True
    return masks


def _check_writes(
    manifest: Manifest, untouched: nn.Module, loaded: nn.Module, sources: Mapping[str, torch.Tensor]
) -> None:
    before, after = _tensors(untouched), _tensors(loaded)
    names = list(after)
    keys = {name: after[name].untyped_storage()._cdata for name in names}
    size = {keys[name]: after[name].untyped_storage().nbytes() for name in names}
    writers = {key: torch.zeros(length, dtype=torch.int64) for key, length in size.items()}
    expected = {key: torch.full((length,), -1, dtype=torch.int64) for key, length in size.items()}
    certain = {key: torch.zeros(length, dtype=torch.bool) for key, length in size.items()}
    for layer in manifest.layers:
        for application in layer.applications:
            touched: dict[int, torch.Tensor] = {}
            for write in application.writes:
                name = write.tensor or (f"{layer.name}.{application.tensor}" if layer.name else application.tensor)
                key = keys[name]
                at = _positions(write.dst, write.dst_dtype, after[name])
                flat = at.reshape(-1)
                mask = touched.setdefault(key, torch.zeros(size[key], dtype=torch.bool))
                mask[flat] = True
                expected[key][flat] = -1
                if write.exact:
                    certain[key][flat] = True
                if write.exact and not write.computed and write.source is not None:
                    source = sources[application.sources[write.source]]
                    taken = _bytes(source)[_source_positions(write, source)]
                    if write.dst_dtype is None and write.src_dtype is None and source.dtype != after[name].dtype:
                        values = taken.reshape(-1).view(source.dtype)  # a copy that casts
                        taken = _bytes(values.to(after[name].dtype)).reshape(at.shape)
                    assert taken.shape[-1] == at.shape[-1], (name, write)
                    expected[key][flat] = taken.reshape(-1).to(torch.int64)
            for key, mask in touched.items():
                writers[key] += mask * application.count
    for name in names:
        key = keys[name]
        own = _positions(None, None, after[name])
        assert own.shape[0] == before[name].numel()
        memory = torch.empty(0, dtype=torch.uint8).set_(after[name].untyped_storage())
        bytes_now = memory.to(torch.int64)[own]
        was = _bytes(before[name]).to(torch.int64).reshape(bytes_now.shape)
        count, claim = writers[key][own], expected[key][own]
        gap = count == 0
        assert torch.equal(bytes_now[gap], was[gap]), f"{name}: a gap was written"
        single = (count == 1) & (claim >= 0)
        assert torch.equal(bytes_now[single], claim[single]), f"{name}: not what the regions say"
        written = ((count > 0) & certain[key][own]).any(-1)
        assert bool((bytes_now[written] != was[written]).any(-1).all()), f"{name}: a write that never came"
        _check_coverage(name, manifest, count.amax(-1) if count.numel() else count.sum(-1), after[name])


def _check_coverage(name: str, manifest: Manifest, count: torch.Tensor, value: torch.Tensor) -> None:
    layer, _, local = name.rpartition(".")
    covered = tensor(manifest, layer, local).coverage
    if covered is not None and not covered.exact:
        return
    count = count.reshape(value.shape)
    for claimed, real in (
        ((covered.gaps, covered.gap_elements) if covered else ((), 0), count == 0),
        ((covered.overlaps, covered.overlap_elements) if covered else ((), 0), count > 1),
    ):
        mask = torch.zeros(value.shape, dtype=torch.bool)
        for box in claimed[0]:
            mask[tuple(slice(start, stop) for start, stop in box)] = True
        assert torch.equal(mask, real), f"{name}: coverage says {covered}"
        assert claimed[1] == int(real.sum())


def _check_reads(
    manifest: Manifest,
    load: Callable[[Mapping[str, torch.Tensor]], nn.Module],
    loaded: nn.Module,
    sources: Mapping[str, torch.Tensor],
) -> None:
    read = read_bytes(manifest, sources)
    assert manifest.document.summary.bytes_read == sum(int(mask.sum()) for mask in read.values())
    spoiled = {}
    for name, value in sources.items():
        data = _bytes(value).clone()
        data[~read[name]] = 0x2A
        spoiled[name] = data.view(value.dtype).view(value.shape)
    other, own = state_of(load(spoiled)), state_of(loaded)
    assert all(torch.equal(other[name], own[name]) for name in own), "elements that no region reads make a difference"


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        for local, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                found[f"{name}.{local}" if name else local] = value
    return found


def _bytes(value: torch.Tensor) -> torch.Tensor:
    flat = value.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def _expand(elements: torch.Tensor, itemsize: int) -> torch.Tensor:
    return (elements.reshape(-1, 1) * itemsize) + torch.arange(itemsize)


def _walk(view: View) -> torch.Tensor:
    """Element numbers that a view walks, in order."""
    walk = torch.tensor(view.offset)
    for size, stride in zip(view.shape, view.stride):
        walk = walk.unsqueeze(-1) + torch.arange(size) * stride
    return walk.reshape(-1)


def _positions(view: View | None, dtype: str | None, value: torch.Tensor) -> torch.Tensor:
    """Byte positions in the storage of `value`: (elements, bytes of one)."""
    kind = value.dtype if dtype is None else torch_dtype(dtype)
    own = View(0, tuple(value.shape), value.stride())
    found = _expand(_walk(own if view is None else view), kind.itemsize)
    return found + value.storage_offset() * value.dtype.itemsize


def _source_positions(write: Write, source: torch.Tensor) -> torch.Tensor:
    kind = source.dtype if write.src_dtype is None else torch_dtype(write.src_dtype)
    view = whole(tuple(source.shape)) if write.src is None else write.src
    return _expand(_walk(view), kind.itemsize)
