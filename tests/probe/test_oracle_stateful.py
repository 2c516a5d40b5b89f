"""The oracle over what loading code does to the model itself: ties, late and replaced parameters, `.data =`, stashes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from probe_cli.probe import probe
from tests.oracle import check, checkpoint_of, random_examples, snapshot_of, state_of

Act = Callable[["Block", torch.Tensor], object]


class Block(nn.Module):
    """Fused, tied, flat and experts' tensors, all full of sentinels."""

    def __init__(self) -> None:
        super().__init__()

        def full(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.full(shape, -7, dtype=torch.int64), requires_grad=False)

        self.qkv = full(8, 3)
        self.embed = full(5, 3)
        self.tied = self.embed
        flat = torch.full((12,), -7, dtype=torch.int64)
        self.one = nn.Parameter(flat[:6].view(2, 3), requires_grad=False)
        self.two = nn.Parameter(flat[6:].view(2, 3), requires_grad=False)
        self.flat = flat
        self.experts = full(2, 4, 3)
        self.register_buffer("table", torch.full((4, 3), -7, dtype=torch.int64))
        self.register_buffer("alias", self.qkv.data[2:4], persistent=False)
        self.turned = nn.Parameter(torch.full((3, 4), -7, dtype=torch.int64).t(), requires_grad=False)
        self.stash: list[torch.Tensor] = []
        self.acts: dict[str, Act] = {}
        for name in ("qkv", "embed", "experts"):
            getattr(self, name).weight_loader = getattr(self, f"load_{name}")

    def load_qkv(self, param: Any, value: torch.Tensor, shard_id: str) -> None:
        start, size = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}[shard_id]
        param.data.narrow(0, start, size).copy_(value[:size])

    def load_embed(self, param: Any, value: torch.Tensor) -> None:
        rows = min(value.shape[0], 4)
        param.data[:rows].copy_(value[:rows])
        param.data[rows:].fill_(0)

    def load_experts(self, param: Any, value: torch.Tensor, expert_id: int, half: int) -> bool:
        if expert_id > 1:
            return False
        param.data[expert_id].narrow(0, 2 * half, 2).copy_(value[:2])
        return True

    def load_weights(self, weights: Any) -> None:
        for name, value in weights:
            self.acts[name](self, value)


def _late(block: Any, value: torch.Tensor) -> None:
    if "late" not in block._parameters:
        block.late = nn.Parameter(torch.full((4, 3), -7, dtype=torch.int64), requires_grad=False)
        block.late.weight_loader = lambda param, w, part: param.data[part : part + 2].copy_(w[:2])
    block.late.weight_loader(block.late, value, part=0)


def _pair(block: Any, value: torch.Tensor, join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    block.stash.append(value)
    if len(block.stash) == 2:
        first, second = block.stash
        block.stash.clear()
        joined = join(first, second)
        block.table.data[: joined.shape[0]].copy_(joined)


ACTS: dict[str, Act] = {
    "q": lambda b, w: b.qkv.weight_loader(b.qkv, w, "q"),
    "k": lambda b, w: b.qkv.weight_loader(b.qkv, w, shard_id="k"),
    "v by its data": lambda b, w: b.load_qkv(b.qkv.data, w, "v"),
    "alias": lambda b, w: b.alias.copy_(w[:2]),
    "embed": lambda b, w: b.embed.weight_loader(b.embed, w),
    "tied": lambda b, w: b.tied.data[1:3].copy_(w[:2]),
    "one": lambda b, w: b.one.data.copy_(w[2:]),
    "two": lambda b, w: b.two.copy_(w[:2]),
    "flat": lambda b, w: b.flat.copy_(w.reshape(-1)),
    "flat middle": lambda b, w: b.flat[4:8].copy_(w.view(-1)[:4]),
    "expert 0": lambda b, w: b.experts.weight_loader(b.experts, w, expert_id=0, half=1),
    "expert 1": lambda b, w: b.experts.weight_loader(b.experts, w, expert_id=1, half=0),
    "expert 5": lambda b, w: b.experts.weight_loader(b.experts, w, expert_id=5, half=0),
    "turned": lambda b, w: b.turned.copy_(w),
    "turned row": lambda b, w: b.turned.data[1].copy_(w[3]),
    "data": lambda b, w: setattr(b.turned, "data", w.t().contiguous().t()),
    "replaced": lambda b, w: setattr(b, "turned", nn.Parameter(w + 1, requires_grad=False)),
    "late": _late,
    "late direct": lambda b, w: b.register_buffer("extra", w[:2].t()),
    "in place": lambda b, w: b.table.copy_(w.add_(1)),
    "pair": lambda b, w: _pair(b, w, lambda one, two: torch.cat([one[:2], two[:2]])),
    "pair turned": lambda b, w: _pair(b, w, lambda one, two: torch.stack([two, one], 1)[:2, 1]),
    "pair sum": lambda b, w: _pair(b, w, lambda one, two: one + two * 100),
    "foreach": lambda b, w: torch._foreach_copy_([b.one, b.two], [w[:2], w[2:]]),
    "rows": lambda b, w: b.table.__setitem__(torch.tensor([3, 0]), w[1:3]),
    "out": lambda b, w: torch.mul(w, 2, out=b.table),
    "nothing": lambda b, w: None,
}


@random_examples
@given(st.lists(st.sampled_from(sorted(ACTS)), min_size=1, max_size=5), st.booleans())
def test_loading_code_that_works_on_the_model_itself(names: list[str], meta: bool) -> None:
    sources = {f"s{i}": torch.arange(12).view(4, 3) + 1000 * (i + 1) for i in range(len(names))}

    def build() -> Block:
        block = Block()
        block.acts = {f"s{i}": ACTS[name] for i, name in enumerate(names)}
        return block

    def load(weights: Mapping[str, torch.Tensor]) -> nn.Module:
        block = build()
        if not weights:  # what the load registers or replaces has its sentinel's place by then
            return _like(load(sources), build())
        with torch.no_grad():
            block.load_weights((name, value.clone()) for name, value in weights.items())
        return block

    block = build()
    before, seen = state_of(block), snapshot_of(block)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = checkpoint_of(Path(folder), sources)
        manifest = probe(block, checkpoint)
        if meta:  # no memory at all: the same contract
            with torch.device("meta"):
                empty = build()
            assert probe(empty, checkpoint).keys() == manifest.keys()
    assert snapshot_of(block) == seen
    assert all(torch.equal(before[name], value) for name, value in state_of(block).items())
    check(manifest, load, sources)


def _like(loaded: nn.Module, fresh: nn.Module) -> nn.Module:
    """The tensors of a loaded model as they were before: sentinels where the load has made new ones."""
    for name, value in [*loaded.named_parameters(), *loaded.named_buffers()]:
        old = dict([*fresh.named_parameters(), *fresh.named_buffers()]).get(name)
        if old is None or old.shape != value.shape:
            replacement = torch.full_like(value, -7)
            if name in fresh._buffers or (name not in fresh._parameters and name in loaded._buffers):
                fresh.register_buffer(name, replacement)
            else:
                fresh.register_parameter(name, nn.Parameter(replacement, requires_grad=False))
    return fresh
