"""Start-up of the commands that need no torch: whole processes, the median of several runs, wall clock and CPU seconds.

python benchmarks/startup.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from probe_cli.cli.main import main
from probe_cli.engines.embedded.checkpoints import preset, write_checkpoint

RUNS = 11


def measure(*arguments: str) -> str:
    """Median seconds of a Python process: wall clock, and CPU (what is left of it on a busy machine)."""
    wall, cpu = [], []
    for _ in range(RUNS):
        start = time.perf_counter()
        process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            sys.exit(f"{arguments} failed")
        wall.append(time.perf_counter() - start)
        cpu.append(usage.ru_utime + usage.ru_stime)
    return f"{statistics.median(wall):.3f} s, CPU {statistics.median(cpu):.3f} s"


def run() -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, bundle = str(Path(folder) / "checkpoint"), str(Path(folder) / "bundle")
        write_checkpoint(checkpoint, preset("qwen3-moe"))
        if main(["build", checkpoint, "--engine", "embedded", "--tp", "2", "-o", bundle]):
            sys.exit("the build failed")
        print(f"{'python -c pass':46} {measure('-c', 'pass')}")
        # Compiled modules are kept, as they are where a package is installed, whatever this shell asks for.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(Path(folder) / "compiled")
        for arguments in (
            ["--help"],
            ["--version"],
            ["check", "--help"],
            ["diff", "--help"],
            ["check", bundle],
            ["diff", bundle, bundle],
            ["show", bundle],
            ["explain", bundle, "lm_head.weight"],
        ):
            shown = " ".join("BUNDLE" if argument == bundle else argument for argument in arguments)
            print(f"{'probe-manifest ' + shown:46} {measure('-m', 'probe_cli', *arguments)}")


if __name__ == "__main__":
    run()
