"""Calls are remembered over updates; what is remembered never decides for a call that is another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from probe_cli.errors import IncompleteUpdate
from probe_cli.reload.contract import Contract
from probe_cli.reload.recall import Recall
from probe_cli.reload.stream import SourceStream
from tests.reload.models import Model, cold, parameter, same, session_of, state, weights_like

SHAPES = {"both": (2, 3), "plain": (3,)}


class Halves(Model):
    """One source is loaded in two calls. `calls` says how: (shard, whether by keyword)."""

    calls: tuple[tuple[Any, bool], ...] = ((0, False), (1, False))

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.weight = parameter(2, 3, loader=self.load)
        self.layer.bias = parameter(3)

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor, loaded_shard_id: int = 0) -> None:
        param.data[_row(loaded_shard_id)].copy_(loaded_weight)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            if name == "plain":
                self.layer.bias.weight_loader(self.layer.bias, tensor)
                continue
            for shard, by_keyword in self.calls:
                row, weight = tensor[_row(shard)], self.layer.weight
                if by_keyword:
                    weight.weight_loader(weight, row, loaded_shard_id=shard)
                else:
                    weight.weight_loader(weight, row, shard)
        return set()


def _row(shard: Any) -> int:
    return int(torch.as_tensor(shard).flatten()[-1])


@pytest.mark.parametrize(
    "calls",
    [
        ((0, False), (1, False)),
        ((1, False), (0, False)),
        ((1, True), (0, True)),
        ((0, True), (1, False)),
    ],
    ids=["as before", "in another order", "by keyword", "mixed"],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_calls_that_change_between_updates_count_as_what_they_are(calls: tuple[Any, ...], in_place: bool) -> None:
    session = session_of(Halves, weights_like(SHAPES, 1), in_place=in_place)
    for index in range(2, 6):
        session.model.calls = calls if index % 2 else Halves.calls
        b = weights_like(SHAPES, index)
        with session.update() as update:
            update.load_weights(b.items())
        receipt = update.receipt
        assert receipt is not None and (receipt.observed, receipt.extras, receipt.declined) == (3, 0, 0)
        assert same(state(session.model), state(cold(Halves, b)[0]))


def test_a_call_doubled_in_place_of_another_is_not_taken_for_the_remembered_one() -> None:
    session = session_of(Halves, weights_like(SHAPES, 1))
    b = weights_like(SHAPES, 2)
    with session.update() as update:
        update.load_weights(b.items())
    session.model.calls = ((0, False), (0, False))
    with pytest.raises(IncompleteUpdate, match=r"both.*loaded_shard_id.*1"), session.update() as update:
        update.load_weights(b.items())
    assert session.receipt is not None and session.receipt.extras == 1


def test_a_tensor_where_a_plain_value_was_is_another_call() -> None:
    session = session_of(Halves, weights_like(SHAPES, 1))
    b = weights_like(SHAPES, 2)
    with session.update() as update:
        update.load_weights(b.items())
    session.model.calls = ((torch.tensor([0, 1]), True), (0, True))
    with pytest.raises(IncompleteUpdate), session.update() as update:
        update.load_weights(b.items())


def test_a_tensor_that_is_kept_is_known_by_its_storage_after_others_have_come() -> None:
    """`load_weights` may gather tensors and load them later; a name that is gone tells nothing."""
    _, manifest, _ = cold(Halves, weights_like(SHAPES, 1))
    contract = Contract(manifest)
    weights = weights_like({**SHAPES, "stranger": (5,)}, 2)
    stream = SourceStream(contract, Recall(contract), lambda: None)

    def sent() -> Iterator[tuple[str, torch.Tensor]]:
        while weights:
            name = next(iter(weights))
            yield name, weights.pop(name)

    kept: dict[str, torch.Tensor] = {}
    for name, tensor in stream.track(sent()):
        assert stream.names_of(tensor[:1]) == name == stream.current
        if name != "plain":
            kept[name] = tensor.view(-1)[1:]
            kept[name + " itself"] = tensor
        for other in kept:
            assert stream.names_of(kept[other]) == other.removesuffix(" itself")
        assert stream.names_of(torch.ones(2)) is None
    assert (stream.count, list(stream.unknown), stream.current) == (3, ["stranger"], None)
