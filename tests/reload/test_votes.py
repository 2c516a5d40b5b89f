"""All ranks or none: four real processes over gloo, one of which is killed, fails, or holds another bundle."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from probe_cli.errors import ReloadError
from probe_cli.manifest import Manifest
from probe_cli.probe import probe
from probe_cli.reload import ReloadSession
from probe_cli.topology import Topology
from tests.reload.cases import DEEP, Deep
from tests.reload.models import checkpoint_of, same, state, weights_like

WORLD = 4
TOPOLOGY = Topology(tp=WORLD)


def _manifest(model: Deep, rank: int, names: dict[str, tuple[int, ...]] = DEEP) -> Manifest:
    return probe(model, checkpoint_of(weights_like(names, 1)), rank=TOPOLOGY.rank(rank))


def _worker(rank: int, folder: str, fault: str, commit: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    model = Deep()
    a, b = weights_like(DEEP, 1), weights_like(DEEP, 2)
    manifest = _manifest(model, rank)
    if fault == "digest" and rank == 2:
        manifest = probe(model, checkpoint_of({**a, "extra": torch.zeros(1)}), rank=TOPOLOGY.rank(rank))
    model.load_weights(iter(a.items()))
    timeout = 2.0 if fault in ("killed", "hung") else 20.0
    session = ReloadSession(model, manifest, rank=rank, group=dist.group.WORLD, commit=commit, vote_timeout=timeout)
    outcome = {"error": "", "state": "", "old": False, "new": False, "ballots": 0, "again": ""}
    before = state(model)
    try:
        with session.update() as update:
            names = list(b)
            if fault == "missing" and rank == 1:
                names.remove("layer.31.k")
            update.load_weights((name, b[name]) for name in names[:90])
            if fault == "killed" and rank == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hung" and rank == 3:
                time.sleep(6)
            update.load_weights((name, b[name]) for name in names[90:])
    except ReloadError as error:
        outcome["error"] = str(error)
    outcome["state"] = session.state
    after = state(model)
    outcome["old"] = same(after, before)
    outcome["new"] = all(torch.equal(after[f"layer.{i}.qkv"], _fused(b, i)) for i in range(60))
    outcome["ballots"] = len(session.receipt.ballots) if session.receipt else 0
    if fault == "missing":
        with session.update() as update:
            update.load_weights(b.items())
        outcome["again"] = session.state
    Path(folder, f"{rank}.json").write_text(json.dumps(outcome))


def _fused(weights: dict[str, torch.Tensor], layer: int) -> torch.Tensor:
    return torch.cat([weights[f"layer.{layer}.{name}"] for name in "qkv"])


def _run(folder: Path, fault: str, commit: str) -> dict[int, dict[str, object]]:
    context = mp.get_context("forkserver")  # plain fork would copy torch's thread pools in mid-flight
    context.set_forkserver_preload(["tests.reload.test_votes"])
    processes = [context.Process(target=_worker, args=(r, str(folder), fault, commit)) for r in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        if process.is_alive():
            process.kill()
    return {r: json.loads((folder / f"{r}.json").read_text()) for r in range(WORLD) if (folder / f"{r}.json").exists()}


@pytest.mark.parametrize("commit", ["layer", "model"])
def test_all_ranks_succeed_together(tmp_path: Path, commit: str) -> None:
    outcomes = _run(tmp_path, "none", commit)
    assert len(outcomes) == WORLD
    for outcome in outcomes.values():
        assert outcome["error"] == "" and outcome["new"] and outcome["state"] == "ready" and outcome["ballots"] == WORLD


@pytest.mark.parametrize("commit", ["layer", "model"])
def test_one_rank_that_lacks_a_tensor_fails_all_by_name_and_a_retry_works(tmp_path: Path, commit: str) -> None:
    outcomes = _run(tmp_path, "missing", commit)
    assert len(outcomes) == WORLD
    for rank, outcome in outcomes.items():
        assert "layer.31.k" in str(outcome["error"])
        assert ("rank 1" in str(outcome["error"])) or rank == 1
        assert outcome["again"] == "ready"
        if commit == "model":
            assert outcome["old"] and outcome["state"] == "ready"
        else:
            assert outcome["state"] == "undefined"


@pytest.mark.parametrize("fault", ["killed", "hung"])
def test_a_rank_that_is_gone_or_hangs_makes_the_others_fail_and_keep_the_old_weights(
    tmp_path: Path, fault: str
) -> None:
    outcomes = _run(tmp_path, fault, "model")
    assert set(outcomes) == ({0, 1, 2} if fault == "killed" else {0, 1, 2, 3})
    for outcome in outcomes.values():
        assert "rank 3 did not answer" in str(outcome["error"])
        assert outcome["old"] and not outcome["new"] and outcome["state"] == "ready"


def test_a_rank_with_another_bundle_makes_all_fail(tmp_path: Path) -> None:
    outcomes = _run(tmp_path, "digest", "model")
    assert len(outcomes) == WORLD
    for outcome in outcomes.values():
        assert "another bundle" in str(outcome["error"]) and outcome["old"]
