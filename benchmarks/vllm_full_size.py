"""Build the manifests of all ranks of models in full size, without their weights and without a GPU.

    PYTHONPATH=. PYTHON-WITH-VLLM benchmarks/vllm_full_size.py [MODEL ...] [--jobs N] [--ranks 0-3]

Prints one line for each model: ranks, tensors, the weights that the headers stand for, seconds, memory per worker, and what
the bundle takes on disk. The seconds (by the clock, and of all processes' CPU time) are those of the whole command, vLLM's
import included.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.vllm_models import MODELS, write_headers

__all__ = ["main"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--ranks", help="these ranks only, e.g. 0-3")
    options = parser.parse_args()
    unknown = set(options.models) - MODELS.keys()
    if unknown:
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    for name in options.models or MODELS:
        _run(name, options.jobs, options.ranks)
    return 0


def _run(name: str, jobs: str, ranks: str | None) -> None:
    model = MODELS[name]
    with tempfile.TemporaryDirectory() as root:
        checkpoint, out = Path(root, "checkpoint"), Path(root, "manifests")
        tensors, nbytes = write_headers(model, checkpoint)
        command = [sys.executable, "-m", "probe_cli", "build", str(checkpoint), "--engine", "vllm", "--target"]
        command += [model.target, *model.flags, "--jobs", jobs, "-o", str(out), "--format", "json"]
        command += ["--ranks", ranks] if ranks else []
        start, before = time.perf_counter(), _cpu_seconds()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        seconds, cpu = time.perf_counter() - start, _cpu_seconds() - before
        if done.returncode:
            raise SystemExit(f"{name}: build ended with exit code {done.returncode}")
        document = json.loads(done.stdout)
        size = sum(file.stat().st_size for file in out.iterdir())
        peak = max(entry.get("peak_rss", 0) for entry in document.get("built", document["ranks"]))
        print(
            f"{name}: {len(document['ranks'])} of {model.ranks} ranks, {tensors:,} tensors, {nbytes / 1e9:,.0f} GB of "
            f"weights, {seconds:.1f} s ({cpu:.1f} s of CPU time), {peak / 1e9:.2f} GB per worker, bundle {size / 1e6:.2f} MB",
            flush=True,
        )


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
