"""The faults that people reported for weight reloads, one test (or more) for each case number."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from probe_cli.errors import IncompleteUpdate, ReloadError
from probe_cli.reload import ReloadSession, Scope
from tests.reload.models import (
    Model,
    cold,
    default_loader,
    one_buffer,
    parameter,
    pointers,
    same,
    session_of,
    state,
    weights_like,
)
import itertools

SHAPES_1 = {"block.left": (4,), "block.right": (4,)}


class Pair(Model):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Module()
        self.block.left = parameter(4)
        self.block.right = parameter(4)


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


SHAPES_2 = {"mixer.A": (4,), "mixer.dt_bias": (4,), "mixer.D": (4,)}


def composed_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight)
    param.data.copy_(-torch.exp(param.data))


class Mamba(Model):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Module()
        self.mixer.A = parameter(4, loader=composed_loader)
        self.mixer.dt_bias = parameter(4)
        self.mixer.D = parameter(4)


def test_case_2_a_loader_that_writes_twice_is_one_application() -> None:
    a, b = weights_like(SHAPES_2, 1), weights_like(SHAPES_2, 2)
    session = session_of(Mamba, a)
    assert sum(session.manifest.keys().values()) == 3
    with session.update() as update:
        update.load_weights([(name, b[name]) for name in ("mixer.A", "mixer.dt_bias")])
        assert same(state(session.model), state(cold(Mamba, a)[0]))  # not published before D
        update.load_weights([("mixer.D", b["mixer.D"])])
    assert same(state(session.model), state(cold(Mamba, b)[0]))


class Packed(Model):
    """`weight_shape` is loaded once for each of q, k and v, with one key."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Module()
        self.qkv.weight_shape = parameter(2)
        self.qkv.weight = parameter(4)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            if name == "shape":
                for _ in range(3):
                    self.qkv.weight_shape.weight_loader(self.qkv.weight_shape, tensor)
            else:
                self.qkv.weight.weight_loader(self.qkv.weight, tensor)
        return set()


def test_case_3_the_same_key_three_times() -> None:
    shapes = {"shape": (2,), "weight": (4,)}
    a, b = weights_like(shapes, 1), weights_like(shapes, 2)
    session = session_of(Packed, a)
    assert sorted(session.manifest.keys().values()) == [1, 3]
    with session.update() as update:
        update.load_weights(b.items())
    assert update.receipt is not None and (update.receipt.observed, update.receipt.extras) == (4, 0)
    assert same(state(session.model), state(cold(Packed, b)[0]))


class Padded(Model):
    """Rows 0 to 2 are loaded, row 3 is left as it is made; the loader derives a buffer; post-processing sums all
    rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = PaddedLinear()


class PaddedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 2), 7.0), requires_grad=False)
        self.weight.weight_loader = self.load
        self.register_buffer("top", torch.zeros(2))
        self.register_buffer("total", torch.zeros(2), persistent=False)

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data[:3].copy_(loaded_weight)
        self.top.copy_(loaded_weight[0])

    def process_weights_after_loading(self) -> None:
        self.total.copy_(self.weight.sum(0))


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


class Buffered(Model):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = nn.Module()
        self.rotary.register_buffer("inv_freq", torch.arange(4.0), persistent=False)
        self.linear = nn.Module()
        self.linear.weight = parameter(4)
        self.linear.register_buffer("mask", torch.ones(3), persistent=False)


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


class Viewed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.conv = Conv()


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Module()
        self.child.weight = parameter(4, 2)
        self.register_buffer("flat", self.child.weight.data.view(-1), persistent=False)


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


class LateBias(Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Module()
        self.linear.weight = parameter(4)

    def add_bias(self) -> LateBias:
        self.linear.bias = parameter(4)
        return self


def test_case_8_a_parameter_registered_late_is_counted_like_any_other() -> None:
    shapes = {"linear.weight": (4,), "linear.bias": (4,)}
    b = weights_like(shapes, 2)
    session = session_of(lambda: LateBias().add_bias(), weights_like(shapes, 1))
    with pytest.raises(IncompleteUpdate, match=r"linear\.bias"), session.update() as update:
        update.load_weights([("linear.weight", b["linear.weight"])])
    with session.update() as update:
        update.load_weights(b.items())
    assert torch.equal(session.model.linear.bias, b["linear.bias"])


class Shared(Model):
    route = {"A": ("norm.weight", {}), "B": ("norm.weight", {})}

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Module()
        self.norm.weight = parameter(4)


def test_case_9_two_sources_of_one_tensor_are_two_keys() -> None:
    shapes = {"A": (4,), "B": (4,)}
    b = weights_like(shapes, 2)
    session = session_of(Shared, weights_like(shapes, 1))
    assert {key.sources for key in session.manifest.keys()}  # noqa: SIM118 == {("A",), ("B",)}
    with pytest.raises(IncompleteUpdate) as failure, session.update() as update:
        update.load_weights([("B", b["B"]), ("B", b["B"])])
    assert "A -> norm.weight" in str(failure.value) and "B ->" not in str(failure.value)


QKV = {f"attn.{name}_proj.weight": (2, 3) for name in "qkv"}


class Fused(Model):
    route = {f"attn.{name}_proj.weight": ("attn.qkv", {"loaded_shard_id": name}) for name in "qkv"}

    def __init__(self) -> None:
        super().__init__()
        self.attn = FusedLinear()


class FusedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = parameter(6, 3, loader=self.load)

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor, loaded_shard_id: str | None = None) -> None:
        assert loaded_shard_id is not None
        param.data.narrow(0, 2 * "qkv".index(loaded_shard_id), 2).copy_(loaded_weight)


def test_case_10_missing_shards_of_a_fused_tensor_are_named() -> None:
    session = session_of(Fused, weights_like(QKV, 1))
    before, b = state(session.model), weights_like(QKV, 2)
    with pytest.raises(IncompleteUpdate) as failure, session.update() as update:
        update.load_weights([("attn.q_proj.weight", b["attn.q_proj.weight"])])
    text = str(failure.value)
    assert "attn.k_proj.weight" in text and "attn.v_proj.weight" in text and "attn.q_proj.weight ->" not in text
    assert "loaded_shard_id=k" in text
    assert same(state(session.model), before)


class Deep(Model):
    layers = 60

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(FusedLinear() for _ in range(self.layers))
        self.route = {
            f"layer.{i}.{name}": (f"layer.{i}.qkv", {"loaded_shard_id": name})
            for i in range(self.layers)
            for name in "qkv"
        }


DEEP = {f"layer.{i}.{name}": (2, 3) for i in range(60) for name in "qkv"}


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


class Sinks(Model):
    """`load_weights` writes one tensor itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Module()
        self.attn.sinks = parameter(4, loader=None)
        self.attn.weight = parameter(4)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            param = params[name]
            if name.endswith("sinks"):
                param.data[:2].copy_(tensor[:2])
                param.data[2:].copy_(tensor[2:])
            else:
                param.weight_loader(param, tensor)
        return set(params)


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


EXPERTS = {f"moe.experts.{i}.{name}": (2, 3) for i in range(8) for name in ("w1", "w2")}


class Moe(Model):
    """Expert parallel rank 3 of 4 owns experts 6 and 7."""

    route = {name: ("moe.w", {"shard_id": name[-2:], "expert_id": int(name.split(".")[2])}) for name in EXPERTS}

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoeLayer()

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        params, loaded = dict(self.named_parameters()), set()
        self.answers: list[object] = []
        for name, tensor in weights:
            target, selectors = self.route.get(name, (name, {}))
            param = params[target]
            self.answers.append(param.weight_loader(param, tensor, return_success=True, **selectors))
            loaded.add(target)
        return loaded


class MoeLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = parameter(4, 2, 3, loader=self.load)
        self.register_buffer("expert_map", torch.tensor([-1] * 6 + [0, 1]), persistent=False)
        self.calls = 0

    def load(
        self,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool:
        self.calls += 1
        local = int(self.expert_map[expert_id])
        if local < 0:
            return False
        param.data[2 * local + ("w1", "w2").index(shard_id)].copy_(loaded_weight)
        return True


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


class Fragile(Model):
    layers = 6

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(FragileLayer() for _ in range(self.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = x * layer.weight + layer.bias
        return x


class FragileLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(4)
        self.bias = parameter(4, loader=self.load)
        self.broken = False

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        if self.broken:
            raise ValueError("disk on fire")
        param.data.copy_(loaded_weight)


FRAGILE = {f"layer.{i}.{name}": (4,) for i in range(6) for name in ("weight", "bias")}


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


class Swapped(Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear = SwappedLinear()


class SwappedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = parameter(4, 2)

    def process_weights_after_loading(self) -> None:
        self.w.data.copy_(torch.cat([self.w.data[2:], self.w.data[:2]]))


@pytest.mark.parametrize("commit", ["layer", "model"])
def test_case_20_processing_in_place_equals_a_cold_load_every_time(commit: str) -> None:
    shapes = {"linear.w": (4, 2)}
    session = session_of(Swapped, weights_like(shapes, 1), commit=commit)
    for seed in (2, 3):
        weights = weights_like(shapes, seed)
        with session.update() as update:
            update.load_weights(weights.items())
        assert same(state(session.model), state(cold(Swapped, weights)[0]))


class Scaled(Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear = ScaledLinear()


class ScaledLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = parameter(1)
        self.weight = parameter(4)
        self.scale_float = 0.0

    def process_weights_after_loading(self) -> None:
        self.scale.data.mul_(0.5)
        self.scale_float = float(self.scale)


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


class Stale(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.linear.process_weights_after_loading = lambda: None


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


class Workspace(Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear = WorkspaceLinear()


class WorkspaceLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(4)

    def process_weights_after_loading(self) -> None:
        self.workspace = self.weight.data * 2


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


class Growing(Workspace):
    def __init__(self) -> None:
        super().__init__()
        linear = self.linear
        runs = [0]

        def process() -> None:
            runs[0] += 1
            linear.workspace = torch.ones(runs[0])

        linear.process_weights_after_loading = process


def test_case_23_a_tensor_that_cannot_stay_is_named() -> None:
    shapes = {"linear.weight": (4,)}
    session = session_of(Growing, weights_like(shapes, 1))
    with session.update() as update:
        update.load_weights(weights_like(shapes, 2).items())
    assert update.receipt is not None
    (finding,) = update.receipt.findings
    assert (finding.kind, finding.layer, finding.path) == ("respecified", "linear", "workspace")


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


class Joined(Model):
    """q_a and kv_a are concatenated before they are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Module()
        self.attn.fused = parameter(5, 2)
        self.attn.norm = parameter(2)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        params, cache = dict(self.named_parameters()), {}
        for name, tensor in weights:
            if name == "attn.norm":
                params[name].weight_loader(params[name], tensor)
                continue
            cache[name] = tensor
            if len(cache) == 2:
                fused = torch.cat([cache["attn.q_a"], cache["attn.kv_a"]])
                params["attn.fused"].weight_loader(params["attn.fused"], fused)
        return set()


JOINED = {"attn.q_a": (2, 2), "attn.norm": (2,), "attn.kv_a": (3, 2)}


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


class Either(Model):
    """Takes experts one by one, or all in one 3-D tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.experts = nn.Module()
        self.mlp.experts.w = parameter(8, 2, loader=self.load)

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor, expert_id: int | None = None) -> None:
        (param.data if expert_id is None else param.data[expert_id]).copy_(loaded_weight)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        param = self.mlp.experts.w
        for name, tensor in weights:
            parts = name.split(".")
            param.weight_loader(param, tensor, **({"expert_id": int(parts[2])} if parts[2].isdigit() else {}))
        return set()


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


class Valued(Model):
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            if name == "linear.scale" and tensor.item() == 0.0:
                raise ValueError("zero scale")
            param = self.get_parameter(name)
            param.weight_loader(param, tensor)
        return set()

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Module()
        self.linear.scale = parameter(1)
        self.linear.weight = parameter(4)


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


class Kernel:
    def __init__(self) -> None:
        self.packed = False

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.w.data.copy_(layer.w.data.flip(0))
        self.packed = True


class Method:
    """The kernel packs the weights when it is made, and is made once."""

    def __init__(self, registry: dict[int, Kernel] | None = None) -> None:
        self.kernel: Kernel | None = None
        if registry is not None:
            self._made = registry.__contains__

            def make(key: int, kernel: Kernel) -> None:
                registry[key] = kernel

            self._make = make

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if self.kernel is None:
            self.kernel = Kernel()
            self.kernel.process_weights_after_loading(layer)


_KERNELS: dict[str, Kernel] = {}


class HiddenMethod:
    """As `Method`, but the kernel is where nobody can see it."""

    def __init__(self, key: str) -> None:
        self.key = key

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if self.key not in _KERNELS:
            _KERNELS[self.key] = Kernel()
            _KERNELS[self.key].process_weights_after_loading(layer)


class Kerneled(Model):
    def __init__(self) -> None:
        super().__init__()
        self.moe = nn.Module()
        self.moe.w = parameter(4, 2)
        self.moe.quant_method = Method()


class Hidden(Kerneled):
    def __init__(self) -> None:
        super().__init__()
        self.moe.quant_method = HiddenMethod(f"{id(self)}")


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
    with pytest.raises(ReloadError, match=r"layer moe.*Kernel\.process_weights_after_loading"):
        with session.update() as update:
            update.load_weights(weights_like(shapes, 2).items())
    assert same(state(session.model), before) and session.state == "ready"


_ = default_loader
