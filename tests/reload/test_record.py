"""A contract recorded around a real load is the one that the dry run predicts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from probe_cli.engines.base import EngineOptions
from probe_cli.engines.embedded import create
from probe_cli.engines.embedded.checkpoints import PRESETS, checkpoint_tensors, preset
from probe_cli.engines.embedded.model import CausalLM, default_weight_loader
from probe_cli.engines.embedded.parallel import ParallelContext
from probe_cli.errors import IncompleteUpdate, ReloadError
from probe_cli.probe import probe
from probe_cli.reload import ReloadSession, record
from probe_cli.topology import Rank, Topology
from tests.reload.cases import DEEP, EXPERTS, JOINED, Deep, Joined, Mamba, Moe, Packed, Padded, Sinks
from tests.reload.models import Model, checkpoint_of, default_loader, same, state, weights_like
from tests.reload.odd import SHAPES, Layer, copy_then_data, data, data_computed, model_with, set_

CASES = {
    Mamba: {"mixer.A": (4,), "mixer.dt_bias": (4,), "mixer.D": (4,)},
    Packed: {"shape": (2,), "weight": (4,)},
    Padded: {"linear.weight": (3, 2)},
    Sinks: {"attn.sinks": (4,), "attn.weight": (4,)},
    Moe: EXPERTS,
    Joined: JOINED,
    Deep: DEEP,
}


@pytest.mark.parametrize("make", list(CASES), ids=lambda make: make.__name__)
def test_recorded_equals_probed(make: type) -> None:
    weights = weights_like(CASES[make], 1)
    model = make()
    predicted = probe(model, checkpoint_of(weights))
    loads = model.load_weights
    with record(model) as recording:
        model.load_weights(iter(weights.items()))
    assert model.load_weights == loads
    assert recording.manifest.keys() == predicted.keys()
    assert recording.manifest.contract_digest == predicted.contract_digest
    assert recording.manifest.document.checkpoint == predicted.document.checkpoint
    for mine, theirs in zip(recording.manifest.layers, predicted.layers):
        assert mine.tensors == theirs.tensors
    assert recording.manifest.summary.declined == predicted.summary.declined


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("rank", [Rank(), Topology(tp=2).rank(1)], ids=["single", "tp2"])
def test_recorded_equals_probed_for_the_embedded_family(name: str, rank: Rank) -> None:
    config = preset(name)
    weights, b = dict(checkpoint_tensors(config, 1)), dict(checkpoint_tensors(config, 2))
    torch.manual_seed(0)
    model = CausalLM(config, ParallelContext(rank))
    predicted = probe(model, checkpoint_of(weights), rank=rank, engine=create(EngineOptions()))
    with torch.no_grad(), record(model, rank=rank, default_loaders=[default_weight_loader]) as recording:
        model.load_weights(iter(weights.items()))
    assert recording.manifest.keys() == predicted.keys()
    assert recording.manifest.contract_digest == predicted.contract_digest
    for mine, theirs in zip(recording.manifest.layers, predicted.layers):
        assert mine.tensors == theirs.tensors
    recording.cold.process()
    session = ReloadSession(
        model, recording.manifest, cold=recording.cold, default_loaders=(default_weight_loader,), poison=True
    )
    with session.update() as update:
        update.load_weights(b.items())
    other = CausalLM(config, ParallelContext(rank))
    with torch.no_grad(), record(other, rank=rank, default_loaders=[default_weight_loader]) as again:
        other.load_weights(iter(b.items()))
    again.cold.process()
    assert same(state(model), state(other))
    lost = next(iter(b))
    with pytest.raises(IncompleteUpdate, match=lost), session.update() as update:
        update.load_weights((name, tensor) for name, tensor in b.items() if name != lost)


def _data_then_copy(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data = torch.empty_like(param)
    param.data.copy_(loaded_weight)


def _transposed(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight)
    param.data = param.data.t() if param.dim() == 2 else param.data


def _assigns(self: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    params = dict(self.named_parameters())
    for name, tensor in weights:
        params[name].data = tensor


def _sets(self: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    params = dict(self.named_parameters())
    for name, tensor in weights:
        params[name].set_(tensor)  # type: ignore[call-overload]


def _registers(self: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in weights:
        layer, local = name.split(".")
        setattr(getattr(self, layer), local, nn.Parameter(tensor, requires_grad=False))


def _puts(self: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in weights:
        layer, local = name.split(".")
        getattr(self, layer)._parameters[local] = nn.Parameter(tensor, requires_grad=False)


def _grows(self: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    self.b = Layer(default_loader)
    Model.load_weights(self, weights)


@pytest.mark.parametrize("loader", [data, data_computed, set_, copy_then_data, _data_then_copy, _transposed])
def test_loaders_that_put_other_memory_under_their_parameter(loader: Callable[..., object]) -> None:
    _recorded_as_probed(model_with(loader))


@pytest.mark.parametrize("load", [_assigns, _sets, _registers, _puts, _grows])
def test_loading_code_that_puts_tensors_in_place(load: Callable[..., None]) -> None:
    _recorded_as_probed(model_with(default_loader if load is _grows else None, load))


def _recorded_as_probed(make: Callable[[], Model]) -> None:
    weights = weights_like(SHAPES, 1)
    predicted = probe(make(), checkpoint_of(weights))
    model = make()
    with record(model) as recording:
        model.load_weights(iter(weights.items()))
    keys = recording.manifest.keys()
    assert keys == predicted.keys()
    assert {key.full_tensor for key in keys} == set(SHAPES)
    assert recording.manifest.contract_digest == predicted.contract_digest
    for mine, theirs in zip(recording.manifest.layers, predicted.layers):
        assert [tensor.coverage for tensor in mine.tensors] == [tensor.coverage for tensor in theirs.tensors]
    assert recording.manifest.summary.declined == 0


def test_the_values_of_a_recorded_load_are_those_of_a_plain_one() -> None:
    for loader in (data, set_, copy_then_data, _transposed):
        plain, recorded = model_with(loader)(), model_with(loader)()
        plain.load_weights(iter(weights_like(SHAPES, 1).items()))
        with record(recorded):
            recorded.load_weights(iter(weights_like(SHAPES, 1).items()))
        assert same(state(plain), state(recorded))
        assert [p.stride() for p in plain.parameters()] == [p.stride() for p in recorded.parameters()]


def _numpy(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.numpy()[...] = loaded_weight.numpy()


def _numpy_data(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data = torch.from_numpy(loaded_weight.numpy().copy())


def _numpy_parameters(self: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in weights:
        layer, local = name.split(".")
        value = torch.from_numpy(tensor.numpy().copy())
        setattr(getattr(self, layer), local, nn.Parameter(value, requires_grad=False))


def _in_threads(self: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    params = dict(self.named_parameters())
    with ThreadPoolExecutor(2) as pool:
        for name, tensor in weights:
            pool.submit(lambda param, value: param.data.copy_(value), params[name], tensor).result()


@pytest.mark.parametrize("loader", [_numpy, _numpy_data, _numpy_parameters, _in_threads])
def test_writes_that_are_not_seen_make_no_contract(loader: Callable[..., None]) -> None:
    model = (model_with(loader) if loader in (_numpy, _numpy_data) else model_with(None, loader))()
    weights = weights_like(SHAPES, 1)
    message = r"a\.weight, a\.bias, b\.weight, b\.bias changed during the load, and no write to it was seen"
    with pytest.raises(ReloadError, match=message), record(model) as recording:
        model.load_weights(iter(weights.items()))
    assert not hasattr(recording, "manifest")
    assert same(state(model), weights)
    assert "load_weights" not in vars(model)


def test_one_tensor_among_others_that_is_written_unseen() -> None:
    model = model_with(default_loader)()
    model.b.bias.weight_loader = _numpy  # type: ignore[attr-defined]
    with pytest.raises(ReloadError, match=r"^b\.bias changed during the load"), record(model):
        model.load_weights(iter(weights_like(SHAPES, 1).items()))


def _loaders_in_threads(self: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    params = dict(self.named_parameters())
    with ThreadPoolExecutor(2) as pool:
        for name, tensor in weights:
            pool.submit(lambda param, value: param.weight_loader(param, value), params[name], tensor).result()


def _assigns_in_threads(self: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    params = dict(self.named_parameters())
    with ThreadPoolExecutor(2) as pool:
        for name, tensor in weights:
            pool.submit(lambda param, value: setattr(param, "data", value), params[name], tensor).result()


@pytest.mark.parametrize("load", [_loaders_in_threads, _assigns_in_threads])
def test_calls_in_other_threads_make_no_contract(load: Callable[..., None]) -> None:
    model = model_with(default_loader, load)()
    with pytest.raises(ReloadError, match=r"a\.weight.* in another thread"), record(model):
        model.load_weights(iter(weights_like(SHAPES, 1).items()))
    assert not hasattr(vars(torch.Tensor).get("data"), "fget")


def test_a_parameter_that_is_loaded_and_dropped() -> None:
    def load(self: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        Model.load_weights(self, weights)
        del self.b

    model = model_with(default_loader, load)()
    with (
        pytest.raises(ReloadError, match=r"^b\.weight, b\.bias was loaded and is not in the model any more"),
        record(model),
    ):
        model.load_weights(iter(weights_like(SHAPES, 1).items()))


def test_sources_that_nothing_is_written_from_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = model_with(default_loader)()
    with record(model):
        model.load_weights(iter(weights_like(SHAPES | {"rope.inv_freq": (4,)}, 1).items()))
    assert [entry.getMessage() for entry in caplog.records] == [
        "nothing was written from rope.inv_freq; an update without it counts as complete"
    ]


def test_a_recording_does_not_keep_what_arrives() -> None:
    """Neither the sources nor what loaders make of them: a checkpoint does not fit beside the model."""
    model = model_with(_data_then_copy)()
    arrived: list[weakref.ref[torch.Tensor]] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in SHAPES.items():
            tensor = torch.rand(shape)
            arrived.append(weakref.ref(tensor))
            yield name, tensor
            del tensor
            alive = [reference() for reference in arrived[:-1]]
            assert alive == [None] * len(alive)

    with record(model) as recording:
        model.load_weights(stream())
    assert len(arrived) == 4 and recording.manifest.summary.sources_used == 4
