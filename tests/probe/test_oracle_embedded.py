"""The oracle over the embedded family: every rank of TP x EP x PP topologies, really loaded and dry run."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from probe_cli.checkpoint import Checkpoint
from probe_cli.engines.base import EngineOptions
from probe_cli.engines.embedded.checkpoints import checkpoint_tensors, preset, write_checkpoint
from probe_cli.engines.embedded.engine import EmbeddedEngine
from probe_cli.engines.embedded.model import CausalLM
from probe_cli.engines.embedded.parallel import ParallelContext
from probe_cli.probe import build_rank
from probe_cli.topology import Rank, Topology
from tests.oracle import check, read_bytes

SMALL = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 4, "vocab_size": 200, "num_hidden_layers": 2}
MOE = {**SMALL, "moe_intermediate_size": 16, "num_experts": 4}
BLOCKS = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 8]}}

CONFIGS = {
    "llama": preset("llama", **SMALL),
    "llama-tied": preset("llama-tied", **SMALL, attention_bias=True, mlp_bias=True),
    "llama-fp8": preset("llama", **{**SMALL, "head_dim": 8, "intermediate_size": 32}, **BLOCKS),
    "qwen3": preset("qwen3", **SMALL),
    "qwen3-moe": preset("qwen3-moe", **MOE, mlp_only_layers=[1]),
    "qwen3-moe-fp8": preset("qwen3-moe", **{**MOE, "head_dim": 8}, **BLOCKS),
    "qwen3-moe-extras": preset("qwen3-moe-extras", **MOE),
}

DENSE = [Topology(), Topology(tp=2), Topology(tp=4), Topology(pp=2)]
SPARSE = [Topology(), Topology(tp=2, pp=2, ep=2), Topology(dp=2, ep=2), Topology(tp=2, dp=2, ep=4)]
RUNS = [
    *(("llama", topology) for topology in DENSE),
    *((name, topology) for name in ("llama-tied", "llama-fp8", "qwen3") for topology in DENSE[1:3]),
    *(("qwen3-moe", topology) for topology in SPARSE),
    *((name, topology) for name in ("qwen3-moe-fp8", "qwen3-moe-extras") for topology in SPARSE[1:3]),
]


def _numbered(config: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors with values that say where they are: unique integers, or bytes for FP8."""
    start = 1
    found: dict[str, torch.Tensor] = {}
    for name, value in checkpoint_tensors(config, 0):
        size = value.numel()
        if value.dtype == torch.float8_e4m3fn:
            found[name] = (torch.arange(size) * 7 % 0x70 + 1).to(torch.uint8).view(value.dtype).view(value.shape)
        else:
            found[name] = torch.arange(start, start + size, dtype=torch.float64).view(value.shape).to(value.dtype)
            start += size
    return found


def _load(config: Mapping[str, object], rank: Rank, weights: Mapping[str, torch.Tensor]) -> nn.Module:
    model = CausalLM(dict(config), ParallelContext(rank))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dtype == torch.float8_e4m3fn:
                parameter.data.view(torch.uint8).fill_(0x7F)
            else:
                parameter.fill_(-7)
        model.load_weights((name, value.clone()) for name, value in weights.items())
    return model


@pytest.mark.parametrize(("name", "topology"), RUNS, ids=str)
def test_every_rank_holds_what_its_manifest_says(name: str, topology: Topology, tmp_path: Path) -> None:
    config = CONFIGS[name]
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, config))
    engine = EmbeddedEngine(EngineOptions())
    sources = _numbered(config)
    assert set(sources) == set(checkpoint.names())
    read = {source: torch.zeros(value.nbytes, dtype=torch.bool) for source, value in sources.items()}
    for rank in engine.ranks(checkpoint, topology):
        result = build_rank(engine, checkpoint, rank)
        check(result.manifest, functools.partial(_load, config, rank), sources)
        masks = read_bytes(result.manifest, sources)
        for source, mask in masks.items():
            read[source] |= mask
            assert bool(mask.any()) == (source not in result.unused)
        fed = {
            write.tensor or f"{layer.name}.{application.tensor}"
            for layer in result.manifest.layers
            for application in layer.applications
            for write in application.writes
        }
        for layer in result.manifest.layers:
            for entry in layer.tensors:
                assert entry.kind == "buffer" or f"{layer.name}.{entry.name}" in fed or entry.alias is not None
    assert all(bool(mask.all()) for mask in read.values()), "an element of the checkpoint that no rank reads"
