"""The parts on their own: staging pool, host twins, arena, audit, receipts, counters, verification, scopes."""

from __future__ import annotations

import json
import logging
import sys

import pytest
import torch
from torch import nn

from probe_cli.errors import ReloadError, UsageError
from probe_cli.manifest.schema import EngineIdentity
from probe_cli.reload import Arena, ColdLoad, Receipt, ReloadSession, Scope, Spec
from probe_cli.reload.audit import TensorMap, compare
from probe_cli.reload.device import CpuDevice, Device
from probe_cli.reload.pool import StagingPool
from probe_cli.reload.state import StateSnapshot
from probe_cli.topology import Topology
from tests.reload.cases import DEEP, QKV, Deep, Fused, Pair, Scaled, Shared, Swapped
from tests.reload.models import (
    Model,
    cold,
    default_loader,
    one_buffer,
    parameter,
    same,
    session_of,
    state,
    weights_like,
)


def test_the_pool_never_hands_out_more_than_its_budget_and_merges_what_comes_back() -> None:
    pool = StagingPool(CpuDevice(), 4096)
    pieces = [pool.take(1000), pool.take(1024), pool.take(2000)]
    offsets = [piece[0] for piece in pieces if piece is not None]
    assert offsets == [0, 1024, 2048] and pool.take(1) is None and pool.peak == 4096
    pool.give_back(1024, 1024)
    pool.give_back(0, 1000)
    assert pool.take(2048) is not None and pool.used == 4096
    pool.give_back(512, 512)
    with pytest.raises(ReloadError, match="returned twice"):
        pool.give_back(512, 512)


def test_memory_that_the_system_may_take_back_is_used_again() -> None:
    """Poisoned, so that values of the update before cannot pass for new ones."""
    shapes = {"linear.weight": (3 << 20,)}

    class Large(Model):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Module()
            self.linear.weight = parameter(3 << 20)

    session = session_of(Large, weights_like(shapes, 1))
    blocks = []
    for seed in (2, 3):
        b = weights_like(shapes, seed)
        with session.update() as update:
            update.load_weights(b.items())
        assert torch.equal(session.model.linear.weight, b["linear.weight"])
        if session.pool is not None:
            taken = session.pool.take(512)
            assert taken is not None
            blocks.append(taken[1].data_ptr())
            session.pool.give_back(taken[0], 512)
    assert sys.platform != "linux" or len(set(blocks)) == 1 == len(blocks) - 1
    session.close()
    assert session.pool is None


def test_a_pool_in_use_is_not_lent() -> None:
    pool = StagingPool(CpuDevice(), 8 << 20)
    assert not pool.lend()  # no memory yet
    piece = pool.take(4 << 20)
    assert piece is not None and not pool.lend()
    piece[1].fill_(7)
    assert int(piece[1].sum(dtype=torch.int64)) == 7 * (4 << 20)


class Apart(Device):
    """A device whose spilled tensors need objects of their own, as on CUDA."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))


@pytest.mark.parametrize("commit", ["layer", "model"])
@pytest.mark.parametrize("budget", [512, 1024])
def test_host_objects_take_over_while_a_layer_is_spilled(budget: int, commit: str) -> None:
    b = weights_like(DEEP, 2)
    session = session_of(Deep, weights_like(DEEP, 1), staging_bytes=budget, device=Apart(), commit=commit)
    order = sorted(DEEP, key=lambda name: name[-1])
    with session.update() as update:
        update.load_weights(one_buffer({name: b[name] for name in order}))
    assert update.receipt is not None and update.receipt.spills > 50
    assert same(state(session.model), state(cold(Deep, b)[0]))


@pytest.mark.parametrize("commit", ["layer", "model"])
def test_processed_layers_are_spilled_and_come_back(commit: str) -> None:
    class Two(Model):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = Swapped().linear, Swapped().linear, Swapped().linear

    shapes = {f"{name}.w": (4, 2) for name in ("one", "two", "three")}
    b = weights_like(shapes, 2)
    session = session_of(Two, weights_like(shapes, 1), staging_bytes=512, device=Apart(), commit=commit)
    with session.update() as update:
        update.load_weights(b.items())
    assert same(state(session.model), state(cold(Two, b)[0]))
    with pytest.raises(UsageError, match="does not hold layer"):
        session_of(Two, weights_like(shapes, 1), staging_bytes=100)


class Bound(Model):
    """A loader that has its parameter bound."""

    def __init__(self) -> None:
        super().__init__()
        import functools

        self.linear = nn.Module()
        self.linear.weight = parameter(4)
        self.linear.weight.weight_loader = functools.partial(default_loader, self.linear.weight)

    def load_weights(self, weights: object) -> set[str]:
        for _, tensor in weights:  # type: ignore[attr-defined]
            self.linear.weight.weight_loader(loaded_weight=tensor)
        return set()


def test_a_parameter_bound_into_its_loader_is_redirected_to_staging() -> None:
    shapes = {"linear.weight": (4,)}
    b = weights_like(shapes, 2)
    session = session_of(Bound, weights_like(shapes, 1), commit="model")
    before = state(session.model)
    with session.update() as update:
        update.load_weights(b.items())
        assert same(state(session.model), before)
    assert same(state(session.model), state(cold(Bound, b)[0]))


def test_the_arena_hands_out_the_same_storage() -> None:
    arena, layer = Arena(), nn.Linear(2, 2)
    first = arena.put(layer, "packed", torch.ones(4))
    second = arena.put(layer, "packed", torch.full((4,), 2.0))
    assert first is second and first.tolist() == [2.0] * 4 and arena.nbytes == 16
    assert arena.get_or_alloc(layer, "packed", Spec.like(torch.ones(4))) is first
    with pytest.raises(ReloadError, match=r"holds float32\[4\].*asked for float32\[5\]"):
        arena.put(layer, "packed", torch.ones(5))
    arena.drop(layer, "packed")
    assert arena.put(layer, "packed", torch.ones(5)) is not first
    del layer
    assert arena.nbytes == 0


class Holder:
    pass


def test_the_audit_tells_moved_freed_respecified_and_stale() -> None:
    layer = nn.Module()
    helper = Holder()
    layer.weight = parameter(4)
    layer.helper = helper
    helper.packed = torch.ones(3)
    helper.tables = [torch.ones(2), {"deep": torch.ones(1)}]
    layer.scale = parameter(1)
    layer.scale.data.fill_(0.25)
    layer.scale_float = 0.25
    layer.gone = torch.ones(7)
    kept = helper.tables[0]
    before = TensorMap({"layer": layer})
    helper.packed = torch.ones(3)
    helper.tables[0] = torch.ones(5)
    helper.tables[1]["deep"].fill_(3.0)
    layer.scale.data.fill_(0.5)
    del layer.gone
    found = {(finding.kind, finding.path) for finding in compare(before, TensorMap({"layer": layer}))}
    assert found == {
        ("moved", "helper.packed"),
        ("respecified", "helper.tables[0]"),
        ("freed", "gone"),
        ("stale", "scale_float"),
    }
    assert kept is not None


def test_receipts_are_json_and_counters_add_up() -> None:
    b = weights_like(QKV, 2)
    events: list[str] = []
    session = session_of(Fused, weights_like(QKV, 1), on_event=lambda name, values: events.append(name))
    with session.update() as update:
        update.load_weights(b.items())
    receipt = update.receipt
    assert receipt is not None and Receipt.from_json(receipt.to_json()) == receipt
    document = json.loads(receipt.to_json())
    assert document["format"] == "probe-manifest/receipt" and document["manifest_digest"] == session.manifest.digest
    (layer,) = document["layers"]
    assert (layer["name"], layer["expected"], layer["observed"], layer["published"]) == ("attn", 3, 3, True)
    assert layer["nbytes"] == document["bytes_published"] == 6 * 3 * 4
    assert events == ["complete", "published", "finished"]
    with pytest.raises(ReloadError), session.update() as update:
        update.load_weights([])
    text = session.counters.text()
    assert 'probe_manifest_reload_updates_total{rank="0",outcome="ok"} 1' in text
    assert 'probe_manifest_reload_updates_total{rank="0",outcome="failed"} 1' in text
    assert 'probe_manifest_reload_missing_total{rank="0"} 3' in text


def test_a_callback_that_raises_does_not_end_an_update(caplog: pytest.LogCaptureFixture) -> None:
    def broken(name: str, values: object) -> None:
        raise ValueError("dashboard down")

    session = session_of(Fused, weights_like(QKV, 1), on_event=broken)
    with caplog.at_level(logging.WARNING), session.update() as update:
        update.load_weights(weights_like(QKV, 2).items())
    assert update.receipt is not None and update.receipt.ok and "dashboard down" in caplog.text


def test_a_manifest_of_another_model_rank_or_engine_is_refused_by_name() -> None:
    shapes = {"block.left": (4,), "block.right": (4,)}
    model, manifest, _ = cold(Pair, weights_like(shapes, 1))
    with pytest.raises(ReloadError, match="rank: the manifest is for rank 0, this is rank 3"):
        ReloadSession(model, manifest, rank=3)
    with pytest.raises(ReloadError, match="topology"):
        ReloadSession(model, manifest, topology=Topology(tp=2))
    with pytest.raises(ReloadError, match="engine version: the manifest was built with 1, this is 9"):
        ReloadSession(model, manifest, engine=EngineIdentity(name="live", version="9", torch="2.13.0"))
    wide = Pair()
    wide.block.left = parameter(5)
    with pytest.raises(ReloadError, match=r"tensor block\.left: the manifest says F32\[4\], the model has F32\[5\]"):
        ReloadSession(wide, manifest)
    del wide.block.left
    with pytest.raises(ReloadError, match=r"tensor block\.left: in the manifest, not in the model"):
        ReloadSession(wide, manifest)
    extra = Pair()
    extra.more = nn.Linear(2, 2)
    with pytest.raises(ReloadError, match="layer more: in the model, not in the manifest"):
        ReloadSession(extra, manifest)
    with pytest.raises(ReloadError, match="this is Fused"):
        ReloadSession(Fused(), manifest)
    with pytest.raises(UsageError, match="another model"):
        ReloadSession(model, manifest, cold=ColdLoad(Pair()))


def test_a_source_of_another_shape_is_refused_when_it_arrives() -> None:
    session = session_of(Fused, weights_like(QKV, 1))
    before = state(session.model)
    with (
        pytest.raises(ReloadError, match=r"attn\.q_proj\.weight: arrived as F32\[1, 3\].*F32\[2, 3\]") as failure,
        session.update() as update,
    ):
        update.load_weights([("attn.q_proj.weight", torch.ones(1, 3))])
    assert "--wire" in (failure.value.hint or "")
    assert same(state(session.model), before)


def test_scopes_that_say_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one"):
        Scope()
    with pytest.raises(UsageError, match="one string"):
        Scope(layers="attn")
    session = session_of(Fused, weights_like(QKV, 1))
    with pytest.raises(UsageError, match="unknown scope"):
        session.update("half")  # type: ignore[arg-type]
    with pytest.raises(ReloadError, match="none that this rank loads"):
        session.update(Scope(sources=["attn.x_proj.weight"]))


def test_scales_belong_to_their_weights() -> None:
    """A weight without its scale is half of what is processed together."""
    shapes = {"linear.scale": (1,), "linear.weight": (4,)}
    session = session_of(Scaled, weights_like(shapes, 1))
    with pytest.raises(ReloadError, match=r"lacks linear\.scale"):
        session.update(Scope(sources=["linear.weight"]))


def test_overlapping_writes_land_in_the_order_of_the_cold_load_whatever_the_order_of_arrival() -> None:
    """Two sources of one tensor: the cold load leaves B's values, so must an update that brings B first."""
    b = weights_like({"A": (4,), "B": (4,)}, 2)
    session = session_of(Shared, weights_like({"A": (4,), "B": (4,)}, 1))
    for order in (("A", "B"), ("B", "A")):
        with session.update() as update:
            update.load_weights(one_buffer({name: b[name] for name in order}))
        assert torch.equal(session.model.norm.weight, b["B"])
        assert update.receipt is not None and (update.receipt.observed, update.receipt.extras) == (2, 0)


def test_a_helper_of_many_layers_is_noted_once_and_put_back() -> None:
    """Snapshots of one update share what their layers share; nothing that only one of them reaches is lost."""
    first, second, helper = nn.Module(), nn.Module(), Holder()
    helper.count, helper.inner = 1, Holder()  # type: ignore[attr-defined]
    helper.inner.values = [1, 2]  # type: ignore[attr-defined]
    first.helper = second.helper = helper
    second.own = [3]
    shared: set[int] = set()
    snapshots = [StateSnapshot(first, shared), StateSnapshot(second, shared)]
    helper.count = 5  # type: ignore[attr-defined]
    helper.inner.values.append(6)  # type: ignore[attr-defined]
    second.own[0] = 7
    assert [len(snapshot.changes()) for snapshot in snapshots] == [2, 1]
    for snapshot in snapshots:
        snapshot.restore()
    assert (helper.count, helper.inner.values, second.own) == (1, [1, 2], [3])  # type: ignore[attr-defined]
