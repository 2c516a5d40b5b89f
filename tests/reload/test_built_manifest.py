"""A session over a manifest that an engine built: what the engine knew of the model's loaders, the session finds out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from probe_cli import Checkpoint, ReloadSession, Topology
from probe_cli.engines.base import EngineOptions
from probe_cli.engines.embedded import create
from probe_cli.engines.embedded.checkpoints import checkpoint_tensors, preset, write_checkpoint
from probe_cli.engines.embedded.model import CausalLM, process_weights
from probe_cli.engines.embedded.parallel import ParallelContext
from probe_cli.errors import IncompleteUpdate
from probe_cli.probe import build_rank

CONFIG = preset("qwen3-moe")


def _session(tmp_path: Path) -> tuple[ReloadSession, CausalLM]:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, CONFIG, seed=1))
    rank = Topology(tp=2, ep=2).rank(1)
    manifest = build_rank(create(EngineOptions()), checkpoint, rank).manifest
    model = CausalLM(CONFIG, ParallelContext(rank))
    model.load_weights(checkpoint_tensors(CONFIG, 1))
    return ReloadSession(model, manifest, poison=True), model


def test_tensors_without_a_loader_are_seen(tmp_path: Path) -> None:
    """To the engine, `default_weight_loader` was a loader; nobody tells the session, and the norms have no other."""
    session, model = _session(tmp_path)
    with session.update("full") as update:
        update.load_weights(checkpoint_tensors(CONFIG, 2))
    cold = CausalLM(CONFIG, model.context)
    cold.load_weights(checkpoint_tensors(CONFIG, 2))
    process_weights(cold)  # as the session does before it publishes
    assert update.receipt.ok
    assert [n for (n, a), b in zip(model.named_parameters(), cold.parameters()) if not torch.equal(a, b)] == []


def test_experts_of_other_ranks_are_no_unknown_sources(tmp_path: Path) -> None:
    """Rule 11: extras that another rank owns are not errors on this one, and not part of its message either."""
    session, _ = _session(tmp_path)
    lost = "model.layers.1.mlp.experts.6.up_proj.weight"
    with pytest.raises(IncompleteUpdate) as raised, session.update("full") as update:
        update.load_weights((name, t) for name, t in checkpoint_tensors(CONFIG, 2) if name != lost)
    assert lost in str(raised.value)
    assert "does not need" not in str(raised.value)
    assert session.receipts[-1].unknown_sources == ()


def test_misspelled_source_is_reported(tmp_path: Path) -> None:
    session, _ = _session(tmp_path)
    with pytest.raises(IncompleteUpdate) as raised, session.update("full") as update:
        update.load_weights((name.replace("model.norm", "model.form"), t) for name, t in checkpoint_tensors(CONFIG, 2))
    assert "model.norm.weight" in str(raised.value)
    assert "1 source arrived that this rank's contract does not need: model.form.weight" in str(raised.value)
