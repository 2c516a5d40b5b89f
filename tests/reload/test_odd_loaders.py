"""Loaders and loading code that do not simply copy: whatever they do, an update ends with a cold load's values where they were
before, or it says what it cannot follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from probe_cli.errors import IncompleteUpdate, ReloadError
from probe_cli.reload import ReloadSession, record
from tests.reload.models import Model, cold, default_loader, one_buffer, pointers, same, state, weights_like
from tests.reload.odd import SHAPES, Layer, Load, copy_then_data, data, data_computed, model_with, set_

OPTIONS = [{}, {"commit": "model"}, {"in_place": True}, {"verify_writes": True}, {"staging_bytes": 0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loader", [data, data_computed, set_, copy_then_data])
def test_a_loader_that_puts_other_memory_under_its_parameter(
    loader: Callable[..., object], options: dict[str, Any]
) -> None:
    """The memory may be the sender's, who uses it again for the next tensor."""
    make = model_with(loader)
    model, manifest, load = cold(make, weights_like(SHAPES, 1))
    session = ReloadSession(model, manifest, cold=load, poison=True, **options)
    for seed in (2, 3):
        expected, _, _ = cold(make, weights_like(SHAPES, seed))
        before = pointers(model)
        with session.update() as update:
            update.load_weights(one_buffer(weights_like(SHAPES, seed)))
        assert same(state(model), state(expected))
        assert pointers(model) == before
        assert update.receipt is not None and update.receipt.observed == 4 and not update.receipt.declined


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_a_loader_that_puts_other_memory_under_another_parameter(options: dict[str, Any]) -> None:
    class Both(Model):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Layer(default_loader), Layer(default_loader)

            def both(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
                param.data.copy_(loaded_weight)
                self.a.bias.data = loaded_weight[0]

            self.a.weight.weight_loader = both  # type: ignore[attr-defined]

    shapes = {name: shape for name, shape in SHAPES.items() if name != "a.bias"}
    model, manifest, load = cold(Both, weights_like(shapes, 1))
    session = ReloadSession(model, manifest, cold=load, **options)
    before = pointers(model)
    with pytest.raises(ReloadError, match=r"put other memory under a\.bias"), session.update() as update:
        update.load_weights(weights_like(shapes, 2).items())
    assert pointers(model) == before


def _as_dict(self: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    Model.load_weights(self, dict(weights).items())


def _sorted(self: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    Model.load_weights(self, sorted(weights, key=lambda pair: pair[0], reverse=True))


def _state_dict(self: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    self.load_state_dict(dict(weights))


def _by_parameter(self: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    given = dict(weights)
    for name, param in self.named_parameters():
        param.data.copy_(given[name])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("load_weights", [_as_dict, _sorted, _state_dict, _by_parameter])
def test_loading_code_that_collects_all_sources_first(load_weights: Load, options: dict[str, Any]) -> None:
    make = model_with(default_loader if load_weights in (_as_dict, _sorted) else None, load_weights)
    model, manifest, load = cold(make, weights_like(SHAPES, 1))
    session = ReloadSession(model, manifest, cold=load, poison=True, **options)
    expected, _, _ = cold(make, weights_like(SHAPES, 2))
    with session.update() as update:
        update.load_weights(weights_like(SHAPES, 2).items())
    assert same(state(model), state(expected))


def test_what_loading_code_collected_is_not_known_in_the_next_chunk() -> None:
    """Storage tells a source only while it is loaded: memory is used again."""
    kept: list[tuple[str, torch.Tensor]] = []

    def hoard(self: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        kept.extend(weights)
        if len(kept) == len(SHAPES):
            Model.load_weights(self, kept)
            kept.clear()

    model, manifest, load = cold(model_with(default_loader, hoard), weights_like(SHAPES, 1))
    session = ReloadSession(model, manifest, cold=load)
    update = session.update()
    for item in weights_like(SHAPES, 2).items():
        update.load_weights([item])
    with pytest.raises(IncompleteUpdate):
        update.finish()


def _in_a_pool(self: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    params = dict(self.named_parameters())
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(params[name].weight_loader, params[name], tensor) for name, tensor in weights]  # type: ignore[attr-defined]
        for job in jobs:
            job.result()


def _loaders_read_in_a_pool(self: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    params = dict(self.named_parameters())
    with ThreadPoolExecutor(2) as pool:
        for name, tensor in weights:
            pool.submit(lambda param, value: param.weight_loader(param, value), params[name], tensor).result()


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
@pytest.mark.parametrize("load_weights", [_in_a_pool, _loaders_read_in_a_pool])
def test_a_loader_called_in_another_thread(load_weights: Load, options: dict[str, Any]) -> None:
    model, manifest, load = cold(model_with(default_loader, load_weights), weights_like(SHAPES, 1))
    session = ReloadSession(model, manifest, cold=load, **options)
    before = state(model)
    with pytest.raises(ReloadError, match=r"was called for a\.\w+ in another thread"), session.update() as update:
        update.load_weights(weights_like(SHAPES, 2).items())
    assert same(state(model), before) and session.state == "ready"


def test_writes_of_another_thread_in_place_leave_the_model_undefined() -> None:
    """They are not seen; but the sources were there, and what became of them is not known."""

    def load_weights(self: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        params = dict(self.named_parameters())
        with ThreadPoolExecutor(2) as pool:
            for name, tensor in weights:
                pool.submit(lambda param, value: param.data.copy_(value), params[name], tensor).result()

    model, manifest, load = cold(model_with(None, load_weights), weights_like(SHAPES, 1))
    session = ReloadSession(model, manifest, cold=load, in_place=True)
    with pytest.raises(IncompleteUpdate), session.update() as update:
        update.load_weights(weights_like(SHAPES, 2).items())
    assert session.state == "undefined"
    with pytest.raises(IncompleteUpdate), session.update() as update:
        pass
    assert "undefined" in session.state


def _add(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.add_(loaded_weight)


def _zero_and_add(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.zero_()
    param.data.add_(loaded_weight)


@pytest.mark.parametrize("how", ["probed", "recorded"])
def test_values_from_before_the_first_load_cannot_be_brought_back(how: str) -> None:
    model, manifest, load = _bound(model_with(_add), how)
    with pytest.raises(ReloadError, match=r"adds to what a\.weight, a\.bias, b\.weight, b\.bias held before"):
        ReloadSession(model, manifest, cold=load)


@pytest.mark.parametrize("how", ["probed", "recorded"])
def test_adding_to_what_the_load_itself_wrote(how: str) -> None:
    model, manifest, load = _bound(model_with(_zero_and_add), how)
    with ReloadSession(model, manifest, cold=load, poison=True).update() as update:
        update.load_weights(weights_like(SHAPES, 2).items())
    assert same(state(model), weights_like(SHAPES, 2))


def _bound(make: Callable[[], Model], how: str) -> tuple[Model, Any, Any]:
    if how == "probed":
        return cold(make, weights_like(SHAPES, 1))
    model = make()
    with record(model) as recording:
        model.load_weights(iter(weights_like(SHAPES, 1).items()))
    recording.cold.process()
    return model, recording.manifest, recording.cold


class Growing(Model):
    """Its loading code makes a module when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Layer(default_loader)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        if not hasattr(self, "b"):
            self.b = Layer(default_loader)
        return super().load_weights(weights)


def test_a_module_that_the_first_load_makes_is_in_the_contract() -> None:
    model, manifest, load = cold(Growing, weights_like(SHAPES, 1))
    assert {key.full_tensor for key in [*manifest.keys()]} == set(SHAPES)
    with ReloadSession(model, manifest, cold=load).update() as update:
        update.load_weights(weights_like(SHAPES, 2).items())
    assert same(state(model), weights_like(SHAPES, 2))


class Cached(Model):
    """Keeps its parameters from before the first load."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(default_loader), Layer(default_loader)
        self.kept = dict(self.named_parameters())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:  # type: ignore[override]
        for name, tensor in weights:
            self.kept[name].weight_loader(self.kept[name], tensor)  # type: ignore[attr-defined]


class HandsOutData(Cached):
    """Gives loaders `param.data`, not the parameter."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:  # type: ignore[override]
        params = dict(self.named_parameters())
        for name, tensor in weights:
            params[name].weight_loader(params[name].data, tensor)  # type: ignore[attr-defined]


class HandsOutRows(Cached):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:  # type: ignore[override]
        params = dict(self.named_parameters())
        for name, tensor in weights:
            for row, values in zip(params[name], tensor):
                params[name].weight_loader(row, values)  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("how", ["probed", "recorded"])
@pytest.mark.parametrize("make", [Cached, HandsOutData])
def test_parameters_that_loading_code_has_kept(make: Callable[[], Model], how: str, options: dict[str, Any]) -> None:
    model, manifest, load = _bound(make, how)
    session = ReloadSession(model, manifest, cold=load, poison=True, **options)
    before = pointers(model)
    for seed in (2, 3):
        with session.update() as update:
            update.load_weights(one_buffer(weights_like(SHAPES, seed)))
        assert same(state(model), weights_like(SHAPES, seed)) and pointers(model) == before


def test_parts_of_a_tensor_that_were_taken_before_it_had_memory() -> None:
    model, manifest, load = cold(HandsOutRows, weights_like(SHAPES, 1))
    session = ReloadSession(model, manifest, cold=load)
    with pytest.raises(ReloadError, match=r"loader of a\.weight was given a part of it"), session.update() as update:
        update.load_weights(weights_like(SHAPES, 2).items())
    assert same(state(model), weights_like(SHAPES, 1)) and session.state == "ready"
    session.close()
    with ReloadSession(model, manifest, cold=load, in_place=True).update() as update:
        update.load_weights(weights_like(SHAPES, 2).items())
    assert same(state(model), weights_like(SHAPES, 2))


class Registering(Model):
    """Its loaders register new tensors, as the `how` of the class says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(self.load), Layer(self.load)
        self.a.register_buffer("scale", torch.zeros(1))

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight)
        if param is self.a.weight:
            self.register(param, loaded_weight)

    def register(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        self.a.scale = loaded_weight.abs().max().reshape(1)


class Replacing(Registering):
    def register(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        made = torch.nn.Parameter(loaded_weight.clone(), requires_grad=False)
        made.weight_loader = self.load  # type: ignore[attr-defined]
        self.a.weight = made


class Assigning(Registering):
    """Nothing in its loader: the loading code replaces the parameters."""

    def register(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None: ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:  # type: ignore[override]
        self.load_state_dict({**dict(weights), "a.scale": torch.zeros(1)}, assign=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("how", ["probed", "recorded"])
@pytest.mark.parametrize("make", [Registering, Replacing, Assigning])
def test_loading_code_that_registers_tensors(make: Callable[[], Model], how: str, options: dict[str, Any]) -> None:
    model, manifest, load = _bound(make, how)
    session = ReloadSession(model, manifest, cold=load, **options)
    before, places = state(model), pointers(model)
    with pytest.raises(ReloadError, match=r"registered or replaced in a |declined"), session.update() as update:
        update.load_weights(weights_like(SHAPES, 2).items())
    assert pointers(model) == places
    assert same(state(model), before) if session.state == "ready" else options.get("in_place")


def test_loading_code_that_makes_a_module_anew() -> None:
    class Anew(Model):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Layer(default_loader), Layer(default_loader)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            self.a = Layer(default_loader)
            return super().load_weights(weights)

    model, manifest, load = cold(Anew, weights_like(SHAPES, 1))
    session = ReloadSession(model, manifest, cold=load)
    with (
        pytest.raises(ReloadError, match="modules were replaced since the contract was bound: a"),
        session.update() as u,
    ):
        u.load_weights(weights_like(SHAPES, 2).items())
    assert "undefined" in session.state


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_other_memory_under_tensors_after_they_were_loaded(options: dict[str, Any]) -> None:
    class Late(Model):
        tidy = False

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Layer(default_loader), Layer(default_loader)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            loaded = super().load_weights(weights)
            if self.tidy:
                self.a.weight.data = self.a.weight.data.clone()
            return loaded

    model, manifest, load = cold(Late, weights_like(SHAPES, 1))
    session = ReloadSession(model, manifest, cold=load, **options)
    model.tidy = True
    places, before = pointers(model), state(model)
    values = weights_like(SHAPES, 2)
    failure = None
    try:
        with session.update() as update:
            update.load_weights(values.items())
    except ReloadError as error:
        failure = str(error)
    if failure is None:
        assert same(state(model), values)
    else:
        assert "put other memory under a.weight" in failure
        assert "undefined" in session.state or same(state(model), before)
    assert pointers(model) == places
    model.tidy = False
    with session.update() as update:
        update.load_weights(weights_like(SHAPES, 3).items())
    assert same(state(model), weights_like(SHAPES, 3)) and pointers(model) == places and session.state == "ready"
