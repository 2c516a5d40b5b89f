"""A contract recorded around a real load is the one that the dry run predicts."""

from __future__ import annotations

import pytest
import torch

from probe_cli.engines.base import EngineOptions
from probe_cli.engines.embedded import create
from probe_cli.engines.embedded.checkpoints import PRESETS, checkpoint_tensors, preset
from probe_cli.engines.embedded.model import CausalLM, default_weight_loader
from probe_cli.engines.embedded.parallel import ParallelContext
from probe_cli.errors import IncompleteUpdate
from probe_cli.probe import probe
from probe_cli.reload import ReloadSession, record
from probe_cli.topology import Rank, Topology
from tests.reload.cases import DEEP, EXPERTS, JOINED, Deep, Joined, Mamba, Moe, Packed, Padded, Sinks
from tests.reload.models import checkpoint_of, same, state, weights_like

SHAPES = {
    Mamba: {"mixer.A": (4,), "mixer.dt_bias": (4,), "mixer.D": (4,)},
    Packed: {"shape": (2,), "weight": (4,)},
    Padded: {"linear.weight": (3, 2)},
    Sinks: {"attn.sinks": (4,), "attn.weight": (4,)},
    Moe: EXPERTS,
    Joined: JOINED,
    Deep: DEEP,
}


@pytest.mark.parametrize("make", list(SHAPES), ids=lambda make: make.__name__)
def test_recorded_equals_probed(make: type) -> None:
    weights = weights_like(SHAPES[make], 1)
    model = make()
    predicted = probe(model, checkpoint_of(weights))
    loads = model.load_weights
    with record(model) as recording:
        model.load_weights(iter(weights.items()))
    assert model.load_weights == loads
    assert recording.manifest.keys() == predicted.keys()
    assert recording.manifest.contract_digest == predicted.contract_digest
    assert recording.manifest.document.checkpoint == predicted.document.checkpoint
    for mine, theirs in zip(recording.manifest.layers, predicted.layers):
        assert mine.tensors == theirs.tensors
    assert recording.manifest.summary.declined == predicted.summary.declined


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("rank", [Rank(), Topology(tp=2).rank(1)], ids=["single", "tp2"])
def test_recorded_equals_probed_for_the_embedded_family(name: str, rank: Rank) -> None:
    config = preset(name)
    weights, b = dict(checkpoint_tensors(config, 1)), dict(checkpoint_tensors(config, 2))
    torch.manual_seed(0)
    model = CausalLM(config, ParallelContext(rank))
    predicted = probe(model, checkpoint_of(weights), rank=rank, engine=create(EngineOptions()))
    with torch.no_grad(), record(model, rank=rank, default_loaders=[default_weight_loader]) as recording:
        model.load_weights(iter(weights.items()))
    assert recording.manifest.keys() == predicted.keys()
    assert recording.manifest.contract_digest == predicted.contract_digest
    for mine, theirs in zip(recording.manifest.layers, predicted.layers):
        assert mine.tensors == theirs.tensors
    recording.cold.process()
    session = ReloadSession(
        model, recording.manifest, cold=recording.cold, default_loaders=(default_weight_loader,), poison=True
    )
    with session.update() as update:
        update.load_weights(b.items())
    other = CausalLM(config, ParallelContext(rank))
    with torch.no_grad(), record(other, rank=rank, default_loaders=[default_weight_loader]) as again:
        other.load_weights(iter(b.items()))
    again.cold.process()
    assert same(state(model), state(other))
    lost = next(iter(b))
    with pytest.raises(IncompleteUpdate, match=lost), session.update() as update:
        update.load_weights((name, tensor) for name, tensor in b.items() if name != lost)
