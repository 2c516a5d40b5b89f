"""On a CUDA device: addresses under a captured graph, memory within the budget, spills, abort. `make test-cuda` runs
this file.

One process, no download, under a minute. Prints what it measures, so that the figures can be written down.
"""

from __future__ import annotations

import time

import pytest
import torch

from probe_cli.engines.base import EngineOptions
from probe_cli.engines.embedded import create
from probe_cli.engines.embedded.checkpoints import checkpoint_tensors, preset
from probe_cli.engines.embedded.model import CausalLM, default_weight_loader
from probe_cli.errors import IncompleteUpdate
from probe_cli.probe import probe
from probe_cli.reload import ColdLoad, ReloadSession
from tests.reload.models import Weights, checkpoint_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _cold(config: dict[str, object], weights: Weights) -> tuple[CausalLM, ColdLoad, ReloadSession]:
    with torch.device("cuda"):
        model = CausalLM(config)
    manifest = probe(model, checkpoint_of(weights), engine=create(EngineOptions()))
    with torch.no_grad():
        model.load_weights(iter(weights.items()))
    cold = ColdLoad(model)
    cold.loaded(manifest)
    cold.process()
    session = ReloadSession(model, manifest, cold=cold, default_loaders=(default_weight_loader,), poison=True)
    return model, cold, session


def _tensors(config: dict[str, object], seed: int) -> Weights:
    return {name: tensor.cuda() for name, tensor in checkpoint_tensors(config, seed)}


def _state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[n].view(torch.uint8), right[n].view(torch.uint8)) for n in left
    )


def test_a_captured_graph_shows_the_new_values() -> None:
    config = preset("llama")
    a, b = _tensors(config, 1), _tensors(config, 2)
    model, _, session = _cold(config, a)
    expected, _, _ = _cold(config, b)
    tokens = torch.arange(8, device="cuda").unsqueeze(0)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(tokens)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(tokens)
        graph.replay()
        old = logits.clone()
        with session.update() as update:
            update.load_weights(b.items())
        graph.replay()
        torch.cuda.synchronize()
        assert not torch.equal(logits, old)
        assert torch.equal(logits, expected(tokens))


@pytest.mark.parametrize("order", ["layers", "worst"])
@pytest.mark.parametrize("commit", ["layer", "model"])
def test_memory_stays_within_the_budget_and_spills_come_back(order: str, commit: str) -> None:
    config = preset("qwen3-moe-extras", hidden_size=256, moe_intermediate_size=256, num_hidden_layers=6)
    a, b = _tensors(config, 1), _tensors(config, 2)
    model, cold, _ = _cold(config, a)
    expected = _state(_cold(config, b)[0])
    manifest = probe(model, checkpoint_of(a), engine=create(EngineOptions()))
    session = ReloadSession(
        model,
        manifest,
        cold=cold,
        default_loaders=(default_weight_loader,),
        commit="model" if commit == "model" else "layer",
    )
    names = sorted(b, key=lambda name: name.split(".")[-2:]) if order == "worst" else list(b)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    started = time.perf_counter()
    with session.update() as update:
        update.load_weights((name, b[name]) for name in names)
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before
    receipt = update.receipt
    assert receipt is not None and receipt.staging_peak <= receipt.staging_budget
    largest = max(unit.nbytes for unit in session.units)
    # Beside staging: what post-processing itself allocates, at most one copy of the layer that it is at, and joined
    # sources.
    assert used <= receipt.staging_budget + 2 * largest
    assert _equal(_state(model), expected)
    seconds = time.perf_counter() - started
    print(f"{order} {commit}: {used / 1e6:.1f} MB used, budget {receipt.staging_budget / 1e6:.1f} MB, {seconds:.3f} s")
    print(receipt.line())


def test_a_failure_leaves_the_old_weights() -> None:
    config = preset("llama")
    a, b = _tensors(config, 1), _tensors(config, 2)
    model, cold, plain = _cold(config, a)
    session = ReloadSession(
        model, plain.manifest, cold=cold, default_loaders=(default_weight_loader,), commit="model", poison=True
    )
    before = _state(model)
    lost = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(IncompleteUpdate, match="up_proj"), session.update() as update:
        update.load_weights((name, tensor) for name, tensor in b.items() if name != lost)
    assert _equal(_state(model), before) and session.state == "ready"


def test_copies_overlap_with_loading() -> None:
    """Kernels of the side stream lie within the span of the main one's."""
    from torch.profiler import ProfilerActivity, profile

    config = preset("qwen3-moe", hidden_size=512, moe_intermediate_size=512, num_hidden_layers=8)
    a, b = _tensors(config, 1), _tensors(config, 2)
    model, cold, plain = _cold(config, a)
    hooked = max(unit.nbytes for unit in plain.units if unit.hooked)
    session = ReloadSession(
        model, plain.manifest, cold=cold, default_loaders=(default_weight_loader,), staging_bytes=hooked, commit="model"
    )
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen, session.update() as update:
        update.load_weights(b.items())
    assert update.receipt is not None and update.receipt.spills > 0
    copies = [event for event in seen.events() if "Memcpy DtoH" in event.name or "Memcpy HtoD" in event.name]
    assert copies
    print(f"{len(copies)} spill copies, {sum(event.device_time for event in copies):.0f} us")
