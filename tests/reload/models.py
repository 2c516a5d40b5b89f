"""Tiny pure-PyTorch models with weight loaders, and what the tests do with them: cold loads, probes, streams."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from probe_cli.checkpoint import Checkpoint
from probe_cli.manifest import Manifest
from probe_cli.model.dtypes import dtype_name
from probe_cli.probe import probe
from probe_cli.reload import ColdLoad, ReloadSession

Weights = dict[str, torch.Tensor]


def default_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight)


class Model(nn.Module):
    """Loads `name` into the parameter `name`, unless `route` says otherwise: source -> (parameter, selectors)."""

    route: Mapping[str, tuple[str, dict[str, Any]]] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        params = dict(self.named_parameters(remove_duplicate=False))
        loaded = set()
        for name, tensor in weights:
            target, selectors = self.route.get(name, (name, {}))
            if target not in params:
                continue
            param = params[target]
            loader = getattr(param, "weight_loader", default_loader)
            loader(param, tensor, **selectors)
            loaded.add(target)
        return loaded


def parameter(*shape: int, loader: Callable[..., object] | None = default_loader) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(shape), requires_grad=False)
    if loader is not None:
        made.weight_loader = loader  # type: ignore[attr-defined]
    return made


def weights_like(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Weights:
    """Values that differ everywhere for different seeds: B is A's with another sign and offset."""
    generator = torch.Generator().manual_seed(1000)
    base = {name: torch.rand(shape, generator=generator) + 0.5 for name, shape in shapes.items()}
    return {name: (value + seed) * (1 if seed % 2 else -1) for name, value in base.items()}


def checkpoint_of(weights: Mapping[str, torch.Tensor]) -> Checkpoint:
    rows = [{"name": n, "dtype": dtype_name(t.dtype), "shape": list(t.shape)} for n, t in weights.items()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "wire.json"
        path.write_text(json.dumps(rows))
        return Checkpoint.from_wire(path)


def cold(make: Callable[[], Model], weights: Weights) -> tuple[Model, Manifest, ColdLoad]:
    """A model as a serving process has it: built, probed, loaded, captured, post-processed."""
    model = make()
    manifest = probe(model, checkpoint_of(weights))
    model.load_weights(iter(weights.items()))
    captured = ColdLoad(model)
    captured.loaded(manifest)
    captured.process()
    return model, manifest, captured


def session_of(make: Callable[[], Model], weights: Weights, **options: Any) -> ReloadSession:
    model, manifest, captured = cold(make, weights)
    return ReloadSession(model, manifest, cold=captured, poison=True, **options)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of every parameter and buffer, aliases and non-persistent ones too."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def pointers(model: nn.Module) -> dict[str, tuple[int, int]]:
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    return {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors.items()}


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Bit for bit, under the same names; NaN equals NaN of the same bits."""
    return left.keys() == right.keys() and all(bits(left[name]) == bits(right[name]) for name in left)


def bits(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), bytes(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())


def one_buffer(weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """A sender that receives every tensor into the same memory."""
    buffer = torch.empty(max(tensor.numel() for tensor in weights.values()))
    for name, tensor in weights.items():
        received = buffer[: tensor.numel()].view(tensor.shape)
        received.copy_(tensor)
        yield name, received
        buffer.fill_(float("nan"))
