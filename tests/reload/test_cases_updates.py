"""Cases 13 to 19: experts, late calls, orders, buffers, failures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from probe_cli.errors import IncompleteUpdate, ReloadError
from probe_cli.reload import Scope
from tests.reload.cases import (
    DEEP,
    EXPERTS,
    FRAGILE,
    SHAPES_1,
    Deep,
    Fragile,
    Moe,
    Pair,
)
from tests.reload.models import (
    cold,
    one_buffer,
    same,
    session_of,
    state,
    weights_like,
)


def test_case_13_declined_experts_are_no_part_of_the_contract() -> None:
    b = weights_like(EXPERTS, 2)
    session = session_of(Moe, weights_like(EXPERTS, 1))
    assert len(session.manifest.keys()) == 4
    with session.update() as update:
        update.load_weights(b.items())
    assert update.receipt is not None and (update.receipt.observed, update.receipt.declined) == (4, 12)
    assert same(state(session.model), state(cold(Moe, b)[0]))
    with pytest.raises(IncompleteUpdate, match=r"moe\.experts\.6\.w2"), session.update() as update:
        update.load_weights((name, tensor) for name, tensor in b.items() if name != "moe.experts.6.w2")


def test_case_14_a_foreign_expert_after_publication_is_declined_without_running_the_loader() -> None:
    b = weights_like(EXPERTS, 2)
    session = session_of(Moe, weights_like(EXPERTS, 1))
    model = session.model
    with session.update() as update:
        update.load_weights((name, b[name]) for name in EXPERTS if name.split(".")[2] in "67")
        live, calls = state(model), model.moe.calls
        update.load_weights((name, b[name]) for name in EXPERTS if name.split(".")[2] in "012345")
        assert model.answers == [False] * 12
        assert model.moe.calls == calls and same(state(model), live)
    assert same(state(model), state(cold(Moe, b)[0]))


@pytest.mark.parametrize("in_place", [False, True])
def test_case_15_a_loader_that_cannot_decline_raises_after_publication(in_place: bool) -> None:
    b = weights_like(SHAPES_1, 2)
    session = session_of(Pair, weights_like(SHAPES_1, 1), in_place=in_place)
    update = session.update()
    update.load_weights(b.items())
    live = state(session.model)
    with pytest.raises(ReloadError, match="published already"):
        update.load_weights([("block.left", weights_like(SHAPES_1, 3)["block.left"])])
    assert same(state(session.model), live)
    update.abort()
    assert not update.open and session.state == "undefined"
    with session.update() as repair:
        repair.load_weights(b.items())
    assert session.state == "ready" and same(state(session.model), state(cold(Pair, b)[0]))


@pytest.mark.parametrize("budget", [512, 1024, 4096, None])
def test_case_16_the_worst_order_stays_within_the_budget(budget: int | None) -> None:
    b = weights_like(DEEP, 2)
    session = session_of(Deep, weights_like(DEEP, 1), staging_bytes=budget)
    order = [name for shard in "qkv" for name in DEEP if name.endswith(shard)]
    with session.update() as update:
        update.load_weights((name, b[name]) for name in order)
    receipt = update.receipt
    assert receipt is not None and receipt.staging_peak <= receipt.staging_budget
    assert receipt.spills >= 60 - receipt.staging_budget // 512
    assert same(state(session.model), state(cold(Deep, b)[0]))


def test_case_17_a_sender_may_reuse_one_buffer() -> None:
    b = weights_like(DEEP, 2)
    session = session_of(Deep, weights_like(DEEP, 1))
    with session.update() as update:
        update.load_weights(one_buffer({name: b[name] for name in sorted(DEEP, key=lambda n: n[-1])}))
    assert same(state(session.model), state(cold(Deep, b)[0]))


def test_case_18_a_failing_loader_before_and_after_the_first_publication() -> None:
    a, b = weights_like(FRAGILE, 1), weights_like(FRAGILE, 2)
    session = session_of(Fragile, a)
    model, x = session.model, torch.ones(4)
    old, new = cold(Fragile, a)[0](x), cold(Fragile, b)[0](x)
    model.layer[2].broken = True
    weights_first = sorted(FRAGILE, key=lambda name: name.endswith("bias"))
    with pytest.raises(ValueError, match="disk on fire") as failure, session.update() as update:
        update.load_weights((name, b[name]) for name in [*weights_first[:6], "layer.2.bias", *weights_first[6:]])
    assert "layer layer.2" in "".join(failure.value.__notes__) and "source layer.2.bias" in "".join(
        failure.value.__notes__
    )
    assert torch.equal(model(x), old) and session.state == "ready"
    with pytest.raises(ValueError), session.update() as update:
        update.load_weights((name, b[name]) for name in FRAGILE)  # layers 0 and 1 are published by then
    assert session.state == "undefined" and "disk on fire" in session.undefined_reason
    with pytest.raises(ReloadError, match=r"failed"):
        update.finish()
    with pytest.raises(ReloadError, match="undefined"):
        session.update(Scope(layers=["layer.3"]))
    with pytest.raises(IncompleteUpdate), session.update() as update:
        update.load_weights((name, b[name]) for name in list(FRAGILE)[:2])
    assert session.state == "undefined"
    model.layer[2].broken = False
    with session.update() as update:
        update.load_weights(b.items())
    assert session.state == "ready" and torch.equal(model(x), new)


def test_case_18_with_commit_model_the_old_weights_serve_until_all_is_there() -> None:
    a, b = weights_like(FRAGILE, 1), weights_like(FRAGILE, 2)
    session = session_of(Fragile, a, commit="model")
    session.model.layer[2].broken = True
    with pytest.raises(ValueError), session.update() as update:
        update.load_weights(b.items())
    assert session.state == "ready" and same(state(session.model), state(cold(Fragile, a)[0]))


def test_case_19_begin_fail_begin_again() -> None:
    b = weights_like(FRAGILE, 2)
    session = session_of(Fragile, weights_like(FRAGILE, 1))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="sender gone"), session.update() as update:
            update.load_weights(_broken_stream(b))
        assert session.state == "ready"
    with session.update() as update:
        update.load_weights(b.items())
    assert update.receipt is not None and update.receipt.ok and update.receipt.update == 3
    assert same(state(session.model), state(cold(Fragile, b)[0]))


def _broken_stream(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield "layer.0.weight", weights["layer.0.weight"]
    raise RuntimeError("sender gone")
