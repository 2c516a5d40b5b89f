"""Faults from the field, as small models with real loaders: what the manifest must say about each.

The number is the vLLM issue or pull request unless another project is named.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from probe_cli.checkpoint import Checkpoint
from probe_cli.engines.base import Engine
from probe_cli.errors import ProbeError
from probe_cli.manifest import Manifest
from probe_cli.probe import probe, replay
from probe_cli.probe.live import LiveEngine
from probe_cli.reload import record
from tests.oracle import LoadingModel, applications, checkpoint_of, each, state_of, tensor


def _keys(manifest: Manifest) -> list[tuple[tuple[str, ...], str, dict[str, Any], int]]:
    return [(a.sources, a.tensor, a.selectors, a.count) for a in applications(manifest)]


def _copy(param: torch.Tensor, value: torch.Tensor) -> None:
    param.data.copy_(value)


def test_case_2_a_second_copy_inside_the_loader_belongs_to_the_same_application(tmp_path: Path) -> None:
    """44814: `A`'s loader copies, then stores -exp of itself: counted twice, the layer closed before `D` came."""

    def composed(param: torch.Tensor, value: torch.Tensor) -> None:
        _copy(param, value)
        param.data.copy_(-torch.exp(param.data.float()))

    model = LoadingModel(
        each(lambda m, n, w: getattr(m, n).weight_loader(getattr(m, n), w)),
        A=torch.zeros(4),
        dt_bias=torch.zeros(4),
        D=torch.zeros(4),
    )
    model.A.weight_loader = composed
    model.dt_bias.weight_loader = model.D.weight_loader = _copy
    before = state_of(model)
    manifest = probe(model, checkpoint_of(tmp_path, {name: torch.rand(4) for name in ("A", "dt_bias", "D")}))
    assert _keys(manifest) == [(("A",), "A", {}, 1), (("dt_bias",), "dt_bias", {}, 1), (("D",), "D", {}, 1)]
    first, second = applications(manifest)[0].writes
    assert (first.computed, second.computed) == (False, True)
    assert (second.source, second.src, second.exact) == (0, None, True)
    assert [t.coverage for t in manifest.layers[0].tensors] == [None, None, None], "one application: no overlap"
    assert all(torch.equal(before[name], value) for name, value in state_of(model).items())


def test_case_3_the_same_key_is_required_three_times(tmp_path: Path) -> None:
    """compressed-tensors: `weight_shape` is loaded once for each of q, k and v, with nothing to tell them apart."""
    model = LoadingModel(
        each(lambda m, n, w: [m.weight_shape.weight_loader(m.weight_shape, w) for _ in range(3)]),
        weight_shape=torch.zeros(2, dtype=torch.int64),
    )
    model.weight_shape.weight_loader = _copy
    manifest = probe(model, checkpoint_of(tmp_path, {"weight_shape": torch.tensor([4, 2])}))
    assert _keys(manifest) == [(("weight_shape",), "weight_shape", {}, 3)]
    assert manifest.document.summary.applications == 3


def test_one_key_that_writes_now_here_now_there_overlaps_nothing(tmp_path: Path) -> None:
    """A loader that keeps its own place: the same call twice, each half once."""
    model: Any = LoadingModel(
        each(lambda m, n, w: [m.w.weight_loader(m.w, part) for part in w.chunk(2)]), w=torch.zeros(4, 2)
    )

    def next_rows(param: Any, value: torch.Tensor) -> None:
        at = param.filled = getattr(param, "filled", -2) + 2
        param.data[at : at + 2].copy_(value)

    model.w.weight_loader = next_rows
    source = torch.rand(4, 2)
    manifest = probe(model, checkpoint_of(tmp_path, {"w": source}))
    assert _keys(manifest) == [(("w",), "w", {}, 2)]
    assert tensor(manifest, "", "w").coverage is None
    with record(model) as recording:
        model.load_weights([("w", source)])
    assert tensor(recording.manifest, "", "w").coverage is None
    assert torch.equal(model.w, source)


def test_case_3_three_sources_without_a_selector_are_three_keys(tmp_path: Path) -> None:
    model = LoadingModel(
        each(lambda m, n, w: m.weight_shape.weight_loader(m.weight_shape, w)),
        weight_shape=torch.zeros(2, dtype=torch.int64),
    )
    model.weight_shape.weight_loader = _copy
    names = [f"{x}_proj.weight_shape" for x in "qkv"]
    manifest = probe(model, checkpoint_of(tmp_path, {name: torch.tensor([4, 2]) for name in names}))
    assert _keys(manifest) == [((name,), "weight_shape", {}, 1) for name in names]
    covered = tensor(manifest, "", "weight_shape").coverage
    assert covered is not None
    assert covered.overlap_elements == 2


def test_cases_4_and_5_padding_rows_and_derived_buffers_are_gaps(tmp_path: Path) -> None:
    """50075, 50523: rows 0-2 are loaded, row 3 and the buffer never: counting waits for them for ever."""

    def rows(param: torch.Tensor, value: torch.Tensor) -> None:
        param.data[: value.shape[0]].copy_(value)
        param.owner.total = value.sum(0)

    model: Any = LoadingModel(each(lambda m, n, w: m.weight.weight_loader(m.weight, w)), weight=torch.zeros(4, 2))
    model.register_buffer("derived", torch.zeros(2))
    model.weight.weight_loader = rows
    model.weight.owner = nn.Identity()
    manifest = probe(model, checkpoint_of(tmp_path, {"weight": torch.rand(3, 2)}))
    covered = tensor(manifest, "", "weight").coverage
    assert covered is not None
    assert (covered.gaps, covered.gap_elements, covered.overlaps) == ((((3, 4), (0, 2)),), 2, ())
    derived = tensor(manifest, "", "derived").coverage
    assert derived is not None
    assert derived.gap_elements == 2
    assert (manifest.document.summary.gaps, manifest.document.summary.unfed) == (1, 1)
    assert not hasattr(model.weight.owner, "total")


def test_case_9_two_sources_that_write_the_same_tensor_are_two_keys(tmp_path: Path) -> None:
    """50075: twice B and never A must not pass for both."""
    model = LoadingModel(each(lambda m, n, w: m.w.weight_loader(m.w, w)), w=torch.zeros(4))
    model.w.weight_loader = _copy
    manifest = probe(model, checkpoint_of(tmp_path, {"A": torch.rand(4), "B": torch.rand(4)}))
    assert _keys(manifest) == [(("A",), "w", {}, 1), (("B",), "w", {}, 1)]
    covered = tensor(manifest, "", "w").coverage
    assert covered is not None
    assert covered.overlaps == (((0, 4),),)


def test_case_12_a_direct_copy_is_an_application_of_its_source(tmp_path: Path) -> None:
    """50418: attention sinks, written by `load_weights` itself."""

    def load(model: Any, weights: Any) -> None:
        for name, value in weights:
            if name == "sinks":
                model.sinks.data.copy_(value.narrow(0, 2, 2))
            else:
                model.w.weight_loader(model.w, value)

    model = LoadingModel(load, w=torch.zeros(4), sinks=torch.zeros(2))
    model.w.weight_loader = _copy
    manifest = probe(model, checkpoint_of(tmp_path, {"sinks": torch.rand(8), "w": torch.rand(4)}))
    assert [(a.sources, a.tensor, a.direct) for a in applications(manifest)] == [
        (("sinks",), "sinks", True),
        (("w",), "w", False),
    ]
    assert manifest.document.summary.direct_writes == 1
    assert manifest.document.summary.bytes_read == 8 + 16


class Experts(nn.Module):
    """Experts of one rank of four: the map says which ones are here."""

    def __init__(self, rank: int, ranks: int = 4, experts: int = 8) -> None:
        super().__init__()
        here = experts // ranks
        self.register_buffer("expert_map", torch.full((experts,), -1), persistent=False)
        self.expert_map[rank * here : (rank + 1) * here] = torch.arange(here)
        self.w13 = nn.Parameter(torch.zeros(here, 4, 2), requires_grad=False)
        self.w2 = nn.Parameter(torch.zeros(here, 2, 2), requires_grad=False)
        self.w13.weight_loader = self.w2.weight_loader = self.load

    def load(
        self,
        param: Any,
        value: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        local = int(self.expert_map[expert_id])
        if local < 0:
            return False if return_success else None
        data = param.data[local]
        if shard_id != "w2":
            data = data.narrow(0, 0 if shard_id == "w1" else 2, 2)
        data.copy_(value)
        return True if return_success else None


class Moe(nn.Module):
    def __init__(self, rank: int, declines: bool) -> None:
        super().__init__()
        self.experts = Experts(rank)
        self.declines = declines

    def load_weights(self, weights: Any) -> None:
        for name, value in weights:
            _, expert, shard = name.split(".")
            param = self.experts.w2 if shard == "w2" else self.experts.w13
            extra = {"return_success": True} if self.declines else {}
            param.weight_loader(param, value, name, shard_id=shard, expert_id=int(expert), **extra)


EXPERTS = {f"experts.{e}.{s}": torch.rand(2, 2) for e in range(8) for s in ("w1", "w3", "w2")}


@pytest.mark.parametrize("declines", [True, False])
def test_case_13_what_an_expert_rank_declines_is_not_in_its_contract(declines: bool, tmp_path: Path) -> None:
    """50418, and SGLang, whose loader returns without a word."""
    checkpoint = checkpoint_of(tmp_path, EXPERTS)
    manifest = probe(Moe(3, declines), checkpoint)
    own = [f"experts.{e}.{s}" for e in (6, 7) for s in ("w1", "w3", "w2")]
    assert sorted(a.sources[0] for a in applications(manifest)) == sorted(own)
    assert all(a.selectors["expert_id"] in (6, 7) for a in applications(manifest))
    assert all("return_success" not in a.selectors for a in applications(manifest))
    assert manifest.document.summary.declined == 18
    assert [t.coverage for t in manifest.layers[0].tensors if t.kind == "parameter"] == [None, None]
    engine: Engine = LiveEngine()
    reasons = replay(Moe(3, declines), checkpoint, engine).unused(checkpoint)
    assert reasons == {name: "declined" for name in EXPERTS if name not in own}


def test_case_13_all_ranks_together_use_every_source(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, EXPERTS)
    used = [{a.sources[0] for a in applications(probe(Moe(rank, True), checkpoint))} for rank in range(4)]
    assert set().union(*used) == set(EXPERTS)
    assert sum(map(len, used)) == len(EXPERTS)


def test_case_26_a_contract_belongs_to_the_layout_that_was_sent(tmp_path: Path) -> None:
    """transformers: fused 3-D experts on the wire, per-expert tensors in the files: two contracts, two digests."""

    def load(model: Any, weights: Any) -> None:
        for name, value in weights:
            if name == "experts.gate_up_proj":
                for expert, part in enumerate(value):
                    model.w13.weight_loader(model.w13, part.t(), expert_id=expert)
            else:
                model.w13.weight_loader(model.w13, value, expert_id=int(name.split(".")[1]))

    def loader(param: torch.Tensor, value: torch.Tensor, expert_id: int) -> None:
        param.data[expert_id].copy_(value)

    def build() -> LoadingModel:
        model = LoadingModel(load, w13=torch.zeros(2, 4, 3))
        model.w13.weight_loader = loader
        return model

    wire = tmp_path / "wire.json"
    wire.write_text(json.dumps([{"name": "experts.gate_up_proj", "dtype": "F32", "shape": [2, 3, 4]}]))
    fused = probe(build(), Checkpoint.from_wire(wire))
    split = probe(build(), checkpoint_of(tmp_path / "files", {f"experts.{e}.up": torch.rand(4, 3) for e in range(2)}))
    assert [(a.sources, a.selectors) for a in applications(fused)] == [
        (("experts.gate_up_proj",), {"expert_id": 0}),
        (("experts.gate_up_proj",), {"expert_id": 1}),
    ]
    assert [a.sources for a in applications(split)] == [("experts.0.up",), ("experts.1.up",)]
    assert tensor(fused, "", "w13").coverage is None
    assert tensor(split, "", "w13").coverage is None
    assert fused.contract_digest != split.contract_digest
    assert fused.document.checkpoint.kind == "wire"
    assert not any(write.computed for a in applications(fused) for write in a.writes), "a transposed view is exact"


def test_case_27_equal_on_a_loaded_tensor_without_its_data(tmp_path: Path) -> None:
    """8969: values are read for real or the build says which and where; `test_values.py` has all of them."""
    wire = tmp_path / "wire.json"
    wire.write_text(json.dumps([{"name": "scale", "dtype": "F32", "shape": [1]}]))

    def step(model: Any, name: str, value: torch.Tensor) -> None:
        if not torch.equal(value, torch.ones(1)):
            raise AssertionError
        model.scale.copy_(value)

    model = LoadingModel(each(step), scale=torch.zeros(1))
    with pytest.raises(
        ProbeError, match=r"source scale: the load reads its value \(aten::equal\) at .*test_cases.py:\d+ in step"
    ):
        probe(model, Checkpoint.from_wire(wire))
    manifest = probe(model, checkpoint_of(tmp_path / "files", {"scale": torch.ones(1)}))
    assert [a.sources for a in applications(manifest)] == [("scale",)]
