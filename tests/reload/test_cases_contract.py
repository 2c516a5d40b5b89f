"""Cases 1 to 12: what an update has to bring, and what it must not touch."""

from __future__ import annotations

import pytest
import torch

from probe_cli.errors import IncompleteUpdate, ReloadError
from probe_cli.reload import Scope
from tests.reload.cases import (
    DEEP,
    QKV,
    SHAPES_1,
    SHAPES_2,
    Buffered,
    Deep,
    Fused,
    LateBias,
    Mamba,
    Packed,
    Padded,
    Pair,
    Shared,
    Sinks,
    Viewed,
)
from tests.reload.models import (
    cold,
    pointers,
    same,
    session_of,
    state,
    weights_like,
)


def test_case_1_a_duplicate_does_not_stand_in_for_a_missing_tensor() -> None:
    session = session_of(Pair, weights_like(SHAPES_1, 1))
    b = weights_like(SHAPES_1, 2)
    before = state(session.model)
    with pytest.raises(IncompleteUpdate) as failure, session.update() as update:
        update.load_weights([("block.left", b["block.left"]), ("block.left", b["block.left"])])
    assert "block.right" in str(failure.value) and "block.left" not in str(failure.value).split("sources arrived")[0]
    assert same(state(session.model), before)
    assert session.state == "ready"
    assert session.receipt is not None and session.receipt.extras == 1 and not session.receipt.ok


def test_case_2_a_loader_that_writes_twice_is_one_application() -> None:
    a, b = weights_like(SHAPES_2, 1), weights_like(SHAPES_2, 2)
    session = session_of(Mamba, a)
    assert sum(session.manifest.keys().values()) == 3
    with session.update() as update:
        update.load_weights([(name, b[name]) for name in ("mixer.A", "mixer.dt_bias")])
        assert same(state(session.model), state(cold(Mamba, a)[0]))  # not published before D
        update.load_weights([("mixer.D", b["mixer.D"])])
    assert same(state(session.model), state(cold(Mamba, b)[0]))


def test_case_3_the_same_key_three_times() -> None:
    shapes = {"shape": (2,), "weight": (4,)}
    a, b = weights_like(shapes, 1), weights_like(shapes, 2)
    session = session_of(Packed, a)
    assert sorted(session.manifest.keys().values()) == [1, 3]
    with session.update() as update:
        update.load_weights(b.items())
    assert update.receipt is not None and (update.receipt.observed, update.receipt.extras) == (4, 0)
    assert same(state(session.model), state(cold(Packed, b)[0]))


@pytest.mark.parametrize("commit", ["layer", "model"])
def test_case_4_and_5_padding_and_derived_buffers_keep_their_values(commit: str) -> None:
    shapes = {"linear.weight": (3, 2)}
    a, b = weights_like(shapes, 1), weights_like(shapes, 2)
    session = session_of(Padded, a, commit=commit)
    coverage = session.manifest.layer("linear").tensors[0].coverage
    assert coverage is not None and coverage.gaps == (((3, 4), (0, 2)),)
    before = state(session.model)
    with session.update() as update:
        update.load_weights(a.items())
    assert same(state(session.model), before)
    with session.update() as update:
        update.load_weights(b.items())
    assert same(state(session.model), state(cold(Padded, b)[0]))
    assert session.model.get_parameter("linear.weight")[3].tolist() == [7.0, 7.0]


@pytest.mark.parametrize("in_place", [False, True])
def test_case_6_buffers_that_are_never_loaded_survive(in_place: bool, caplog: pytest.LogCaptureFixture) -> None:
    shapes = {"linear.weight": (4,)}
    session = session_of(Buffered, weights_like(shapes, 1), in_place=in_place)
    where = pointers(session.model)
    with session.update() as update:
        update.load_weights(weights_like(shapes, 2).items())
    model = session.model
    assert model.get_buffer("rotary.inv_freq").tolist() == [0.0, 1.0, 2.0, 3.0]
    assert model.get_buffer("linear.mask").tolist() == [1.0, 1.0, 1.0]
    assert pointers(model) == where
    assert "linear.mask" not in model.state_dict() and "rotary.inv_freq" not in model.state_dict()
    assert not caplog.records  # layers without a contract make no noise


@pytest.mark.parametrize("in_place", [False, True])
def test_case_7_a_buffer_that_is_a_view_of_a_childs_parameter(in_place: bool) -> None:
    shapes = {"conv.child.weight": (4, 2)}
    b = weights_like(shapes, 2)
    session = session_of(Viewed, weights_like(shapes, 1), in_place=in_place)
    conv = session.model.conv
    where = pointers(session.model)
    with session.update() as update:
        update.load_weights(b.items())
    assert pointers(session.model) == where
    assert conv.flat.untyped_storage().data_ptr() == conv.child.weight.untyped_storage().data_ptr()
    assert torch.equal(conv.flat, b["conv.child.weight"].view(-1))


def test_case_8_a_parameter_registered_late_is_counted_like_any_other() -> None:
    shapes = {"linear.weight": (4,), "linear.bias": (4,)}
    b = weights_like(shapes, 2)
    session = session_of(lambda: LateBias().add_bias(), weights_like(shapes, 1))
    with pytest.raises(IncompleteUpdate, match=r"linear\.bias"), session.update() as update:
        update.load_weights([("linear.weight", b["linear.weight"])])
    with session.update() as update:
        update.load_weights(b.items())
    assert torch.equal(session.model.linear.bias, b["linear.bias"])


def test_case_9_two_sources_of_one_tensor_are_two_keys() -> None:
    shapes = {"A": (4,), "B": (4,)}
    b = weights_like(shapes, 2)
    session = session_of(Shared, weights_like(shapes, 1))
    assert {key.sources for key in session.manifest.keys()}  # noqa: SIM118 == {("A",), ("B",)}
    with pytest.raises(IncompleteUpdate) as failure, session.update() as update:
        update.load_weights([("B", b["B"]), ("B", b["B"])])
    assert "A -> norm.weight" in str(failure.value) and "B ->" not in str(failure.value)


def test_case_10_missing_shards_of_a_fused_tensor_are_named() -> None:
    session = session_of(Fused, weights_like(QKV, 1))
    before, b = state(session.model), weights_like(QKV, 2)
    with pytest.raises(IncompleteUpdate) as failure, session.update() as update:
        update.load_weights([("attn.q_proj.weight", b["attn.q_proj.weight"])])
    text = str(failure.value)
    assert "attn.k_proj.weight" in text and "attn.v_proj.weight" in text and "attn.q_proj.weight ->" not in text
    assert "loaded_shard_id=k" in text
    assert same(state(session.model), before)


def test_case_11_a_declared_scope_makes_no_noise_about_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    session = session_of(Deep, weights_like(DEEP, 1))
    before, b = state(session.model), weights_like(DEEP, 2)
    part = {name: tensor for name, tensor in b.items() if name.startswith("layer.7.")}
    with session.update(Scope(layers=["layer.7"])) as update:
        update.load_weights(part.items())
    after = state(session.model)
    assert [name for name in after if not torch.equal(after[name], before[name])] == ["layer.7.qkv"]
    assert update.receipt is not None and [layer.name for layer in update.receipt.layers] == ["layer.7"]
    assert not caplog.records
    with pytest.raises(IncompleteUpdate, match="177 applications missing in 59 layers"), session.update() as update:
        update.load_weights(part.items())


def test_case_11_a_scope_that_cuts_a_fused_tensor_is_refused_before_anything_is_touched() -> None:
    session = session_of(Deep, weights_like(DEEP, 1))
    with pytest.raises(ReloadError, match=r"lacks layer\.7\.k.*layer\.7\.v"):
        session.update(Scope(sources=["layer.7.q"]))
    with pytest.raises(ReloadError, match="no layer of the manifest"):
        session.update(Scope(layers=["layer.99"]))
    assert session.state == "ready"
    with session.update(Scope(sources=["layer.7.*"])) as update:
        update.load_weights((name, tensor) for name, tensor in weights_like(DEEP, 2).items())
    assert update.receipt is not None and update.receipt.out_of_scope == 177


@pytest.mark.parametrize("options", [{}, {"in_place": True}, {"commit": "model"}, {"staging_bytes": 0}])
def test_case_12_direct_writes_count(options: dict[str, object]) -> None:
    shapes = {"attn.sinks": (4,), "attn.weight": (4,)}
    b = weights_like(shapes, 2)
    session = session_of(Sinks, weights_like(shapes, 1), **options)
    assert any(application.direct for application in session.manifest.layer("attn").applications)
    with pytest.raises(IncompleteUpdate, match=r"attn\.sinks"), session.update() as update:
        update.load_weights([("attn.weight", b["attn.weight"])])
    with session.update() as update:
        update.load_weights(b.items())
    assert same(state(session.model), state(cold(Sinks, b)[0]))
