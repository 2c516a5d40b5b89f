"""Time a reload through the contract against a plain `load_weights` into live tensors and against the copies alone.

    python benchmarks/reload.py                  # dense 1 GB and MoE 2.4 GB, bfloat16
    python benchmarks/reload.py --small          # a tenth of it

All figures are ratios to the copy limit: `copy_` of the same bytes, tensor by tensor, to memory that is warm. Rounds
are interleaved and the best of each is taken, so that other load on the machine hits all alike.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from probe_cli.checkpoint import Checkpoint, Source
from probe_cli.engines.base import EngineOptions
from probe_cli.engines.embedded import create
from probe_cli.model.dtypes import dtype_name
from probe_cli.probe import probe
from probe_cli.reload import ReloadSession
from probe_cli.reload.trial import realize
from probe_cli.topology import Rank

BASE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {
        **BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 20,
        "hidden_size": 1024, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8,
    },
    "moe": {
        **BASE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 12,
        "num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, layer by layer."""
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}"
        found[f"{prefix}.input_layernorm.weight"] = (hidden,)
        found[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            found[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, hidden)
        found[f"{prefix}.self_attn.o_proj.weight"] = (hidden, queries)
        if config["model_type"] == "llama":
            sizes = {f"{prefix}.mlp": config["intermediate_size"]}
        else:
            found[f"{prefix}.self_attn.q_norm.weight"] = (head,)
            found[f"{prefix}.self_attn.k_norm.weight"] = (head,)
            found[f"{prefix}.mlp.gate.weight"] = (config["num_experts"], hidden)
            size = config["moe_intermediate_size"]
            sizes = {f"{prefix}.mlp.experts.{expert}": size for expert in range(config["num_experts"])}
        for owner, size in sizes.items():
            found[f"{owner}.gate_proj.weight"] = (size, hidden)
            found[f"{owner}.up_proj.weight"] = (size, hidden)
            found[f"{owner}.down_proj.weight"] = (hidden, size)
    found["model.norm.weight"] = (hidden,)
    found["lm_head.weight"] = (config["vocab_size"], hidden)
    return found


def without_processing(model: torch.nn.Module) -> None:
    """What is measured is the loading; post-processing costs what it costs in each engine."""
    for module in model.modules():
        if hasattr(type(module), "process_weights_after_loading"):
            module.process_weights_after_loading = None  # type: ignore[assignment]


def measure(name: str, config: dict[str, Any], rounds: int, device: str) -> dict[str, Any]:
    """All figures of one model."""
    generator = torch.Generator().manual_seed(1)
    base = torch.rand(1 << 20, generator=generator).to(torch.bfloat16)
    weights: dict[str, torch.Tensor] = {}
    for source, shape in shapes_of(config).items():
        size = torch.Size(shape).numel()
        repeats = -(-size // base.numel())
        weights[source] = base.repeat(repeats)[:size].view(shape).to(device)
    checkpoint = Checkpoint(
        sources=tuple(Source(n, dtype_name(t.dtype), tuple(t.shape), t.nbytes) for n, t in weights.items()),
        kind="wire",
        config=config,
    )
    engine = create(EngineOptions())
    model = realize(engine.materialize(checkpoint, Rank()), device)
    manifest = probe(model, checkpoint, engine=engine)
    without_processing(model)
    with engine.loading(model):
        model.load_weights(iter(weights.items()))  # type: ignore[operator]
    warm = [torch.zeros_like(tensor) for tensor in weights.values()]

    def copies() -> None:
        for target, tensor in zip(warm, weights.values()):
            target.copy_(tensor)

    def plain() -> None:
        with engine.loading(model):
            model.load_weights(iter(weights.items()))  # type: ignore[operator]

    def through(session: ReloadSession) -> Callable[[], None]:
        def run() -> None:
            with session.update() as update:
                update.load_weights(weights.items())

        return run

    options: dict[str, dict[str, Any]] = {
        "in place": {"in_place": True},
        "staged": {},
        "staged, memory kept": {"keep_staging": True},
    }
    runs: dict[str, Callable[[], None]] = {"copy limit": copies, "plain load_weights": plain}
    sessions: dict[str, ReloadSession] = {}
    for label, chosen in options.items():
        sessions[label] = ReloadSession(
            model,
            manifest,
            loading=lambda: engine.loading(model),
            default_loaders=tuple(engine.default_loaders()),
            **chosen,
        )
        runs[label] = through(sessions[label])
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for label, run in runs.items():
            _settle(device)
            started = time.perf_counter()
            run()
            _settle(device)
            best[label] = min(best[label], time.perf_counter() - started)
    limit = best["copy limit"]
    applications = manifest.summary.applications
    for label, seconds in best.items():
        print(f"{name:6} {label:22} {seconds:8.3f} s  {seconds / limit:5.2f} x copy limit")
    last = sessions["staged"].receipt
    return {
        "model": name,
        "tensors": len(weights),
        "gigabytes": round(sum(t.nbytes for t in weights.values()) / 1e9, 3),
        "applications": applications,
        "seconds": {label: round(seconds, 4) for label, seconds in best.items()},
        "ratios": {label: round(seconds / limit, 3) for label, seconds in best.items()},
        "staging_peak": None if last is None else last.staging_peak,
    }


def overhead(rounds: int) -> dict[str, float]:
    """Microseconds for each application beyond what the plain load takes: CPU time of the loading thread, on a model
    so small that copies cost next to nothing. Steady state: what a call comes to has been remembered by earlier
    updates."""
    config = {**MODELS["moe"], "hidden_size": 16, "head_dim": 8, "moe_intermediate_size": 8, "vocab_size": 32}
    weights = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes_of(config).items()}
    sources = tuple(Source(n, dtype_name(t.dtype), tuple(t.shape), t.nbytes) for n, t in weights.items())
    checkpoint = Checkpoint(sources=sources, kind="wire", config=config)
    engine = create(EngineOptions())
    model = realize(engine.materialize(checkpoint, Rank()))
    manifest = probe(model, checkpoint, engine=engine)
    without_processing(model)
    best: dict[str, float] = {}
    for label, chosen in {"plain": None, "in place": {"in_place": True}, "staged": {}}.items():
        loaders = tuple(engine.default_loaders())
        session = None if chosen is None else ReloadSession(model, manifest, default_loaders=loaders, **chosen)
        for _ in range(rounds + 1):
            if session is None:
                started = time.thread_time()
                with engine.loading(model):
                    model.load_weights(iter(weights.items()))  # type: ignore[operator]
                seconds = time.thread_time() - started
            else:
                update = session.update()
                started = time.thread_time()
                update.load_weights(weights.items())
                seconds = time.thread_time() - started
                update.finish()
            best[label] = min(best.get(label, seconds), seconds)
    count = manifest.summary.applications
    found = {label: round((best[label] - best["plain"]) / count * 1e6, 2) for label in ("in place", "staged")}
    print(f"per application beyond a plain load, {count} of them: {found} us of CPU time")
    return found


def _settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def main() -> None:
    """Print a table, and with --json FILE write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--model", choices=[*MODELS, "none"], help="only this model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    per_application = overhead(max(arguments.rounds, 5))
    found = []
    for name, config in MODELS.items():
        if arguments.model not in (None, name):
            continue
        if arguments.small:
            config = {**config, "num_hidden_layers": max(config["num_hidden_layers"] // 10, 1)}
        found.append(measure(name, config, arguments.rounds, arguments.device))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            document: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads(), "models": found}
            document["microseconds_per_application"] = per_application
            json.dump(document, file, indent=2)


if __name__ == "__main__":
    main()
