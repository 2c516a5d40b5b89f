"""Cases 20 to 29: post-processing, placement, chunks, layouts, hooks."""

from __future__ import annotations

import itertools

import pytest
import torch

from probe_cli.errors import IncompleteUpdate, ReloadError
from probe_cli.reload import ReloadSession
from tests.reload.cases import (
    DEEP,
    EXPERTS,
    JOINED,
    Deep,
    Either,
    Growing,
    Hidden,
    Joined,
    Kerneled,
    Moe,
    Scaled,
    Stale,
    Swapped,
    Valued,
    Workspace,
)
from tests.reload.models import (
    Model,
    cold,
    one_buffer,
    same,
    session_of,
    state,
    weights_like,
)


@pytest.mark.parametrize("commit", ["layer", "model"])
def test_case_20_processing_in_place_equals_a_cold_load_every_time(commit: str) -> None:
    shapes = {"linear.w": (4, 2)}
    session = session_of(Swapped, weights_like(shapes, 1), commit=commit)
    for seed in (2, 3):
        weights = weights_like(shapes, seed)
        with session.update() as update:
            update.load_weights(weights.items())
        assert same(state(session.model), state(cold(Swapped, weights)[0]))


def test_case_21_and_22_scales_are_halved_once_and_their_python_copies_follow() -> None:
    shapes = {"linear.scale": (1,), "linear.weight": (4,)}
    session = session_of(Scaled, weights_like(shapes, 1))
    for seed in (2, 3, 4):
        weights = weights_like(shapes, seed)
        with session.update() as update:
            update.load_weights(weights.items())
        assert session.model.linear.scale.item() == 0.5 * weights["linear.scale"].item()
        assert session.model.linear.scale_float == session.model.linear.scale.item()
        assert update.receipt is not None
        assert [(f.kind, f.path) for f in update.receipt.findings] == [("refreshed", "scale_float")]


def test_case_22_a_number_that_its_tensor_left_behind_is_reported() -> None:
    shapes = {"linear.scale": (1,), "linear.weight": (4,)}
    session = session_of(Stale, weights_like(shapes, 1))
    session.model.linear.scale_float = float(session.model.linear.scale)
    with session.update() as update:
        update.load_weights(weights_like(shapes, 2).items())
    assert update.receipt is not None
    (finding,) = update.receipt.findings
    assert (finding.kind, finding.layer, finding.path) == ("stale", "linear", "scale_float")
    assert "scale" in finding.message and not finding.harmless


def test_case_23_a_fresh_tensor_in_an_attribute_keeps_the_captured_address() -> None:
    shapes = {"linear.weight": (4,)}
    b = weights_like(shapes, 2)
    session = session_of(Workspace, weights_like(shapes, 1))
    captured = session.model.linear.workspace
    with session.update() as update:
        update.load_weights(b.items())
    assert session.model.linear.workspace is captured
    assert torch.equal(captured, b["linear.weight"] * 2)
    assert update.receipt is not None
    assert [(f.kind, f.layer, f.path) for f in update.receipt.findings] == [("settled", "linear", "workspace")]


def test_case_23_a_tensor_that_cannot_stay_is_named() -> None:
    shapes = {"linear.weight": (4,)}
    session = session_of(Growing, weights_like(shapes, 1))
    with session.update() as update:
        update.load_weights(weights_like(shapes, 2).items())
    assert update.receipt is not None
    (finding,) = update.receipt.findings
    assert (finding.kind, finding.layer, finding.path) == ("respecified", "linear", "workspace")


def test_case_23_a_view_that_cannot_stay_does_not_point_into_staging_memory() -> None:
    """Two layers one after the other in the same staging memory, each with a view of its weight that grows."""

    class Views(Model):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Growing().linear, Growing().linear
            self.rows = 1
            for layer in (self.one, self.two):
                layer.process_weights_after_loading = lambda layer=layer: setattr(
                    layer, "workspace", layer.weight.data[: self.rows]
                )

    shapes = {"one.weight": (4,), "two.weight": (4,)}
    session = session_of(Views, weights_like(shapes, 1), staging_bytes=512)
    for seed in (2, 3):
        b = weights_like(shapes, seed)
        session.model.rows = seed
        with session.update() as update:
            update.load_weights(b.items())
        for name in ("one", "two"):
            assert torch.equal(getattr(session.model, name).workspace, b[f"{name}.weight"][:seed])


def test_case_24_another_expert_placement_is_refused() -> None:
    b = weights_like(EXPERTS, 2)
    session = session_of(Moe, weights_like(EXPERTS, 1))
    before = state(session.model)
    session.model.moe.expert_map.copy_(torch.tensor([0, 1] + [-1] * 6))
    with pytest.raises(ReloadError, match=r"placement has changed.*moe\.expert_map"):
        session.update()
    # An engine whose placement is hidden is caught by the loader's own answer.
    blind = session_of(Moe, weights_like(EXPERTS, 1), placement_of=lambda model: {})
    blind.model.moe.expert_map.copy_(torch.tensor([0, 1] + [-1] * 6))
    with pytest.raises(ReloadError, match="placement"), blind.update() as update:
        update.load_weights(b.items())
    assert blind.state == "ready"
    assert torch.equal(blind.model.moe.w, before["moe.w"])


def test_case_25_chunks_cut_through_layers_and_fused_tensors() -> None:
    b = weights_like(DEEP, 2)
    session = session_of(Deep, weights_like(DEEP, 1))
    names = list(DEEP)
    cuts = [0, 1, 5, 44, 100, 101, 170, len(names)]
    with session.update() as update:
        for start, stop in itertools.pairwise(cuts):
            update.load_weights((name, b[name]) for name in names[start:stop])
    assert same(state(session.model), state(cold(Deep, b)[0]))


def test_case_25_sources_that_are_joined_may_come_in_different_chunks() -> None:
    b = weights_like(JOINED, 2)
    session = session_of(Joined, weights_like(JOINED, 1))
    assert ("attn.q_a", "attn.kv_a") in {key.sources for key in session.manifest.keys()}  # noqa: SIM118
    with session.update() as update:
        for name in ("attn.kv_a", "attn.norm", "attn.q_a"):
            update.load_weights(one_buffer({name: b[name]}))
    assert same(state(session.model), state(cold(Joined, b)[0]))
    with pytest.raises(IncompleteUpdate, match=r"attn\.q_a \+ attn\.kv_a"), session.update() as update:
        update.load_weights([("attn.kv_a", b["attn.kv_a"]), ("attn.norm", b["attn.norm"])])


def test_case_26_another_wire_layout_is_told_as_such() -> None:
    single = {f"mlp.experts.{i}.weight": (2,) for i in range(8)}
    joint = {"mlp.experts.weight": (8, 2)}
    session = session_of(Either, weights_like(single, 1))
    with pytest.raises(IncompleteUpdate) as failure, session.update() as update:
        update.load_weights(weights_like(joint, 2).items())
    assert "--wire" in (failure.value.hint or "") and "layout" in (failure.value.hint or "")
    assert len(str(failure.value).splitlines()) < 6
    other = session_of(Either, weights_like(joint, 1))
    with pytest.raises(IncompleteUpdate) as failure, other.update() as update:
        update.load_weights(weights_like(single, 2).items())
    assert "--wire" in (failure.value.hint or "")


def test_case_27_a_load_that_reads_values_reads_the_updates(tmp_path: object) -> None:
    from safetensors.torch import save_file

    from probe_cli.checkpoint import Checkpoint
    from probe_cli.probe import probe

    shapes = {"linear.scale": (1,), "linear.weight": (4,)}
    a, b = weights_like(shapes, 1), weights_like(shapes, 2)
    save_file(a, f"{tmp_path}/model.safetensors")
    model = Valued()
    manifest = probe(model, Checkpoint.open(f"{tmp_path}/model.safetensors"))
    model.load_weights(iter(a.items()))
    session = ReloadSession(model, manifest, poison=True)
    with session.update() as update:
        update.load_weights(b.items())
    assert torch.equal(model.linear.scale, b["linear.scale"])
    with pytest.raises(ValueError, match="zero scale"), session.update() as update:
        update.load_weights([("linear.scale", torch.zeros(1))])
    assert session.state == "ready"


@pytest.mark.parametrize("commit", ["layer", "model"])
def test_case_29_a_kernel_that_packs_only_once_packs_again(commit: str) -> None:
    shapes = {"moe.w": (4, 2)}
    a, b = weights_like(shapes, 1), weights_like(shapes, 2)
    session = session_of(Kerneled, a, commit=commit)
    before, kernel = state(session.model), session.model.moe.quant_method.kernel
    with session.update() as update:
        update.load_weights(a.items())
    assert same(state(session.model), before)
    with session.update() as update:
        update.load_weights(b.items())
    assert same(state(session.model), state(cold(Kerneled, b)[0]))
    assert session.model.moe.quant_method.kernel is kernel and kernel.packed
    assert update.receipt is not None and update.receipt.hooks_required


@pytest.mark.parametrize("commit", ["layer", "model"])
def test_case_29_a_hook_that_does_not_run_again_fails_the_update_by_name(commit: str) -> None:
    shapes = {"moe.w": (4, 2)}
    session = session_of(Hidden, weights_like(shapes, 1), commit=commit)
    before = state(session.model)
    hook = r"layer moe.*Kernel\.process_weights_after_loading"
    with pytest.raises(ReloadError, match=hook), session.update() as update:
        update.load_weights(weights_like(shapes, 2).items())
    assert same(state(session.model), before) and session.state == "ready"
