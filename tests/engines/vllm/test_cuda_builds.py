"""Builds on the CUDA wheel, without a device: a published model in full size, quantized layouts, the command itself, no network."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM's CUDA wheel")

from benchmarks.vllm_models import MODELS, write_headers
from probe_cli.checkpoint import Checkpoint
from probe_cli.engines.base import EngineOptions
from probe_cli.engines.vllm.engine import VllmEngine
from probe_cli.manifest import Bundle, Manifest
from probe_cli.probe.build import build_rank
from probe_cli.topology import Topology
from tests.engines.vllm.harness import in_child
from tests.engines.vllm.sweep.case import Case, Outcome
from tests.engines.vllm.sweep.cases import architecture_cases, special_cases
from tests.engines.vllm.sweep.runner import probe_case

pytestmark = pytest.mark.vllm_cuda

#: Of the sweep's cases: one for each way in which a layer's parameters are made.
SAMPLED = (
    "Llama block_fp8 with KV scales",
    "Llama compressed_w4a16",
    "Llama gptq",
    "Llama awq",
    "Qwen3-MoE compressed_fp8, EP2",
    "Qwen3-MoE online FP8, EP2",
    "GPT-OSS MXFP4, EP2",
    "Llama TP2 PP2",
    "DeepSeek-V3 block_fp8, MTP drafter",
)
#: A parameter that is made during the load (`lm_head.bias`), by code that names the device.
MADE_LATE = "PhiForCausalLM"
CASES: dict[str, Case] = {case.name: case for case in [*special_cases(), *architecture_cases([MADE_LATE])]}


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """vLLM, imported here once for an H100: each case runs in a fork of this process."""
    VllmEngine(EngineOptions(target="h100")).warm_up()
    import transformers  # noqa: F401


def refuse_sockets() -> None:
    """From now on this process cannot talk to anything."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"a socket was used: {args}")

    for name in ("bind", "connect", "connect_ex", "listen", "sendto"):
        setattr(socket.socket, name, refuse)
    socket.create_connection = socket.getaddrinfo = socket.socketpair = refuse  # type: ignore[assignment]


def build(
    folder: Path, topology: Topology, index: int, target: str = "h100", **options: Any
) -> tuple[Manifest, dict[str, str]]:
    engine = VllmEngine(EngineOptions(target=target, **options))
    checkpoint = Checkpoint.open(folder)
    ranks = engine.ranks(checkpoint, topology)
    result = build_rank(engine, checkpoint, ranks[index])
    return result.manifest, result.unused


# In full size


def _full_size(folder: Path) -> dict[str, Any]:
    refuse_sockets()
    torch.set_num_threads(1)  # torch's own pool of workers is no thread of the build's
    before = len(threads())
    checkpoint = Checkpoint.open(folder)
    engine = VllmEngine(EngineOptions(target="h100"))
    ranks = engine.ranks(checkpoint, Topology(tp=8, ep=8))
    result = build_rank(engine, checkpoint, ranks[3])
    summary = result.manifest.document.summary
    direct = [
        (layer.name, application.tensor)
        for layer in result.manifest.layers
        for application in layer.applications
        if application.direct or application.attribution != "storage"
    ]
    inexact = sum(
        not write.exact for layer in result.manifest.layers for entry in layer.applications for write in entry.writes
    )
    owned = {
        int(source.split(".experts.")[1].split(".")[0])
        for layer in result.manifest.layers
        for entry in layer.applications
        for source in entry.sources
        if ".mlp.experts." in source
    }
    index = Bundle.build(checkpoint, [result.manifest], [result.unused]).index
    return {
        "applications": summary.applications,
        "declined": summary.declined,
        "bytes_read": summary.bytes_read,
        "direct": direct,
        "inexact": inexact,
        "owned": sorted(owned),
        "skipped": sorted({name.split(".")[2] for name in index.unused.get("skipped", ())}),
        "reasons": sorted(index.unused),
        "peak_rss": result.peak_rss,
        "threads": len(threads()) - before,
        "again": Manifest.from_bytes(result.manifest.to_bytes()).digest == result.manifest.digest,
    }


def threads() -> list[str]:
    return [entry.name for entry in Path("/proc/self/task").iterdir()] if sys.platform == "linux" else []


def test_deepseek_v3_in_full_size(tmp_path: Path) -> None:
    """671 B parameters, TP8 + EP8: every one of a rank's writes is traced to its source and its destination."""
    tensors, nbytes = write_headers(MODELS["deepseek-v3"], tmp_path)
    assert (tensors, nbytes // 10**9) == (91_991, 688)
    found = in_child(_full_size, tmp_path)
    assert found["applications"] == 12_475
    assert found["declined"] == 77_952
    assert found["bytes_read"] == 85_140_130_848
    assert (found["direct"], found["inexact"]) == ([], 0), "every write is known by storage, element by element"
    assert found["owned"] == list(range(96, 128)), "rank 3 of 8 has the fourth 32 of 256 experts"
    assert found["skipped"] == ["61"], "the layer of the drafter, and nothing else"
    assert found["threads"] == 0
    assert found["peak_rss"] < 3 << 30
    assert found["again"]


# Quantized, spread, cut


def _case(name: str) -> Outcome:
    refuse_sockets()
    return probe_case(CASES[name])


@pytest.mark.parametrize("name", [*SAMPLED, MADE_LATE])
def test_sampled_cases_of_the_sweep(name: str) -> None:
    outcome = in_child(_case, name)
    assert (outcome.status, outcome.reason) == ("passed", "")
    assert outcome.applications > 15
    assert not outcome.unfed or "scale" in str(outcome.unfed), outcome.unfed


def _placement(strategy: str) -> list[int]:
    case = CASES["Qwen3-MoE TP2 EP2"]
    with tempfile.TemporaryDirectory() as folder:
        case.make(Path(folder))
        arguments = {"expert_placement_strategy": strategy, **case.arguments}
        manifest, _ = build(Path(folder), Topology(tp=2, ep=2), 1, arguments=arguments)
    return sorted(
        {
            int(source.split(".experts.")[1].split(".")[0])
            for layer in manifest.layers
            for entry in layer.applications
            for source in entry.sources
            if ".mlp.experts." in source
        }
    )


def test_experts_of_a_rank_are_consecutive() -> None:
    assert in_child(_placement, "linear") == list(range(8, 16))


# What is refused


def _small(folder: Path, **changes: Any) -> Path:
    """A Llama of one layer."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
        "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "hidden_act": "silu", **changes,
    }  # fmt: skip
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (512, 256),
        f"{layer}.input_layernorm.weight": (256,),
        f"{layer}.post_attention_layernorm.weight": (256,),
        f"{layer}.self_attn.q_proj.weight": (256, 256),
        f"{layer}.self_attn.k_proj.weight": (128, 256),
        f"{layer}.self_attn.v_proj.weight": (128, 256),
        f"{layer}.self_attn.o_proj.weight": (256, 256),
        f"{layer}.mlp.gate_proj.weight": (512, 256),
        f"{layer}.mlp.up_proj.weight": (512, 256),
        f"{layer}.mlp.down_proj.weight": (256, 512),
        "model.norm.weight": (256,),
        "lm_head.weight": (512, 256),
    }
    model = replace(
        MODELS["deepseek-v3"], config=config, tensors=lambda: ((name, "BF16", shape) for name, shape in shapes.items())
    )
    write_headers(model, folder)
    return folder


def _command(*arguments: str) -> tuple[int, str, str]:
    from probe_cli.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--target", "h1000"), 2, "no target 'h1000'; there are a100, l40s, h100"),
        (("--target", "cpu"), 2, "--target cpu: the installed vLLM 0.33.0 is the CUDA build"),
        (
            ("--target", "h100", "--arg", "quantisation=fp8"),
            2,
            "no engine argument of that name; did you mean quantization?",
        ),
        (("--target", "h100", "--arg", "tensor-parallel-size=2"), 2, "tensor_parallel_size: set by --tp"),
        (("--target", "h100", "--arg", "load-format=gguf"), 2, "does not load layer by layer"),
        (("--target", "h100", "--tp", "4", "--ep", "2"), 2, "ep is 1 or 4, not 2"),
        (("--target", "h100", "--role", "draft"), 2, "--role draft needs a speculative configuration"),
        (("--target", "h100", "--tp", "3"), 3, "must be divisible by tensor parallel size (3)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_refused_in_one_line(tmp_path: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    _small(tmp_path / "checkpoint")
    out = tmp_path / "manifests"
    found, stdout, stderr = in_child(
        _command, "build", str(tmp_path / "checkpoint"), "--engine", "vllm", *arguments, "-o", str(out)
    )
    assert (found, stdout) == (code, "")
    assert said in " ".join(stderr.split())
    assert "Traceback" not in stderr
    assert not out.exists()


def _logged(folder: Path, when: str) -> None:
    from vllm.logger import init_logger
    from vllm.model_executor.models import llama

    original: Callable[..., Any] = getattr(llama.LlamaForCausalLM, when)

    @functools.wraps(original)
    def complaining(self: Any, *args: Any, **kwargs: Any) -> Any:
        init_logger("vllm.somewhere").error("no kernel for\n this device")
        return original(self, *args, **kwargs)

    setattr(llama.LlamaForCausalLM, when, complaining)
    build(folder, Topology(), 0)


@pytest.mark.parametrize(("when", "what"), [("__init__", "building"), ("load_weights", "loading")])
def test_an_error_that_is_only_logged_fails_the_build(tmp_path: Path, when: str, what: str) -> None:
    _small(tmp_path)
    with pytest.raises(AssertionError) as caught:
        in_child(_logged, tmp_path, when)
    assert "EngineError: vLLM logged an error while " + what in str(caught.value)
    assert "vllm.somewhere: no kernel for this device" in str(caught.value)


# The command


def _bundle(folder: Path, out: Path) -> tuple[int, str, str]:
    refuse_network()
    return _command(
        "build", str(folder), "--engine", "vllm", "--target", "h100", "--tp", "2", "--jobs", "2", "--verify", "-o", str(out),
        "--arg", "quantization=fp8", "--arg", "gpu-memory-utilization=0.5",
    )  # fmt: skip


def refuse_network() -> None:
    """The pool talks to its workers over pipes or socket pairs; nothing may talk to anything else."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"the network was used: {args}")

    for name in ("bind", "connect", "connect_ex", "listen", "sendto"):
        setattr(socket.socket, name, refuse)
    socket.create_connection = socket.getaddrinfo = refuse  # type: ignore[assignment]


def test_the_command_writes_a_bundle_that_says_what_it_was_built_for(tmp_path: Path) -> None:
    folder, out = _small(tmp_path / "checkpoint"), tmp_path / "manifests"
    code, _, stderr = in_child(_bundle, folder, out)
    assert code == 0, stderr
    bundle = Bundle.read(out)
    engine = bundle.index.engine
    assert (engine.name, engine.target, engine.emulated) == ("vllm", "h100", True)
    assert engine.arguments == {"quantization": "fp8"}, "what steers serving alone is left out"
    assert (bundle.index.unused, bundle.index.unfed) == ({}, {})
    assert [entry.rank.tp for entry in bundle.index.ranks] == [0, 1]
    query = next(
        application
        for layer in bundle.manifest(1).layers
        for application in layer.applications
        if application.sources == ("model.layers.0.self_attn.q_proj.weight",)
    )
    assert query.selectors == {"loaded_shard_id": "q"}
    assert str(tmp_path).encode() not in bundle.manifest(0).to_bytes(), "no path of this host"


def _built(folder: Path, out: Path, *arguments: str) -> tuple[int, str, str]:
    refuse_network()
    return _command(
        "build", str(folder), "--engine", "vllm", "--target", "h100", "--tp", "2", *arguments, "-o", str(out)
    )


def test_workers_side_by_side_make_what_one_makes(tmp_path: Path) -> None:
    """However the ranks are shared out, the files of a bundle are the same, byte for byte."""
    CASES["Qwen3-MoE TP2 EP2"].make(tmp_path / "checkpoint")
    files = []
    for jobs in ("1", "2"):
        out = tmp_path / f"jobs{jobs}"
        code, _, stderr = in_child(_built, tmp_path / "checkpoint", out, "--ep", "--jobs", jobs)
        assert code == 0, stderr
        files.append({file.name: file.read_bytes() for file in sorted(out.iterdir())})
    assert len(files[0]) >= 3, "an index and two ranks"
    assert files[0] == files[1]


def _reprobed(bundle: Path, folder: Path, changed: bool) -> tuple[int, str, str]:
    refuse_network()
    if changed:
        from vllm.model_executor.layers.linear import MergedColumnParallelLinear as Merged

        original = Merged.weight_loader_v2

        def crossed(self: Any, param: Any, loaded_weight: Any, loaded_shard_id: Any = None) -> None:
            original(self, param, loaded_weight, 1 - loaded_shard_id)

        Merged.weight_loader_v2 = crossed  # type: ignore[method-assign]
    return _command("check", str(bundle), str(folder), "--engine", "vllm", "--reprobe", "--format", "json")


def test_reprobing_finds_an_engine_that_routes_otherwise(tmp_path: Path) -> None:
    """An upgrade that puts the gate's weight where the up projection's was: no name, shape or count tells."""
    folder, bundle = _small(tmp_path / "checkpoint"), tmp_path / "manifests"
    code, _, stderr = in_child(_built, folder, bundle)
    assert code == 0, stderr
    code, stdout, stderr = in_child(_reprobed, bundle, folder, False)
    assert (code, json.loads(stdout)["findings"]) == (0, []), stderr
    code, stdout, stderr = in_child(_reprobed, bundle, folder, True)
    assert code == 1, stderr
    findings = [finding for manifest in json.loads(stdout)["manifests"] for finding in manifest["findings"]]
    assert [(found["code"], found["subject"], found["ranks"]) for found in findings] == [
        ("PM401", f"model.layers.0.mlp.{part}_proj.weight", [0, 1]) for part in ("gate", "up")
    ]
    assert all("another offset" in found["what"] for found in findings)


def test_auto_needs_a_device(tmp_path: Path) -> None:
    """In a process of its own: here one is emulated."""
    _small(tmp_path)
    code = "from probe_cli.cli.main import run; run()"
    command = [sys.executable, "-c", code, "build", str(tmp_path), "--engine", "vllm", "--target", "auto"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--target auto: there is no CUDA device here" in done.stderr
