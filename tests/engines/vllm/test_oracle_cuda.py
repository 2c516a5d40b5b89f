"""The oracle under emulation: layouts of the CUDA build for an H100, really loaded into host memory, on a host without one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM's CUDA wheel")

from probe_cli.engines.vllm.engine import VllmEngine
from probe_cli.topology import Topology
from tests.engines.vllm.harness import engine_for, hold_against_real_load, in_child
from tests.engines.vllm.zoo import MULTIMODAL, save

pytestmark = pytest.mark.vllm_cuda

RUNS = [
    ("llama", Topology(tp=2), 1),
    ("qwen3-moe", Topology(tp=2, ep=2), 1),
    ("deepseek-v3", Topology(tp=2, ep=2), 0),
    ("gpt-oss", Topology(tp=2), 1),
    (MULTIMODAL, Topology(tp=2), 1),
]


@pytest.fixture(scope="module")
def engine() -> VllmEngine:
    """vLLM, imported here once: each case runs in a fork of this process."""
    import transformers  # noqa: F401

    return engine_for("h100")


@pytest.mark.parametrize(("name", "topology", "index"), RUNS, ids=lambda value: str(value).replace(" ", ","))
def test_regions_hold_in_a_real_load(
    name: str, topology: Topology, index: int, engine: VllmEngine, tmp_path: Path
) -> None:
    in_child(save, name, tmp_path)
    in_child(hold_against_real_load, engine, tmp_path, topology, index)
