"""Where a value comes from: one source, several, the stream; stashed, changed in place, never asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from probe_cli.checkpoint import Checkpoint
from probe_cli.engines.base import Engine
from probe_cli.errors import ProbeError
from probe_cli.manifest import Manifest
from probe_cli.manifest.schema import Application, View
from probe_cli.probe import probe, replay
from probe_cli.probe.live import LiveEngine
from tests.oracle import LoadingModel, applications, checkpoint_of, each, tensor

SOURCES = {"a": torch.arange(4.0), "b": torch.arange(4.0) + 4, "c": torch.arange(4.0) + 8}


def _checkpoint(tmp_path: Path) -> Checkpoint:
    return checkpoint_of(tmp_path, SOURCES)


def _loader(param: torch.Tensor, value: torch.Tensor, part: str | None = None) -> None:
    param.data.copy_(value)


def _model(load: Callable[[Any, Any], object], **shapes: tuple[int, ...]) -> LoadingModel:
    model = LoadingModel(
        load, **{name: torch.zeros(shape) for name, shape in (shapes or {"p": (4,), "q": (4,)}).items()}
    )
    for parameter in model.parameters():
        parameter.weight_loader = _loader
    return model


def _keys(manifest: Manifest) -> list[tuple[tuple[str, ...], str]]:
    return [(a.sources, a.tensor) for a in applications(manifest)]


def _parts(application: Application) -> list[tuple[str | None, View | None, View | None]]:
    return [(None if w.source is None else application.sources[w.source], w.src, w.dst) for w in application.writes]


def test_two_sources_concatenated_are_both_in_the_key_in_order(tmp_path: Path) -> None:
    """DeepSeek's q_a and kv_a: stashed until both are there."""

    def load(model: Any, weights: Any) -> None:
        held: dict[str, torch.Tensor] = {}
        for name, value in weights:
            held[name] = value
            if name == "b":
                model.p.weight_loader(model.p, torch.cat([held["b"], held["a"]]), "qkv")

    (application,) = applications(probe(_model(load, p=(8,)), _checkpoint(tmp_path)))
    assert application.sources == ("b", "a")
    assert application.selectors == {"part": "qkv"}
    assert _parts(application) == [
        ("b", None, View(0, (4,), (1,))),
        ("a", None, View(4, (4,), (1,))),
    ]
    assert application.computed
    assert application.attribution == "storage"


def test_two_sources_added_are_both_in_the_key(tmp_path: Path) -> None:
    def load(model: Any, weights: Any) -> None:
        held = dict(weights)
        model.p.data.copy_(held["c"] + held["a"])

    assert _keys(probe(_model(load), _checkpoint(tmp_path))) == [(("c", "a"), "p")]


def test_dict_of_weights_first_attributes_by_storage(tmp_path: Path) -> None:
    """`dict(weights)` before any loading: what the stream is at says nothing."""

    def load(model: Any, weights: Any) -> None:
        held = dict(weights)
        model.q.weight_loader(model.q, held["b"])
        model.p.data.copy_(held["a"])

    manifest = probe(_model(load), _checkpoint(tmp_path))
    assert _keys(manifest) == [(("b",), "q"), (("a",), "p")]
    assert {a.attribution for a in applications(manifest)} == {"storage"}
    assert [s.name for s in manifest.document.sources] == ["a", "b"]


def test_a_constant_written_while_a_source_is_loaded_is_attributed_by_the_stream(tmp_path: Path) -> None:
    def constant(param: torch.Tensor, flag: int) -> None:
        param.data.fill_(float(flag))

    def step(model: Any, name: str, value: torch.Tensor) -> None:
        if name == "b":
            model.p.weight_loader = constant
            model.p.weight_loader(model.p, 3)

    (application,) = applications(probe(_model(each(step)), _checkpoint(tmp_path)))
    assert (application.sources, application.attribution) == (("b",), "stream")
    assert _parts(application) == [(None, None, None)]


def test_a_constant_after_the_stream_is_over_is_an_application_without_sources(tmp_path: Path) -> None:
    """Whisper: zero biases for keys, which no checkpoint has."""

    def load(model: Any, weights: Any) -> None:
        for name, value in weights:
            if name == "a":
                model.q.weight_loader(model.q, value)
        model.p.weight_loader(model.p, torch.zeros(4), "k")

    manifest = probe(_model(load), _checkpoint(tmp_path), verify=True)
    assert _keys(manifest) == [(("a",), "q"), ((), "p")]
    constant = next(a for a in applications(manifest) if not a.sources)
    assert (constant.attribution, constant.direct, constant.selectors) == ("storage", False, {"part": "k"})
    assert _parts(constant) == [(None, None, None)]
    assert manifest.summary.unfed == 0 and [source.name for source in manifest.sources] == ["a"]


@pytest.mark.parametrize(
    "take", [torch.Tensor.item, lambda value: value.cpu().item()], ids=["item", "through the host"]
)
def test_what_may_be_made_of_a_value_that_was_read_is_no_constant(take: Callable[..., float], tmp_path: Path) -> None:
    def load(model: Any, weights: Any) -> None:
        held = dict(weights)
        largest = take(held["b"].amax())
        model.p.weight_loader(model.p, torch.full((4,), largest))

    with pytest.raises(ProbeError, match=r"writes p with a value that comes from no source, while no source is being"):
        probe(_model(load), _checkpoint(tmp_path))


def test_a_loader_that_only_looks_at_its_tensor_s_shape_is_attributed_to_it(tmp_path: Path) -> None:
    def load(model: Any, weights: Any) -> None:
        held = dict(weights)
        model.p.weight_loader = lambda param, value: param.data[: value.shape[0]].fill_(1.0)
        model.p.weight_loader(model.p, held["b"])

    (application,) = applications(probe(_model(load), _checkpoint(tmp_path)))
    assert (application.sources, application.attribution) == (("b",), "storage")
    assert application.writes[0].source is None


def test_a_source_changed_in_place_is_still_that_source_computed(tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        if name == "a":
            value.mul_(2)
            value[:2] += 1
            model.p.weight_loader(model.p, value)

    (application,) = applications(probe(_model(each(step)), _checkpoint(tmp_path)))
    assert application.sources == ("a",)
    assert application.computed


def test_a_source_overwritten_by_another_is_the_other(tmp_path: Path) -> None:
    def load(model: Any, weights: Any) -> None:
        held = dict(weights)
        held["a"].copy_(held["b"])
        model.p.data.copy_(held["a"])

    assert _keys(probe(_model(load), _checkpoint(tmp_path))) == [(("b",), "p")]


def test_a_stashed_source_loaded_during_another(tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        if name == "a":
            model.stash = value.view(2, 2).t()
        elif name == "c":
            model.p.weight_loader(model.p, model.stash.flatten())

    model = _model(each(step))
    manifest = probe(model, _checkpoint(tmp_path))
    assert _keys(manifest) == [(("a",), "p")]
    assert not hasattr(model, "stash")


def test_reading_the_model_back_is_not_another_source(tmp_path: Path) -> None:
    """Accumulating loaders: what an earlier application left in the parameter belongs to that one, in any order."""
    model = _model(each(lambda m, n, w: m.p.weight_loader(m.p, w)))
    model.p.weight_loader = lambda param, value: param.data.add_(value)
    manifest = probe(model, _checkpoint(tmp_path), verify=True)
    assert _keys(manifest) == [(("a",), "p"), (("b",), "p"), (("c",), "p")]


def test_passing_the_parameter_s_data_adds_no_source(tmp_path: Path) -> None:
    """`loader(param.data, w)`: the alias holds what was loaded before."""

    def halves(param: torch.Tensor, value: torch.Tensor, part: int) -> None:
        param.narrow(0, part * 2, 2).copy_(value[:2])

    def step(model: Any, name: str, value: torch.Tensor) -> None:
        if name != "c":
            model.p.weight_loader = halves
            model.p.weight_loader(model.p.data, value, part="ab".index(name))

    assert _keys(probe(_model(each(step)), _checkpoint(tmp_path))) == [(("a",), "p"), (("b",), "p")]


def test_a_tensor_derived_from_a_loaded_one_is_attributed_to_its_source(tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        if name == "a":
            model.p.data.copy_(value)
            model.q.data.copy_(model.p.data.exp())

    assert _keys(probe(_model(each(step)), _checkpoint(tmp_path))) == [(("a",), "p"), (("a",), "q")]


def _unused(model: LoadingModel, checkpoint: Checkpoint) -> dict[str, str]:
    engine: Engine = LiveEngine()
    return replay(model, checkpoint, engine).unused(checkpoint)


def test_sources_that_are_not_used_say_why(tmp_path: Path) -> None:
    def load(model: Any, weights: Any) -> None:
        model.p.weight_loader = lambda param, value: False
        for name, value in weights:
            if name == "a":
                model.p.weight_loader(model.p, value)
            elif name == "b":
                return

    assert _unused(_model(load), _checkpoint(tmp_path)) == {"a": "declined", "b": "skipped", "c": "unread"}


def test_a_generator_closed_early_leaves_the_rest_unread(tmp_path: Path) -> None:
    def load(model: Any, weights: Any) -> None:
        weights = iter(weights)
        _, value = next(weights)
        model.p.data.copy_(value)
        weights.close()

    assert _unused(_model(load), _checkpoint(tmp_path)) == {"b": "unread", "c": "unread"}


def test_a_source_that_only_served_its_value_is_skipped(tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        if name == "a":
            model.rows = value.tolist()
        else:
            model.p.data.copy_(value)

    assert _unused(_model(each(step)), _checkpoint(tmp_path)) == {"a": "skipped"}


@pytest.mark.parametrize(
    ("make", "src", "dst"),
    [
        (lambda w: w, None, None),
        (lambda w: w.view(4), None, None),
        (lambda w: w[1:3], View(1, (2,), (1,)), View(0, (2,), (1,))),
        (lambda w: w[::2], View(0, (2,), (2,)), View(0, (2,), (1,))),
        (lambda w: w.view(2, 2)[1], View(2, (2,), (1,)), View(0, (2,), (1,))),
        (lambda w: w.view(2, 2).t()[0], View(0, (2,), (2,)), View(0, (2,), (1,))),
        (lambda w: w.chunk(2)[1], View(2, (2,), (1,)), View(0, (2,), (1,))),
        (lambda w: w[3].expand(2), View(3, (2,), (0,)), View(0, (2,), (1,))),
    ],
)
def test_views_of_a_source_are_exact_and_uncomputed(make: Any, src: View, dst: View, tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        if name == "a":
            taken = make(value)
            model.p.data[: taken.shape[0]].copy_(taken)

    (application,) = applications(probe(_model(each(step)), _checkpoint(tmp_path)))
    (write,) = application.writes
    assert (write.src, write.dst, write.computed, write.exact) == (src, dst, False, True)


def test_a_reinterpreted_source_says_so(tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        if name == "a":
            model.p.data.view(torch.uint8)[:8].copy_(value.view(torch.uint8)[8:])

    (application,) = applications(probe(_model(each(step)), _checkpoint(tmp_path)))
    (write,) = application.writes
    assert (write.src, write.dst, write.src_dtype, write.dst_dtype) == (
        View(8, (8,), (1,)),
        View(0, (8,), (1,)),
        "U8",
        "U8",
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w.to(torch.float16),
        lambda w: w.clone(),
        lambda w: w * 2,
        lambda w: torch.nn.functional.pad(w[:3], (0, 1)),
        lambda w: torch.stack([w, w])[1],
        lambda w: -torch.exp(w),
        lambda w: w.view(2, 2).t().contiguous().view(-1),
    ],
)
def test_computed_values_keep_their_source_exactly(make: Any, tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        if name == "b":
            model.p.data.copy_(make(value))

    (application,) = applications(probe(_model(each(step)), _checkpoint(tmp_path)))
    assert application.sources == ("b",)
    assert application.computed
    assert all(write.exact for write in application.writes)


def test_operators_that_mix_elements_are_upper_bounds(tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        if name == "b":
            model.p.data.copy_(value.view(2, 2).matmul(torch.ones(2, 2)).view(-1))

    (application,) = applications(probe(_model(each(step)), _checkpoint(tmp_path)))
    (write,) = application.writes
    assert (write.exact, write.computed, write.src, write.dst) == (False, True, View(0, (2, 2), (2, 1)), None)


def test_source_zeroed_by_the_load_still_names_the_write(tmp_path: Path) -> None:
    """vLLM's GPT-OSS on every rank but the first: the bias is zeroed in place and then copied, without a loader."""

    def step(model: LoadingModel, name: str, value: torch.Tensor) -> None:
        value.zero_()
        model.bias.copy_(value)

    checkpoint = checkpoint_of(tmp_path, {"b": torch.ones(4)})
    manifest = probe(LoadingModel(each(step), bias=torch.full((4,), 7.0)), checkpoint)
    (application,) = applications(manifest)
    assert application.sources == ("b",)
    assert application.direct
    assert [write.source for write in application.writes] == [None]
    assert tensor(manifest, "", "bias").coverage is None
