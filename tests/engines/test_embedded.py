"""The embedded family loads real checkpoints for every rank, and computes what transformers computes from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from probe_cli import Checkpoint, Topology
from probe_cli.engines.base import EngineOptions
from probe_cli.engines.embedded import create
from probe_cli.engines.embedded.checkpoints import PRESETS, checkpoint_tensors, preset, write_checkpoint
from probe_cli.engines.embedded.model import CausalLM, process_weights
from probe_cli.engines.embedded.parallel import LocalGroup, ParallelContext
from probe_cli.errors import UsageError
from probe_cli.topology import Rank

TOKENS = torch.arange(12).reshape(1, 12) * 7 % 250


def loaded(config: dict, context: ParallelContext | None = None, *, seed: int = 1) -> CausalLM:
    model = CausalLM(config, context)
    model.load_weights(iter(checkpoint_tensors(config, seed)))
    process_weights(model)
    return model


def sparse(name: str) -> bool:
    return "num_experts" in PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tp", [2, 4])
def test_sharded_forward_equals_single_rank(name: str, tp: int) -> None:
    config = preset(name)
    topology = Topology(tp=tp, ep=2 if sparse(name) else 1)
    group = LocalGroup(tp)
    models = [loaded(config, ParallelContext(rank, group.member(rank.tp))) for rank in topology.ranks()]
    outputs = group.run([lambda model=model: model(TOKENS) for model in models])
    expected = loaded(config)(TOKENS)
    assert expected.std() > 0.5  # decisive logits: a misplaced shard would show
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3", "qwen3-moe"])
def test_forward_equals_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_checkpoint(tmp_path, preset(name), seed=1)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(TOKENS).logits
    torch.testing.assert_close(loaded(preset(name))(TOKENS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_is_what_transformers_would_name(name: str, tmp_path: Path) -> None:
    """The checkpoint is loaded whole: no tensor of it is unknown to the model, no parameter is left without one."""
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, preset(name)))
    model = CausalLM(preset(name))
    known = model.load_weights((s.name, torch.zeros(s.shape)) for s in checkpoint.sources)
    assert known == {source.name for source in checkpoint.sources}


def test_two_seeds_differ_in_every_tensor() -> None:
    a, b = (dict(checkpoint_tensors(preset("qwen3-moe-extras"), seed)) for seed in (1, 2))
    assert a.keys() == b.keys()
    assert not [name for name in a if torch.equal(a[name], b[name])]


def test_pipeline_stages_own_only_their_layers() -> None:
    config = preset("qwen3-moe", num_hidden_layers=4)
    first, last = (CausalLM(config, ParallelContext(rank)) for rank in Topology(pp=2).ranks())
    assert list(first.model.layers) == ["0", "1"]
    assert list(last.model.layers) == ["2", "3"]
    assert hasattr(first.model, "embed_tokens") and not hasattr(first, "lm_head")
    assert hasattr(last, "lm_head") and not hasattr(last.model, "embed_tokens")


def test_experts_are_declined_by_return_value_and_by_silence() -> None:
    config = preset("qwen3-moe")
    model = CausalLM(config, ParallelContext(Topology(tp=2, ep=2).rank(1)))
    experts = model.model.layers["0"].mlp.experts
    tensor = torch.ones(32, 64)
    before = experts.w13.clone()
    assert experts.weight_loader(experts.w13, tensor, "w", shard_id="w1", expert_id=0, return_success=True) is False
    assert experts.weight_loader(experts.w13, tensor, "w", shard_id="w1", expert_id=0) is None
    assert torch.equal(experts.w13, before)
    assert experts.weight_loader(experts.w13, tensor, "w", shard_id="w1", expert_id=4, return_success=True) is True
    assert torch.equal(experts.w13[0, :32], tensor)


def test_post_processing_of_experts_is_not_idempotent() -> None:
    """Doing it twice undoes it: a reload must start from the checkpoint's layout each time (case 20)."""
    model = loaded(preset("qwen3-moe"))
    experts = model.model.layers["0"].mlp.experts
    once = experts.w13.clone()
    experts.process_weights_after_loading()
    assert not torch.equal(experts.w13, once)


@pytest.mark.parametrize(
    ("changes", "topology", "message"),
    [
        ({"model_type": "gpt2"}, Topology(), "do not know model_type 'gpt2'"),
        ({}, Topology(tp=3), "4 attention heads cannot be spread over tp=3"),
        ({}, Topology(pp=3), "2 layers cannot be spread over pp=3"),
        ({}, Topology(tp=2, ep=2), "a llama model has no experts"),
    ],
)
def test_impossible_topologies_are_refused(changes: dict, topology: Topology, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CausalLM(preset("llama", **changes), ParallelContext(Rank(topology=topology)))


def test_materialized_on_meta_without_memory(tmp_path: Path) -> None:
    config = preset("llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=4, num_attention_heads=64)
    config |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "torch_dtype": "bfloat16"}
    (tmp_path / "names.json").write_text('[{"name": "model.norm.weight", "dtype": "BF16", "shape": [8192]}]')
    checkpoint = Checkpoint.from_wire(tmp_path / "names.json", config=config)
    model = create(EngineOptions()).materialize(checkpoint, Topology(tp=8).rank(5))
    heavy = [name for name, p in model.named_parameters() if p.device.type != "meta" and p.numel() > 1 << 16]
    assert heavy == []
    assert model.lm_head.weight.shape == (16064, 8192)
    assert model.lm_head.weight.dtype == torch.bfloat16
