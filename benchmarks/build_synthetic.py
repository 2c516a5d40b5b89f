"""A synthetic checkpoint of 100,000 tensors, built for 8 ranks with the embedded models: time, memory, size, read time.

    python benchmarks/build_synthetic.py [--experts 256] [--layers 130] [--ranks 8] [--jobs N]

The checkpoint is Qwen3-MoE's names and shapes; its files hold headers and holes, no weights.
"""

from __future__ import annotations

import argparse
import json
import resource
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from probe_cli.checkpoint import Checkpoint
from probe_cli.dtypes import DTYPE_BITS, numel
from probe_cli.engines.base import EngineOptions
from probe_cli.engines.registry import create_engine
from probe_cli.manifest import Bundle
from probe_cli.probe.pool import default_jobs
from probe_cli.probe.runner import build_bundle
from probe_cli.topology import Topology

HIDDEN, HEADS, KV_HEADS, HEAD, WIDTH, VOCABULARY = 2048, 32, 8, 128, 768, 151936
PER_FILE = 4096


def config(layers: int, experts: int) -> dict[str, object]:
    """config.json."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "head_dim": HEAD,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": WIDTH,
        "intermediate_size": WIDTH * 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
    }


def tensors(layers: int, experts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every source; 10 + 3 x experts to a layer."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for index in range(layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (HIDDEN,)
        yield f"{layer}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{layer}.self_attn.q_proj.weight", (HEADS * HEAD, HIDDEN)
        yield f"{layer}.self_attn.k_proj.weight", (KV_HEADS * HEAD, HIDDEN)
        yield f"{layer}.self_attn.v_proj.weight", (KV_HEADS * HEAD, HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD)
        yield f"{layer}.self_attn.q_norm.weight", (HEAD,)
        yield f"{layer}.self_attn.k_norm.weight", (HEAD,)
        yield f"{layer}.mlp.gate.weight", (experts, HIDDEN)
        for expert in range(experts):
            yield f"{layer}.mlp.experts.{expert}.gate_proj.weight", (WIDTH, HIDDEN)
            yield f"{layer}.mlp.experts.{expert}.up_proj.weight", (WIDTH, HIDDEN)
            yield f"{layer}.mlp.experts.{expert}.down_proj.weight", (HIDDEN, WIDTH)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def write(folder: Path, layers: int, experts: int) -> None:
    """Files of headers and holes, with an index and config.json."""
    everything = list(tensors(layers, experts))
    count = -(-len(everything) // PER_FILE)
    weight_map: dict[str, str] = {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, shape in everything[number * PER_FILE : (number + 1) * PER_FILE]:
            size = numel(shape) * DTYPE_BITS["BF16"] // 8
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
            weight_map[name] = file
        text = json.dumps(header, separators=(",", ":")).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + offset)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config(layers, experts)))


def run() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--layers", type=int, default=129)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--jobs", type=int)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, out = Path(scratch) / "checkpoint", Path(scratch) / "bundle"
        folder.mkdir()
        write(folder, arguments.layers, arguments.experts)
        start = time.perf_counter()
        checkpoint = Checkpoint.open(folder)
        opened = time.perf_counter()
        what = f"{len(checkpoint):,} sources, {checkpoint.nbytes / 1e9:,.0f} GB"
        print(f"checkpoint: {what}; opened in {opened - start:.2f} s")
        measure(checkpoint, Topology(tp=arguments.ranks, ep=arguments.ranks), arguments.jobs, out)


def measure(checkpoint: Checkpoint, topology: Topology, jobs: int | None, out: Path) -> None:
    """Build, write and read the bundle; print what each took."""
    ranks = topology.world_size
    start = time.perf_counter()
    built = build_bundle(create_engine("embedded", EngineOptions()), checkpoint, topology, jobs=jobs)
    wall = time.perf_counter() - start
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"built {ranks} ranks in {wall:.1f} s, {jobs or default_jobs(ranks)} at a time")
    phases = {name: sum(result.seconds[name] for result in built.results) / ranks for name in built.results[0].seconds}
    print("wall clock per rank: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items()))
    cpu = (usage.ru_utime + usage.ru_stime) / ranks
    print(f"CPU per rank: {cpu:.1f} s")
    print(f"peak memory of a worker: {max(result.peak_rss for result in built.results) / 1e9:.2f} GB")
    start = time.perf_counter()
    built.bundle.write(out)
    total = sum(file.stat().st_size for file in out.iterdir())
    print(
        f"written in {time.perf_counter() - start:.2f} s: {total / 1e6:.2f} MB, {total / ranks / 1e6:.2f} MB per rank"
    )
    start = time.perf_counter()
    bundle = Bundle.read(out)
    index = time.perf_counter()
    summary = bundle.manifest(ranks - 1).summary
    took = f"index {index - start:.2f} s, one rank {time.perf_counter() - index:.2f} s"
    print(f"read: {took} ({summary.applications:,} applications, {summary.declined:,} declined)")


if __name__ == "__main__":
    run()
