"""A drafter that is given another model's layers after its load: its updates still ask for their sources, and write nothing there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from probe_cli.errors import IncompleteUpdate, ReloadError
from probe_cli.reload import ReloadSession
from probe_cli.reload.processing import DefaultProcessing
from tests.reload.models import Model, Weights, bits, cold, parameter, weights_like

SHAPES = {"embed.weight": (6, 4), "mid.weight": (4, 4), "head.norm.weight": (4,), "head.out.weight": (6, 4)}
SHARED = ("embed", "head.out")


class Layer(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = parameter(*shape)


class Drafter(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Layer(6, 4)
        self.mid = Layer(4, 4)
        self.head = nn.Module()
        self.head.norm = Layer(4)
        self.head.out = Layer(6, 4)


class Scaled(DefaultProcessing):
    """Post-processing that fails on a layer without its weight."""

    def has_hook(self, name: str, module: nn.Module) -> bool:
        return isinstance(module, Layer)

    def process(self, name: str, module: nn.Module) -> None:
        module.weight.data.mul_(2)  # type: ignore[operator, union-attr]


def weights(seed: int) -> Weights:
    return weights_like(SHAPES, seed)


def shared(cede: bool = True, **options: Any) -> tuple[Drafter, Drafter, ReloadSession]:
    """(the main model, the drafter that has its embeddings and output layer, the drafter's session)."""
    main, _, _ = cold(Drafter, weights(7))
    drafter, manifest, load = cold(Drafter, weights(1))
    session = ReloadSession(drafter, manifest, cold=load, **options)
    drafter.embed, drafter.head.out = main.embed, main.head.out
    if cede:
        session.cede(SHARED)
    return main, drafter, session


def values(model: nn.Module) -> dict[str, tuple[object, ...]]:
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


def chunks(given: Weights, size: int) -> list[list[tuple[str, torch.Tensor]]]:
    items = list(given.items())
    return [items[at : at + size] for at in range(0, len(items), size)]


@pytest.mark.parametrize("commit", ["layer", "model"])
@pytest.mark.parametrize("size", [1, 3, 10])
def test_only_its_own_layers_are_written(commit: Any, size: int) -> None:
    main, drafter, session = shared(commit=commit)
    before = values(main)
    with session.update() as update:
        for chunk in chunks(weights(2), size):
            update.load_weights(chunk)
            assert drafter.embed is main.embed and drafter.head.out is main.head.out
    assert values(main) == before
    for name in ("mid.weight", "head.norm.weight"):
        assert bits(drafter.state_dict()[name]) == bits(weights(2)[name])
    assert update.receipt is not None and update.receipt.observed == update.receipt.expected == 4
    published = {layer.name for layer in update.receipt.layers if layer.published}
    assert published == {"mid", "head.norm"}


@pytest.mark.parametrize("lacking", list(SHAPES))
def test_their_sources_are_still_asked_for(lacking: str) -> None:
    main, _, session = shared()
    before = values(main)
    with pytest.raises(IncompleteUpdate, match=lacking), session.update() as update:
        update.load_weights((name, value) for name, value in weights(2).items() if name != lacking)
    assert values(main) == before


def test_what_comes_late_is_refused_as_for_any_layer() -> None:
    main, drafter, session = shared()
    before = values(main)
    update = session.update()
    update.load_weights(weights(2).items())
    with pytest.raises(ReloadError, match="layer embed is published already"):
        update.load_weights([("embed.weight", torch.full((6, 4), 9.0))])
    assert values(main) == before and drafter.embed is main.embed


def test_a_loader_that_fails_leaves_the_shared_layers_in_place() -> None:
    main, drafter, session = shared()
    before = values(main)
    with pytest.raises(ReloadError, match=r"built for F32\[6, 4\]"), session.update() as update:
        update.load_weights([("embed.weight", torch.zeros(3, 3))])
    assert drafter.embed is main.embed and values(main) == before


def test_memory_of_the_old_modules_is_let_go() -> None:
    main, _, _ = cold(Drafter, weights(7))
    drafter, manifest, load = cold(Drafter, weights(1))
    old = [weakref.ref(drafter.embed.weight), weakref.ref(drafter.head.out.weight)]
    session = ReloadSession(drafter, manifest, cold=load)
    drafter.embed, drafter.head.out = main.embed, main.head.out
    gc.collect()
    assert all(ref() is not None for ref in old)
    session.cede(SHARED)
    gc.collect()
    assert all(ref() is None for ref in old)


def test_post_processing_does_not_run_on_them() -> None:
    main, _, _ = cold(Drafter, weights(7))
    drafter, manifest, load = cold(Drafter, weights(1))
    session = ReloadSession(drafter, manifest, cold=load, processing=Scaled())
    drafter.embed, drafter.head.out = main.embed, main.head.out
    session.cede(SHARED)
    before = values(main)
    with session.update() as update:
        update.load_weights(weights(2).items())
    assert values(main) == before
    assert bits(drafter.mid.weight) == bits(weights(2)["mid.weight"] * 2)


def test_a_replaced_module_that_nobody_accounts_for_refuses_the_update() -> None:
    main, _, session = shared(cede=False)
    before = values(main)
    with pytest.raises(ReloadError, match=r"modules were replaced since the contract was bound: embed, head\.out"):
        session.update()
    assert values(main) == before and session.state == "ready"


def test_a_module_that_no_source_is_for_may_be_replaced() -> None:
    """As vLLM does with the quantization methods of experts, which are modules too."""
    drafter, manifest, load = cold(WithScale, weights(1))
    session = ReloadSession(drafter, manifest, cold=load)
    drafter.helper = Layer(2)
    with session.update() as update:
        update.load_weights(weights(2).items())
    assert bits(drafter.mid.weight) == bits(weights(2)["mid.weight"])


class WithScale(Drafter):
    def __init__(self) -> None:
        super().__init__()
        self.helper = Layer(2)


@pytest.mark.parametrize(("name", "said"), [("mid", "still the model's"), ("nowhere", "no such layer")])
def test_only_what_was_replaced_can_be_ceded(name: str, said: str) -> None:
    _, _, session = shared(cede=False)
    with pytest.raises(ReloadError, match=said):
        session.cede([name])


def test_a_replaced_parent_takes_its_layers_with_it() -> None:
    main, _, _ = cold(Drafter, weights(7))
    drafter, manifest, load = cold(Drafter, weights(1))
    session = ReloadSession(drafter, manifest, cold=load)
    drafter.head = main.head
    session.cede(["head.norm", "head.out"])
    before = values(main)
    with session.update() as update:
        update.load_weights(weights(2).items())
    assert values(main)["head.norm.weight"] == before["head.norm.weight"]
    assert values(main) == before and drafter.head is main.head
    assert bits(drafter.embed.weight) == bits(weights(2)["embed.weight"])


def test_a_wrapper_around_a_layer_is_no_replacement() -> None:
    """As LoRA does: the layer is still there, one step further down."""
    drafter, manifest, load = cold(Drafter, weights(1))
    session = ReloadSession(drafter, manifest, cold=load, load=_through_wrappers(drafter))
    wrapper = nn.Module()
    wrapper.base_layer = drafter.mid
    drafter.mid = wrapper  # type: ignore[assignment]
    with session.update() as update:
        update.load_weights(weights(2).items())
    assert bits(wrapper.base_layer.weight) == bits(weights(2)["mid.weight"])  # type: ignore[union-attr, arg-type]


def _through_wrappers(model: Drafter) -> Callable[[Any], object]:
    def load(given: Any) -> object:
        named = {name.replace(".base_layer", ""): tensor for name, tensor in model.named_parameters()}
        for name, tensor in given:
            named[name].weight_loader(named[name], tensor)  # type: ignore[attr-defined]
        return None

    return load


class Twice(Model):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Layer(2, 2)
        self.b = self.a
        self.mid = Layer(2, 2)


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_layer_that_loses_one_of_its_names(name: str) -> None:
    """Loading code would find the other module under that name, though the layer is still the model's."""
    shapes = {"a.weight": (2, 2), "mid.weight": (2, 2)}
    model, manifest, load = cold(Twice, weights_like(shapes, 1))
    session = ReloadSession(model, manifest, cold=load)
    foreign = Layer(2, 2)
    foreign.weight.fill_(42)
    kept = model.b if name == "a" else model.a
    setattr(model, name, foreign)
    with pytest.raises(ReloadError, match="modules were replaced since the contract was bound: a;"):
        session.update()
    session.cede(["a"])
    with session.update() as update:
        update.load_weights(weights_like(shapes, 2).items())
    assert foreign.weight.eq(42).all() and getattr(model, name) is foreign
    assert bits(kept.weight) == bits(weights_like(shapes, 2)["a.weight"])


def test_a_layer_that_then_loses_its_last_name() -> None:
    shapes = {"a.weight": (2, 2), "mid.weight": (2, 2)}
    model, manifest, load = cold(Twice, weights_like(shapes, 1))
    session = ReloadSession(model, manifest, cold=load)
    model.a = Layer(2, 2)
    session.cede(["a"])
    model.b = Layer(2, 2)
    with pytest.raises(ReloadError, match="modules were replaced"):
        session.update()
    session.cede(["a"])
    with session.update() as update:
        update.load_weights(weights_like(shapes, 2).items())
    assert not any(layer.weight.any() for layer in (model.a, model.b))


class Across(Model):
    """The loader of one layer also writes to another."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Layer(2, 2)
        self.b = Layer(2, 2)

        def both(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
            param.data.copy_(loaded_weight)
            self.b.weight.data.copy_(loaded_weight * 2)

        self.a.weight.weight_loader = both  # type: ignore[attr-defined]


def test_a_layer_that_another_layers_loader_writes_to() -> None:
    model, manifest, load = cold(Across, weights_like({"a.weight": (2, 2)}, 1))
    session = ReloadSession(model, manifest, cold=load)
    model.b = Layer(2, 2)
    with pytest.raises(ReloadError, match="modules were replaced since the contract was bound: b;"):
        session.update()
    assert not model.b.weight.any()


def test_a_module_replaced_during_an_update_fails_it() -> None:
    main, drafter, session = shared(cede=False)
    drafter.embed, drafter.head.out = (place.module for place in _places(session, "embed", "out"))
    before = values(main)
    update = session.update()
    update.load_weights([("mid.weight", weights(2)["mid.weight"])])
    drafter.embed = main.embed
    with pytest.raises(ReloadError, match="cannot be ceded while an update is under way"):
        session.cede(["embed"])
    with pytest.raises(ReloadError, match="modules were replaced"):
        update.load_weights([("embed.weight", weights(2)["embed.weight"])])
    assert values(main) == before and session.state == "undefined"


def _places(session: ReloadSession, *names: str) -> list[Any]:
    return [next(place for place in session.cold.layout.places if place.name == name) for name in names]


def test_a_module_replaced_after_the_last_chunk_fails_the_update() -> None:
    main, drafter, session = shared(cede=False, commit="model")
    drafter.embed, drafter.head.out = (place.module for place in _places(session, "embed", "out"))
    update = session.update()
    update.load_weights(weights(2).items())
    drafter.embed = main.embed
    with pytest.raises(ReloadError, match="modules were replaced"):
        update.finish()
    assert session.state == "ready"


@pytest.mark.parametrize("again", [False, True], ids=["same session", "new session"])
def test_a_ceded_module_that_comes_back_has_no_tensors(again: bool) -> None:
    _main, drafter, session = shared()
    if again:
        session = ReloadSession(drafter, session.manifest, cold=session.cold)
    drafter.embed, drafter.head.out = (place.module for place in _places(session, "embed", "out"))
    with pytest.raises(ReloadError, match=r"embed, head\.out are the model's again, but let go of all tensors"):
        session.update()


def test_a_place_that_was_emptied_stays_empty() -> None:
    _, drafter, session = shared(cede=False)
    drafter.embed = None  # type: ignore[assignment]
    del drafter.head.out
    session.cede(SHARED)
    with session.update() as update:
        update.load_weights(weights(2).items())
    assert drafter.embed is None and not hasattr(drafter.head, "out")


def _parametrize(layer: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())


def _remove(layer: nn.Module) -> None:
    layer.weight = None  # type: ignore[assignment]


def _unregister(layer: nn.Module) -> None:
    del layer.weight


@pytest.mark.parametrize("options", [{}, {"in_place": True}, {"commit": "model"}])
@pytest.mark.parametrize("change", [_parametrize, _remove, _unregister])
@pytest.mark.parametrize("processing", [None, Scaled()], ids=["plain", "processed"])
def test_a_tensor_that_is_gone_refuses_the_update(
    change: Callable[[nn.Module], None], options: dict[str, Any], processing: Any
) -> None:
    drafter, manifest, load = cold(Drafter, weights(1))
    session = ReloadSession(drafter, manifest, cold=load, processing=processing, **options)
    change(drafter.mid)
    with pytest.raises(ReloadError, match=r"no longer registered since the contract was bound: mid\.weight"):
        session.update()
    assert session.state == "ready"


def test_load_code_finds_layers_that_were_wrapped_where_they_were() -> None:
    """`torch.compile` of a part of the model changes the names of its parameters."""
    drafter, manifest, load = cold(Drafter, weights(1))
    session = ReloadSession(drafter, manifest, cold=load)
    compiled = drafter.mid = torch.compile(drafter.mid, backend="eager")  # type: ignore[assignment]
    with session.update() as update:
        update.load_weights(weights(2).items())
    assert drafter.mid is compiled
    assert bits(compiled._orig_mod.weight) == bits(weights(2)["mid.weight"])  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "weight", parameter(4, 4)),
        lambda layer: layer.register_parameter("adapter", parameter(2, 2)),
        lambda layer: layer.register_buffer("steps", torch.ones(1)),
    ],
    ids=["replaced", "parameter", "buffer"],
)
@pytest.mark.parametrize("at_the_end", [False, True])
def test_tensors_registered_while_an_update_is_open_fail_it(
    change: Callable[[nn.Module], None], at_the_end: bool
) -> None:
    """They would be unregistered again when the live tensors are put back."""
    drafter, manifest, load = cold(Drafter, weights(1))
    session = ReloadSession(drafter, manifest, cold=load)
    update = session.update()
    given = list(weights(2).items())
    update.load_weights(given if at_the_end else given[:1])
    change(drafter.mid)
    go_on = update.finish if at_the_end else lambda: update.load_weights(given[1:])
    with pytest.raises(ReloadError, match="update 1: tensors were registered or replaced in mid while it was open"):
        go_on()


def test_a_model_that_contains_itself() -> None:
    class Loop(Drafter):
        def __init__(self) -> None:
            super().__init__()
            self.mid.owner = self

        def load_weights(self, given: Any) -> set[str]:  # without names of duplicates: there is no end of them
            named = dict(self.named_parameters())
            for name, tensor in given:
                named[name].weight_loader(named[name], tensor)  # type: ignore[attr-defined]
            return set(named)

    model, manifest, load = cold(Loop, weights(1))
    with ReloadSession(model, manifest, cold=load).update() as update:
        update.load_weights(weights(2).items())
    assert bits(model.mid.weight) == bits(weights(2)["mid.weight"])
