"""A value that the loading code makes itself, after the last source: an application without sources, from the dry run to
the update."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from probe_cli.errors import IncompleteUpdate
from probe_cli.manifest import Manifest
from probe_cli.manifest.diff import diff
from probe_cli.manifest.keys import contract_of
from probe_cli.probe import probe
from probe_cli.reload import record
from tests.reload.models import Model, checkpoint_of, cold, parameter, same, session_of, state, weights_like

SHAPES = {"attn.q.weight": (2, 2), "attn.k.weight": (2, 2), "attn.q.bias": (2,)}


class Attention(nn.Module):
    """Query and key in one parameter, as Whisper's: the checkpoint has no bias for keys."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(4, 2)
        self.bias = parameter(4)
        for tensor in (self.weight, self.bias):
            tensor.weight_loader = self._load

    @staticmethod
    def _load(param: torch.Tensor, value: torch.Tensor, shard: str) -> None:
        param.data.narrow(0, 0 if shard == "q" else 2, 2).copy_(value)


class Whisper(Model):
    """`silent`: the biases are forgotten."""

    silent = False

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, value in weights:
            _, shard, tensor = name.split(".")
            destination = getattr(self.attn, tensor)
            destination.weight_loader(destination, value, shard)
        if not self.silent:
            self.attn.bias.weight_loader(self.attn.bias, torch.zeros(2), "k")


def _probed() -> Manifest:
    return probe(Whisper(), checkpoint_of(weights_like(SHAPES, 1)))


def test_recorded_equals_probed() -> None:
    model = Whisper()
    with record(model) as recording:
        model.load_weights(iter(weights_like(SHAPES, 1).items()))
    assert recording.manifest.keys() == _probed().keys()
    assert [str(key) for key, _ in _probed().keys().items() if not key.sources] == [
        "(a constant) -> attn.bias [shard=k]"
    ]


def test_an_update_brings_the_constant_too() -> None:
    b = weights_like(SHAPES, 2)
    session = session_of(Whisper, weights_like(SHAPES, 1))
    for weights in (b, weights_like(SHAPES, 3)):
        with session.update() as update:
            update.load_weights(iter(weights.items()))
        fresh, _, _ = cold(Whisper, weights)
        assert same(state(session.model), state(fresh))
    assert session.model.attn.bias[2:].tolist() == [0.0, 0.0]


def test_without_the_constant_an_update_is_incomplete() -> None:
    session = session_of(Whisper, weights_like(SHAPES, 1))
    session.model.silent = True
    with pytest.raises(IncompleteUpdate, match=r"\(a constant\) -> attn.bias \[shard=k\]"), session.update() as update:
        update.load_weights(iter(weights_like(SHAPES, 2).items()))


def test_it_reads_back_and_differs_by_name() -> None:
    manifest = _probed()
    again = Manifest.from_bytes(manifest.to_bytes())
    assert contract_of(again.layers) == contract_of(manifest.layers)
    silent = Whisper()
    silent.silent = True
    changes = diff(manifest, probe(silent, checkpoint_of(weights_like(SHAPES, 1))))
    removed = [change for change in changes.changes if change.kind == "application-removed"]
    assert [change.subject for change in removed] == ["(a constant)"]
