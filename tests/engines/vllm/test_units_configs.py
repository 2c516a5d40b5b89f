"""The ready configurations for vLLM: each is read, and asks for something that the engine can do."""

from __future__ import annotations

from pathlib import Path

import pytest

from probe_cli.config import read_config
from probe_cli.engines.vllm.targets import target_named
from probe_cli.topology import Topology

CONFIGS = Path(__file__).resolve().parents[3] / "configs"

EXPECTED = {
    "deepseek-v3": ("deepseek-ai/DeepSeek-V3", "h200", Topology(tp=8, ep=8)),
    "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B", "h100", Topology(tp=8, ep=8)),
    "gpt-oss-120b": ("openai/gpt-oss-120b", "h100", Topology(tp=8)),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B-Instruct", "h100", Topology(tp=4)),
    "kimi-k2": ("moonshotai/Kimi-K2-Instruct", "h200", Topology(tp=1, dp=16, ep=16)),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_it_asks_for(name: str) -> None:
    checkpoint, target, topology = EXPECTED[name]
    config = read_config(CONFIGS / f"{name}.toml")
    assert config.engine == "vllm"
    assert config.checkpoint == checkpoint
    assert config.target == target
    assert target_named(target).name == target
    assert config.output == f"manifests/{name}"
    tp, dp = config.topology.tp or 1, config.topology.dp or 1
    ep = tp * dp if config.topology.ep is True else int(config.topology.ep or 1)
    assert Topology(tp=tp, dp=dp, ep=ep, pp=config.topology.pp or 1) == topology


def test_every_configuration_for_vllm_is_in_this_list() -> None:
    named = {file.stem for file in CONFIGS.glob("*.toml") if read_config(file).engine == "vllm"}
    assert named == set(EXPECTED)
