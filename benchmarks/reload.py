"""Time a reload through the contract against a plain `load_weights` into live tensors and against the copies alone.

    python benchmarks/reload.py                  # dense 1 GB and MoE 2.4 GB, bfloat16
    python benchmarks/reload.py --small          # a tenth of it
    python benchmarks/reload.py --record         # and write the figures to benchmarks/RESULTS.md

All figures are ratios to the copy limit: `copy_` of the same bytes, tensor by tensor, to memory that is warm. Rounds
are interleaved and the best of each is taken, so that other load on the machine hits all alike. CPU time is that of
the whole process; on a busy machine its ratios say more than those of the clock.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
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

RESULTS = Path(__file__).parent / "RESULTS.md"
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

    def session(**chosen: bool) -> ReloadSession:
        loaders = tuple(engine.default_loaders())
        return ReloadSession(model, manifest, loading=lambda: engine.loading(model), default_loaders=loaders, **chosen)  # type: ignore[arg-type]

    staged = session(keep_staging=True)
    warm_runs = {"in place": through(session(in_place=True)), "staged": through(staged)}
    first: list[ReloadSession] = []

    def fresh() -> Callable[[], None]:
        for used in first:
            used.close()
        first[:] = [session()]
        return through(first[0])

    prepared: dict[str, Callable[[], Callable[[], None]]] = {
        "copy limit": lambda: copies,
        "plain load_weights": lambda: plain,
        "in place": lambda: warm_runs["in place"],
        "staged": lambda: warm_runs["staged"],
        "staged, first update": fresh,
    }
    best = dict.fromkeys(prepared, float("inf"))
    cpu = dict.fromkeys(prepared, float("inf"))
    for _ in range(rounds):
        for label, prepare in prepared.items():
            run = prepare()
            _settle(device)
            started, worked = time.perf_counter(), time.process_time()
            run()
            _settle(device)
            best[label] = min(best[label], time.perf_counter() - started)
            cpu[label] = min(cpu[label], time.process_time() - worked)
    for label, seconds in best.items():
        print(
            f"{name:6} {label:22} {seconds:8.3f} s  {seconds / best['copy limit']:5.2f} x copy limit"
            f"  {cpu[label]:8.3f} s of CPU time  {cpu[label] / cpu['copy limit']:5.2f} x"
        )
    last = staged.receipt
    return {
        "model": name,
        "tensors": len(weights),
        "gigabytes": round(sum(t.nbytes for t in weights.values()) / 1e9, 3),
        "applications": manifest.summary.applications,
        "seconds": {label: round(seconds, 4) for label, seconds in best.items()},
        "ratios": {label: round(seconds / best["copy limit"], 3) for label, seconds in best.items()},
        "cpu_seconds": {label: round(seconds, 4) for label, seconds in cpu.items()},
        "cpu_ratios": {label: round(seconds / cpu["copy limit"], 3) for label, seconds in cpu.items()},
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


MEANINGS = {
    "copy limit": "`copy_` of every tensor to warm memory: no reload can be faster that copies each tensor",
    "plain load_weights": "the model's own loading code into live tensors, untracked: what is above 1 is its routing and slicing",
    "in place": "tracked, straight into live tensors; the difference to the plain load is tracking, audit and receipt",
    "staged": "tracked, into staging memory (warm) and from there into live tensors: each byte is copied twice",
    "staged, first update": "the first of a session: the system has yet to give its staging memory, and no call is remembered",
}
TARGETS = {"in place": 1.3, "staged": 2.2}


def section(models: list[dict[str, Any]], per_application: dict[str, float], rounds: int) -> str:
    """Markdown of one run."""
    lines = [
        f"{datetime.date.today()}, torch {torch.__version__}, threads of torch: {torch.get_num_threads()}, best of "
        f"{rounds} interleaved rounds, load average of the machine {os.getloadavg()[0]:.1f} (1 is this benchmark). "
        "`python benchmarks/reload.py --record`.",
        "",
        "Ratios are to the copy limit of the same run, by the clock and by the process's CPU time.",
    ]
    for model in models:
        peak = model["staging_peak"] / 1e6
        lines += [
            "",
            f"**{model['model']}**: {model['gigabytes']} GB bfloat16, {model['tensors']} tensors, "
            f"{model['applications']} applications; staging peak {peak:.0f} MB.",
            "",
            "| | seconds | ratio | CPU seconds | ratio | target |",
            "|---|---|---|---|---|---|",
        ]
        for label, seconds in model["seconds"].items():
            ratio, cpu = model["ratios"][label], model["cpu_ratios"][label]
            target = f"under {TARGETS[label]}" if label in TARGETS else ""
            cells = [
                label,
                f"{seconds:.3f}",
                f"{ratio:.2f}",
                f"{model['cpu_seconds'][label]:.3f}",
                f"{cpu:.2f}",
                target,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "What the rows mean:", "", *(f"- {label}: {text}." for label, text in MEANINGS.items())]
    figures = ", ".join(f"{value} µs {label}" for label, value in per_application.items())
    lines += [
        "",
        f"Per application beyond a plain load, CPU time of the loading thread, copies of next to nothing: {figures} "
        "(target: under 10).",
        "Staged includes getting memory for a layer, publishing it and giving the memory back.",
    ]
    return "\n".join(lines)


def record(path: Path, title: str, text: str) -> None:
    """Put a section into a Markdown file, in place of the one of the same title."""
    start = "# Results\n\nWhat `benchmarks/` measured, with date and kind of machine. Each section is written by its script.\n"
    document = path.read_text("utf-8") if path.exists() else start
    head, *sections = document.split("\n## ")
    kept = [part.strip() for part in sections if part.splitlines()[0] != title]
    path.write_text("\n\n## ".join([head.strip(), *kept, f"{title}\n\n{text}"]) + "\n", "utf-8")


def _host() -> str:
    return f"{os.cpu_count()}-core {platform.machine()} machine, no GPU"


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
    parser.add_argument("--threads", type=int, help="of torch, within an operator")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--record", action="store_true", help="rewrite this machine's section of benchmarks/RESULTS.md")
    parser.add_argument("--machine", metavar="TEXT", help="what kind of machine it is, for --record")
    arguments = parser.parse_args()
    if arguments.record and (arguments.small or arguments.model):
        parser.error("--record takes both models in full size")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    per_application = overhead(max(arguments.rounds, 60))
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
    if arguments.record:
        gpu = arguments.device != "cpu"
        machine = arguments.machine or (torch.cuda.get_device_name(arguments.device) if gpu else _host())
        record(RESULTS, f"Reload: {machine}", section(found, per_application, arguments.rounds))


if __name__ == "__main__":
    main()
