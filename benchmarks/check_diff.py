"""check and diff of bundles of DeepSeek-V3's size: 91,991 sources, 8 ranks, whole processes, time and peak memory.

`python benchmarks/check_diff.py [FOLDER]`; the inputs are made once and kept in FOLDER (default: benchmarks/out).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import deepseek_sized  # noqa: E402

from probe_cli.checkpoint import Checkpoint  # noqa: E402
from probe_cli.manifest import Bundle  # noqa: E402
from probe_cli.manifest.schema import Layer, View, Write  # noqa: E402
from probe_cli.topology import Rank  # noqa: E402

_RUNS = 5
_CHILD = """
import sys, time
from probe_cli.cli.main import leave, main
code = main(sys.argv[2:])
# The peak of this program alone: getrusage would count the parent it was forked from.
peak = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
with open(sys.argv[1], "w") as out:
    print(peak[0] if peak else 0, time.process_time(), file=out)
leave(code)
"""


def measured(*arguments: str) -> tuple[float, float, float, int]:
    """Median seconds and processor seconds of a whole process, peak memory in MB, exit code."""
    seconds: list[float] = []
    busy: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        for _ in range(_RUNS):
            started = time.perf_counter()
            command = [sys.executable, "-c", _CHILD, str(result), *arguments]
            done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
            seconds.append(time.perf_counter() - started)
            peak, cpu = result.read_text().split()
            busy.append(float(cpu))
    return statistics.median(seconds), statistics.median(busy), int(peak) / 1024, done.returncode


def prepare(folder: Path) -> None:
    """checkpoint/, less/ (58 experts' shards renamed), bundle/, some/ and all/ (contracts that differ)."""
    if (folder / "all" / "bundle.json.gz").exists():
        return
    checkpoint = deepseek_sized.write_checkpoint(folder / "checkpoint")
    bundle = deepseek_sized.bundle(checkpoint)
    bundle.write(folder / "bundle")
    names = [s for s in checkpoint.sources if not s.name.endswith("down_proj.weight") or ".experts." not in s.name]
    (folder / "less.json").write_bytes(
        msgspec.json.encode([{"name": s.name, "dtype": s.dtype, "shape": s.shape} for s in names])
    )
    rows = [{"name": s.name.removeprefix("model."), "dtype": s.dtype, "shape": s.shape} for s in checkpoint.sources]
    (folder / "renamed.json").write_bytes(msgspec.json.encode(rows))
    changed(checkpoint, lambda layer: layer.class_name != "FusedMoE").write(folder / "some")
    changed(checkpoint, lambda layer: True).write(folder / "all")


def changed(checkpoint: Checkpoint, wanted: Callable[[Layer], bool]) -> Bundle:
    """The bundle with other regions in the layers that are wanted."""
    original = deepseek_sized.rank_layers

    def edited(rank: Rank) -> tuple[Layer, ...]:
        return tuple(_shifted(layer) if wanted(layer) else layer for layer in original(rank))

    deepseek_sized.rank_layers = edited
    try:
        return deepseek_sized.bundle(checkpoint, version="1.1")
    finally:
        deepseek_sized.rank_layers = original


def _shifted(layer: Layer) -> Layer:
    rows = [msgspec.structs.replace(a, writes=tuple(map(_other, a.writes))) for a in layer.applications]
    return msgspec.structs.replace(layer, applications=tuple(rows))


def _other(write: Write) -> Write:
    if write.dst is None:
        return msgspec.structs.replace(write, computed=True)
    return msgspec.structs.replace(write, dst=View(write.dst.offset, (*write.dst.shape, 1), (*write.dst.stride, 1)))


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "out" / "check_diff"
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    size = sum(file.stat().st_size for file in (folder / "bundle").iterdir()) / 2**20
    started = time.perf_counter()
    Bundle.read(folder / "bundle").manifest(3)
    read = time.perf_counter() - started
    runs = {
        "python -c pass": None,
        "check --help": ["check", "--help"],
        "diff --help": ["diff", "--help"],
        "check, equal": ["check", "bundle", "checkpoint"],
        "check, 14,848 missing": ["check", "bundle", "--wire", "less.json"],
        "check, every name changed": ["check", "bundle", "--wire", "renamed.json"],
        "diff, equal": ["diff", "bundle", "bundle"],
        "diff, half the layers": ["diff", "bundle", "some"],
        "diff, every application": ["diff", "bundle", "all"],
    }
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    # Compiled modules are kept, as they are where a package is installed, whatever this shell asks for.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder.resolve() / "compiled")
    results = {}
    print(f"{'':28} {'seconds':>8} {'cpu':>6} {'MB':>6}  exit")
    for name, arguments in runs.items():
        if arguments is None:
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", "pass"], check=True)
            print(f"{name:28} {time.perf_counter() - started:8.2f}")
            continue
        seconds, busy, peak, code = measured(*arguments)
        results[name] = {"seconds": round(seconds, 3), "cpu": round(busy, 3), "peak_mb": round(peak), "exit": code}
        print(f"{name:28} {seconds:8.2f} {busy:6.2f} {peak:6.0f}  {code}")
    print(f"bundle of 8 ranks: {size:.2f} MB; index and one rank read and verified in {read:.2f} s")
    results["bundle"] = {"mb": round(size, 2), "read_seconds": round(read, 3)}
    Path("results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
