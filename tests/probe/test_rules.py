"""The rules of the contract that the dry run answers for: 1, 2, 3, 4, 5, 10 and 12."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from probe_cli.errors import ProbeError
from probe_cli.manifest import Manifest
from probe_cli.probe import probe
from tests.oracle import LoadingModel, applications, checkpoint_of, each, tensor

SOURCES = {"q": torch.arange(4.0), "k": torch.arange(4.0) + 4}


def _probe(tmp_path: Path, step: Callable[[Any, str, torch.Tensor], object], **options: Any) -> Manifest:
    model = LoadingModel(each(step), p=torch.zeros(8), other=torch.zeros(4))
    return probe(model, checkpoint_of(tmp_path, SOURCES), **options)


def _halves(param: torch.Tensor, value: torch.Tensor, shard_id: str = "q", *, flag: Any = None) -> None:
    param.data.narrow(0, 4 * (shard_id == "k"), 4).copy_(value)


# 1: recorded after the loader returned, if it did not decline and a write was seen


def test_rule_1_a_loader_that_wrote_nothing_is_declined(tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        model.p.weight_loader = (lambda p, v: True) if name == "q" else (lambda p, v: p.data[4:].copy_(v))
        model.p.weight_loader(model.p, value)

    manifest = _probe(tmp_path, step)
    assert [a.sources for a in applications(manifest)] == [("k",)]
    assert manifest.document.summary.declined == 1


def test_rule_1_writing_to_scratch_is_writing_nothing(tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        model.p.weight_loader = lambda p, v: torch.zeros(4).copy_(v)
        model.p.weight_loader(model.p, value)

    manifest = _probe(tmp_path, step)
    assert applications(manifest) == []
    assert manifest.document.summary.declined == 2


def test_rule_1_a_loader_that_writes_and_then_declines_ends_the_build(tmp_path: Path) -> None:
    def half(param: torch.Tensor, value: torch.Tensor) -> bool:
        param.data[:4].copy_(value)
        return False

    def step(model: Any, name: str, value: torch.Tensor) -> None:
        model.p.weight_loader = half
        model.p.weight_loader(model.p, value)

    with pytest.raises(ProbeError, match=r"weight loader .*half wrote p and then declined source q \(returned False\)"):
        _probe(tmp_path, step)


def test_rule_1_none_and_zero_are_not_false(tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        model.p.weight_loader = lambda p, v: (_halves(p, v, name), 0 if name == "q" else None)[1]
        model.p.weight_loader(model.p, value)

    assert [a.sources for a in applications(_probe(tmp_path, step))] == [("q",), ("k",)]


# 2: same call, same key


def test_rule_2_spelling_makes_no_difference(tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        model.p.weight_loader = _halves
        if name == "q":
            model.p.weight_loader(model.p, value)
            model.p.weight_loader(model.p, value, "q")
            model.p.weight_loader(shard_id="q", loaded=None) if False else None
            model.p.weight_loader(param=model.p, value=value, shard_id="q", flag=None)

    (application,) = applications(_probe(tmp_path, step))
    assert (application.selectors, application.count) == ({"shard_id": "q"}, 3)


# 3: selectors are plain values


@pytest.mark.parametrize(
    ("value", "described"),
    [({"a": 1}, "builtins.dict"), (object(), "builtins.object"), (float("nan"), "nan (float)")],
)
@pytest.mark.parametrize("swallow", [False, True])
def test_rule_3_anything_else_names_loader_argument_and_type(
    value: Any, described: str, swallow: bool, tmp_path: Path
) -> None:
    def step(model: Any, name: str, tensor: torch.Tensor) -> None:
        model.p.weight_loader = _halves
        try:
            model.p.weight_loader(model.p, tensor, flag=value)
        except ProbeError:
            if not swallow:
                raise

    with pytest.raises(ProbeError) as failure:
        _probe(tmp_path, step)
    assert "weight loader _halves: argument 'flag' is " in str(failure.value)
    assert described in str(failure.value)


def test_rule_3_a_tensor_is_no_selector(tmp_path: Path) -> None:
    """An index tensor would tell two calls apart that have the same key."""

    def step(model: Any, name: str, value: torch.Tensor) -> None:
        model.p.weight_loader = _halves
        model.p.weight_loader(model.p, value, flag=torch.tensor(3))

    with pytest.raises(
        ProbeError, match=r"weight loader _halves: argument 'flag' is a tensor that comes from no source"
    ):
        _probe(tmp_path, step)


def test_rule_3_a_tensor_of_the_model_is_context(tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        model.p.weight_loader = _halves
        model.p.weight_loader(model.p, value, name, flag=model.other)

    assert [a.selectors for a in applications(_probe(tmp_path, step))] == [{"shard_id": "q"}, {"shard_id": "k"}]


# 4: every write belongs to an application


def test_rule_4_a_write_of_nobody_s_value_ends_the_build(tmp_path: Path) -> None:
    with pytest.raises(ProbeError) as failure:
        _probe(tmp_path, lambda model, name, value: model.other.zero_())
    text = str(failure.value)
    for part in ("aten::zero_", "other", "source q", "test_rules.py:", "outside any weight loader"):
        assert part in text


def test_rule_4_a_loader_that_calls_another_is_one_application(tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        model.p.weight_loader = _halves
        model.other.weight_loader = lambda o, v, outer: model.p.weight_loader(model.p, v, name)
        model.other.weight_loader(model.other, value, outer=name)

    found = applications(_probe(tmp_path, step))
    assert [(a.sources, a.tensor, a.selectors, a.writes[0].tensor) for a in found] == [
        (("q",), "other", {"outer": "q"}, "p"),
        (("k",), "other", {"outer": "k"}, "p"),
    ]


# 5: contracts are multisets


def test_rule_5_the_same_key_may_be_required_n_times(tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        model.p.weight_loader = _halves
        for _ in range(2 if name == "q" else 1):
            model.p.weight_loader(model.p, value, name)

    manifest = _probe(tmp_path, step)
    assert [(a.sources, a.count) for a in applications(manifest)] == [(("q",), 2), (("k",), 1)]
    assert manifest.document.summary.applications == 3
    assert {key.sources: count for key, count in manifest.keys().items()} == {("q",): 2, ("k",): 1}


# 10: ties


def test_rule_10_tied_tensors_are_one_group_written_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(2, 2)
            self.head = nn.Linear(2, 2, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("view", self.embed.weight.data.view(-1), persistent=False)

        def load_weights(self, weights: Any) -> None:
            for _, value in weights:
                self.head.weight.data.copy_(value)

    manifest = probe(Tied(), checkpoint_of(tmp_path, {"w": torch.rand(2, 2)}))
    assert [(layer.name, t.name, t.alias) for layer in manifest.layers for t in layer.tensors] == [
        ("", "view", "view"),
        ("embed", "weight", "view"),
        ("head", "weight", "view"),
    ]
    assert len(applications(manifest)) == 1
    assert [t.coverage for layer in manifest.layers for t in layer.tensors] == [None, None, None]


# 12: reproducible

_SCRIPT = """
import sys, torch
from pathlib import Path
from tests.probe.test_cases import EXPERTS, Moe
from probe_cli.checkpoint import Checkpoint
from probe_cli.probe import probe
sys.stdout.buffer.write(probe(Moe(1, True), Checkpoint.open(sys.argv[1])).to_bytes())
"""


def test_rule_12_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    """In other processes, with other hash seeds, in another folder."""
    from tests.probe.test_cases import EXPERTS, Moe

    first = checkpoint_of(tmp_path / "one", EXPERTS)
    here = probe(Moe(1, True), first.reordered("name")).to_bytes()
    assert here == probe(Moe(1, True), checkpoint_of(tmp_path / "two", EXPERTS).reordered("name")).to_bytes()
    outputs = []
    for seed, folder in (("1", "one"), ("2", "two")):
        run = subprocess.run(
            [sys.executable, "-c", _SCRIPT, str(tmp_path / folder)],
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
        )
        outputs.append(run.stdout)
    assert outputs[0] == outputs[1]
    assert str(tmp_path).encode() not in outputs[0]


def test_a_contract_that_depends_on_the_order_of_sources_is_reported(tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        model.p.weight_loader = _halves
        model.first = getattr(model, "first", name)
        model.p.weight_loader(model.p, value, "q" if name == model.first else "k")

    with pytest.raises(
        ProbeError, match=r"the contract is not stable: a replay with the sources in reversed order differs"
    ):
        _probe(tmp_path, step, verify=True)


CALLS = [0]


def test_a_contract_that_depends_on_chance_is_reported(tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        CALLS[0] += 1
        model.p.weight_loader = _halves
        model.p.weight_loader(model.p, value, name, flag=CALLS[0])

    with pytest.raises(ProbeError, match="the contract is not stable: a second replay of the same sources differs"):
        _probe(tmp_path, step, verify=True)


def test_late_and_replaced_parameters_are_in_the_manifest_as_they_are_in_the_end(tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        if name == "q":
            model.register_parameter("bias", nn.Parameter(torch.empty(4), requires_grad=False))
            model.bias.weight_loader = lambda p, v, shard_id: p.data.copy_(v)
            model.bias.weight_loader(model.bias, value, "q")
        else:
            model.other = nn.Parameter(torch.empty(2, 2, dtype=torch.bfloat16), requires_grad=False)
            model.other.data.copy_(value.view(2, 2))

    manifest = _probe(tmp_path, step)
    assert [(a.sources, a.tensor, a.direct) for a in applications(manifest)] == [
        (("q",), "bias", False),
        (("k",), "other", True),
    ]
    other = tensor(manifest, "", "other")
    assert (other.shape, other.dtype, other.coverage) == ((2, 2), "BF16", None)
    assert tensor(manifest, "", "bias").coverage is None
