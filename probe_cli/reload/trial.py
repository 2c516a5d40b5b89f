"""Try a manifest on a real model: load A, update to B through the runtime, and compare with a cold load of B, bit for
bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from probe_cli.checkpoint import Checkpoint, Source
from probe_cli.engines.base import Engine
from probe_cli.errors import IncompleteUpdate, UsageError
from probe_cli.manifest import Manifest
from probe_cli.model.dtypes import torch_dtype
from probe_cli.model.inventory import Inventory
from probe_cli.reload.cold import ColdLoad
from probe_cli.reload.receipt import Receipt
from probe_cli.reload.session import ReloadSession

__all__ = ["Trial", "TrialOptions", "negated", "read_tensor", "realize", "run_trial"]

Weights = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class TrialOptions:
    """How the update is delivered. `order`: file, reversed, or random:SEED. `drop`: sources that never come;
    `double`: that come twice in a row."""

    order: str = "file"
    chunks: int = 1
    drop: tuple[str, ...] = ()
    double: tuple[str, ...] = ()
    commit: str = "layer"
    in_place: bool = False
    staging_bytes: int | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Trial:
    """What came of it. `error` is the update's own; `differing` are tensors that are not what a cold load of B makes,
    after an update that succeeded, or not what they were, after one that failed before it had published anything."""

    receipt: Receipt
    state: str
    error: str = ""
    hint: str | None = None
    differing: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    tensors: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.error and not self.differing and not self.moved


def run_trial(
    build: Callable[[], nn.Module],
    engine: Engine,
    manifest: Manifest,
    sources: Sequence[Source],
    a: Callable[[Source], torch.Tensor],
    b: Callable[[Source], torch.Tensor],
    options: TrialOptions,
) -> Trial:
    """Run one trial. `build` makes the model, on meta or not; `a` and `b` give the tensors of a source."""
    arranged = _arranged(sources, options)
    served, cold = _cold(build, engine, manifest, _stream(sources, a), options.device)
    expected = _bytes_of(_cold(build, engine, manifest, _stream(sources, b), options.device)[0])
    before, where = _bytes_of(served), _addresses(served)
    session = ReloadSession(
        served,
        manifest,
        cold=cold,
        load=lambda weights: engine.load_weights(served, weights),
        loading=lambda: engine.loading(served),
        control_flags=engine.control_flags,
        declined=engine.declined,
        default_loaders=tuple(engine.default_loaders()),
        commit="model" if options.commit == "model" else "layer",
        in_place=options.in_place,
        staging_bytes=options.staging_bytes,
        poison=True,
    )
    error, hint = "", None
    try:
        with session.update() as update:
            for chunk in _chunks(arranged, options.chunks):
                update.load_weights(_stream(chunk, b))
    except IncompleteUpdate as failure:
        error, hint = str(failure), failure.hint
    receipt = session.receipt
    if receipt is None:
        raise UsageError("the update left no receipt")
    after = _bytes_of(served)
    undefined = session.state == "undefined"
    wanted = before if error else expected
    return Trial(
        receipt=receipt,
        state=session.state,
        error=error,
        hint=hint,
        differing=() if undefined else tuple(name for name in wanted if after.get(name) != wanted[name]),
        moved=tuple(name for name, address in _addresses(served).items() if where.get(name) != address),
        tensors=len(wanted),
    )


def _cold(
    build: Callable[[], nn.Module], engine: Engine, manifest: Manifest, weights: Weights, device: str
) -> tuple[nn.Module, ColdLoad]:
    model = realize(build(), device)
    with engine.loading(model), torch.no_grad():
        engine.load_weights(model, weights)
    cold = ColdLoad(model)
    cold.loaded(manifest)
    cold.process()
    return model, cold


def realize(model: nn.Module, device: str = "cpu") -> nn.Module:
    """Give zeroed memory on a device to every tensor of a model that has none (it is on meta). Attributes, ties and
    views stay; loaders that have closed over a parameter object instead of taking it as an argument do not follow."""
    inventory = Inventory(model)
    storages: dict[int, torch.UntypedStorage] = {}
    made: dict[int, torch.Tensor] = {}
    for owned in list(inventory.tensors()):
        old = owned.tensor
        new = made.get(id(old))
        if new is None:
            if old.device.type == "meta":
                key = old.untyped_storage()._cdata
                if key not in storages:
                    size = old.untyped_storage().nbytes()
                    storages[key] = torch.zeros(size, dtype=torch.uint8, device=device).untyped_storage()
                data = torch.empty(0, dtype=old.dtype, device=device)
                data = data.set_(storages[key], int(old.storage_offset()), old.shape, old.stride())
            else:
                data = old.detach().to(device)
            new = data if type(old) is torch.Tensor else torch.Tensor._make_subclass(type(old), data, old.requires_grad)
            new.__dict__.update(old.__dict__)
            made[id(old)] = new
        registered = owned.module._parameters if owned.kind == "parameter" else owned.module._buffers
        registered[owned.name] = new  # type: ignore[assignment]
    return model


def read_tensor(checkpoint: Checkpoint, source: Source, device: str = "cpu") -> torch.Tensor:
    """The real tensor of a source."""
    data = bytearray(checkpoint.read(source))
    dtype = torch_dtype(source.dtype, what=f"source {source.name}")
    if not data:
        return torch.empty(source.shape, dtype=dtype, device=device)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(source.shape).to(device)


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that differs in every element but zeros and NaN: floats with their sign flipped, others in reversed
    order."""
    if not tensor.is_floating_point():
        return tensor.flip(0) if tensor.dim() else tensor
    if tensor.element_size() == 1:  # torch has no arithmetic on 8-bit floats
        flipped: torch.Tensor = (tensor.view(torch.uint8) ^ 0x80).view(tensor.dtype)
        return flipped
    return -tensor


def _stream(sources: Iterable[Source], read: Callable[[Source], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for source in sources:
        yield source.name, read(source)


def _arranged(sources: Sequence[Source], options: TrialOptions) -> list[Source]:
    names = {source.name for source in sources}
    for name in (*options.drop, *options.double):
        if name not in names:
            raise UsageError(f"{name} is no source of this checkpoint")
    kind, _, seed = options.order.partition(":")
    arranged = list(sources)
    if options.order == "reversed":
        arranged.reverse()
    elif kind == "random" and seed.isascii() and seed.isdigit():
        random.Random(int(seed)).shuffle(arranged)
    elif options.order != "file":
        raise UsageError(f"--order {options.order}: expected file, reversed or random:SEED")
    kept = [source for source in arranged if source.name not in options.drop]
    return [again for source in kept for again in [source] * (2 if source.name in options.double else 1)]


def _chunks(sources: Sequence[Source], count: int) -> list[Sequence[Source]]:
    size = max(-(-len(sources) // max(count, 1)), 1)
    return [sources[start : start + size] for start in range(0, len(sources), size)]


def _bytes_of(model: nn.Module) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for owned in Inventory(model).tensors():
        data = owned.tensor.detach().cpu().contiguous()
        found[owned.full_name] = data.reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


def _addresses(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {owned.full_name: (id(owned.tensor), owned.tensor.data_ptr()) for owned in Inventory(model).tensors()}
