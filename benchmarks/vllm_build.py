"""What recording costs over a bare load on meta, and what eight ranks cost over one: DeepSeek-V3 in full size.

    PYTHONPATH=. PYTHON-WITH-VLLM benchmarks/vllm_build.py [MODEL] [--rank N] [--repeat N] [--no-build]

Every figure of a run comes from the same machine in the same minutes; compare the ratios. "Bare" is the model's own
`load_weights` on the same stand-ins with writes suppressed and nothing recorded: less is not possible with this code. CPU
seconds say more than wall clock where others use the machine too.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.vllm_models import MODELS, PublishedModel, write_headers
from probe_cli.checkpoint import Checkpoint
from probe_cli.engines.base import EngineOptions
from probe_cli.engines.vllm.engine import VllmEngine
from probe_cli.probe.document import manifest_of
from probe_cli.probe.replay import replay, stand_in
from probe_cli.topology import Rank, Topology

__all__ = ["main"]


class Suppressed(TorchDispatchMode):
    """Copies into the model are not carried out; nothing else is done."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="deepseek-v3", choices=list(MODELS))
    parser.add_argument("--rank", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--no-build", action="store_true", help="only recording against the bare load")
    options = parser.parse_args()
    model = MODELS[options.model]
    with tempfile.TemporaryDirectory() as folder:
        write_headers(model, Path(folder))
        print(f"{options.model}: load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        compare_recording(model, folder, options.rank, options.repeat)
        if not options.no_build:
            compare_ranks(model, folder, options.jobs)
    return 0


def compare_recording(model: PublishedModel, folder: str, index: int, repeat: int) -> None:
    """Print the phases of one rank, and recording over bare."""
    engine = VllmEngine(EngineOptions(target=model.target))
    with _timed() as importing:
        engine.warm_up()
    checkpoint = Checkpoint.open(folder)
    with _timed() as configuring:
        rank = engine.ranks(checkpoint, _topology(model))[index]
    print(f"  import {importing}, configuration {configuring}")
    bare, recorded = [], []
    for _ in range(repeat):
        bare.append(_in_child(lambda: _bare(engine, checkpoint, rank)))
        recorded.append(_in_child(lambda: _recorded(engine, checkpoint, rank)))
    for phase in recorded[0]:
        seconds = median(run[phase][1] for run in recorded)
        print(f"  {phase}: {seconds:.2f} s CPU")
    over = median(run["replay"][1] for run in recorded) / median(run["bare replay"][1] for run in bare)
    print(f"  bare replay: {median(run['bare replay'][1] for run in bare):.2f} s CPU; recording over bare: {over:.2f}x")


def compare_ranks(model: PublishedModel, folder: str, jobs: int) -> None:
    """Print whole commands: one rank, all ranks."""
    one = _build(model, folder, jobs, "0")
    every = _build(model, folder, jobs, None)
    for name, (seconds, cpu, peak) in (("1 rank", one), (f"{model.ranks} ranks", every)):
        print(f"  build of {name}: {seconds:.1f} s, {cpu:.1f} s CPU, {peak / 1e9:.2f} GB per worker at most")
    print(f"  {model.ranks} ranks over 1: {every[0] / one[0]:.1f}x wall clock, {every[1] / one[1]:.1f}x CPU")


def _build(model: PublishedModel, folder: str, jobs: int, ranks: str | None) -> tuple[float, float, int]:
    command = [sys.executable, "-m", "probe_cli", "build", folder, "--engine", "vllm", "--target", model.target]
    command += [*model.flags, "--jobs", str(jobs), "--format", "json", *(["--ranks", ranks] if ranks else [])]
    before, start = _children(), time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds, cpu = time.perf_counter() - start, _children() - before
    return seconds, cpu, max(entry["peak_rss"] for entry in json.loads(done.stdout)["ranks"])


def _bare(engine: VllmEngine, checkpoint: Checkpoint, rank: Rank) -> dict[str, tuple[float, float]]:
    model = engine.materialize(checkpoint, rank)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for source in checkpoint.sources:
            yield source.name, stand_in(source.name, source.dtype, source.shape)

    with _timed() as elapsed, engine.loading(model), Suppressed():
        engine.load_weights(model, stream())
    return {"bare replay": elapsed.both}


def _recorded(engine: VllmEngine, checkpoint: Checkpoint, rank: Rank) -> dict[str, tuple[float, float]]:
    with _timed() as materializing:
        model = engine.materialize(checkpoint, rank)
    with _timed() as replaying:
        recording = replay(model, checkpoint, engine, restore=False)
    with _timed() as writing:
        manifest_of(recording, checkpoint, rank, engine.identity, type(model).__name__)
    return {"model": materializing.both, "replay": replaying.both, "document": writing.both}


class _timed:  # noqa: N801
    """Wall clock and CPU seconds of a block."""

    def __enter__(self) -> _timed:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *args: object) -> None:
        self.both = (time.perf_counter() - self._wall, time.process_time() - self._cpu)

    def __str__(self) -> str:
        return f"{self.both[0]:.1f} s ({self.both[1]:.1f} s CPU)"


def _topology(model: PublishedModel) -> Topology:
    sizes = {"tp": 1, "pp": 1, "dp": 1}
    flags = list(model.flags)
    for name in sizes:
        if f"--{name}" in flags:
            sizes[name] = int(flags[flags.index(f"--{name}") + 1])
    return Topology(**sizes, ep=sizes["tp"] * sizes["dp"] if "--ep" in flags else 1)


def _in_child(function: Callable[[], Any]) -> Any:
    """A process can be only one rank."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    if os.fork() == 0:
        try:
            os.write(writing, pickle.dumps(function()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.wait()
    return pickle.loads(data)


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
