"""A whole model, every application: dropped, doubled in place of its neighbour, in any order; judged by name and by
bits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping

import pytest
import torch

from probe_cli.engines.base import EngineOptions
from probe_cli.engines.embedded import create
from probe_cli.engines.embedded.checkpoints import checkpoint_tensors, preset
from probe_cli.engines.embedded.model import CausalLM, default_weight_loader
from probe_cli.engines.embedded.parallel import ParallelContext
from probe_cli.errors import IncompleteUpdate
from probe_cli.manifest import Manifest
from probe_cli.probe import probe
from probe_cli.reload import ColdLoad, ReloadSession
from probe_cli.topology import Rank, Topology
from tests.reload.models import Weights, checkpoint_of, pointers, same, state

RANKS = {
    "single": Rank(),
    "tp2-ep2": Topology(tp=2, ep=2).rank(1),
}


class Served:
    """The embedded MoE model as a serving process has it, on weights A; B to update to; and cold B."""

    def __init__(self, rank: Rank, name: str = "qwen3-moe-extras") -> None:
        self.config = preset(name)
        self.rank = rank
        self.a: Weights = dict(checkpoint_tensors(self.config, 1))
        self.b: Weights = dict(checkpoint_tensors(self.config, 2))
        self.model, self.manifest, self.cold = self.load(self.a)
        self.expected = state(self.load(self.b)[0])
        self.before = state(self.model)

    def load(self, weights: Weights) -> tuple[CausalLM, Manifest, ColdLoad]:
        model = CausalLM(self.config, ParallelContext(self.rank))
        engine = create(EngineOptions())
        manifest = probe(model, checkpoint_of(weights), rank=self.rank, engine=engine)
        with engine.loading(model):
            model.load_weights(iter(weights.items()))
        cold = ColdLoad(model)
        cold.loaded(manifest)
        cold.process()
        return model, manifest, cold

    def session(self, **options: object) -> ReloadSession:
        return ReloadSession(
            self.model,
            self.manifest,
            cold=self.cold,
            rank=self.rank,
            default_loaders=(default_weight_loader,),
            poison=True,
            **options,  # type: ignore[arg-type]
        )


@pytest.fixture(scope="module", params=list(RANKS))
def served(request: pytest.FixtureRequest) -> Served:
    return Served(RANKS[request.param])


def test_a_full_update_equals_a_cold_load_bit_for_bit(served: Served) -> None:
    where = pointers(served.model)
    session = served.session()
    with session.update() as update:
        update.load_weights(served.b.items())
    assert same(state(served.model), served.expected)
    assert pointers(served.model) == where
    assert update.receipt is not None and update.receipt.observed == update.receipt.expected
    assert not [finding for finding in update.receipt.findings if not finding.harmless]


def _feeding(manifest: Manifest) -> dict[str, int]:
    """Source -> applications that need it."""
    counts: dict[str, int] = {}
    for key, count in manifest.keys().items():
        for source in key.sources:
            counts[source] = counts.get(source, 0) + count
    return counts


def _names_in(message: str) -> str:
    return message.split("sources arrived")[0]


def test_every_lost_application_is_found_by_name(served: Served) -> None:
    """commit="model", so that the model stays what it was through hundreds of failures."""
    session = served.session(commit="model", audit=False)
    before = state(served.model)
    for lost, count in _feeding(served.manifest).items():
        with pytest.raises(IncompleteUpdate) as failure, session.update() as update:
            update.load_weights((name, tensor) for name, tensor in served.b.items() if name != lost)
        receipt = session.receipt
        assert receipt is not None and sum(n for _, n in receipt.missing) == count
        assert all(lost in key for key, _ in receipt.missing) and lost in str(failure.value)
    assert same(state(served.model), before) and session.state == "ready"


def test_every_application_doubled_in_place_of_its_neighbour_is_found_by_name(served: Served) -> None:
    session = served.session(commit="model", audit=False)
    before = state(served.model)
    names = list(_feeding(served.manifest))
    for name, neighbour in itertools.pairwise(names):
        with pytest.raises(IncompleteUpdate), session.update() as update:
            update.load_weights(_doubled(served.b, name, neighbour))
        receipt = session.receipt
        assert receipt is not None and receipt.missing
        assert all(neighbour in key for key, _ in receipt.missing)
    assert same(state(served.model), before)


def _doubled(weights: Mapping[str, torch.Tensor], name: str, lost: str) -> Iterator[tuple[str, torch.Tensor]]:
    for other, tensor in weights.items():
        if other != lost:
            yield other, tensor
        if other == name:
            yield other, tensor


def _orders(weights: Weights) -> Iterator[tuple[str, list[str]]]:
    names = list(weights)
    yield "layer by layer", names
    yield "reversed", names[::-1]
    yield "by kind, all layers of one kind together", sorted(names, key=lambda name: name.split(".")[3:])
    half = len(names) // 2
    yield (
        "two halves interleaved",
        [name for pair in zip(names[:half], names[half:]) for name in pair] + names[2 * half :],
    )
    for seed in range(200):
        shuffled = names[:]
        random.Random(seed).shuffle(shuffled)
        yield f"random {seed}", shuffled


@pytest.mark.parametrize(
    "options",
    [{}, {"in_place": True}, {"commit": "model"}, {"staging_bytes": "least"}],
    ids=["staged", "in_place", "model", "least"],
)
def test_every_order_succeeds_within_the_budget_and_equals_a_cold_load(
    served: Served, options: dict[str, object]
) -> None:
    if options.get("staging_bytes") == "least":
        hooked = max(unit.nbytes for unit in served.session().units if unit.hooked)
        options = {"staging_bytes": hooked}
    session = served.session(**options)
    pick = random.Random(7)
    for what, order in _orders(served.b):
        with session.update() as update:
            chunks = sorted(pick.sample(range(len(order)), 3))
            for start, stop in zip([0, *chunks], [*chunks, len(order)]):
                update.load_weights((name, served.b[name]) for name in order[start:stop])
        receipt = update.receipt
        assert receipt is not None and receipt.staging_peak <= receipt.staging_budget, what
        assert same(state(served.model), served.expected), what
