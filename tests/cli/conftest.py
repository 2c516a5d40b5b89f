"""A checkpoint, a bundle built from it, and ways to run the command: in process, and as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from probe_cli.cli.main import main
from probe_cli.engines.embedded.checkpoints import preset, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "probe_cli"]


class Result:
    """What a command ended with."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code = code
        self.stdout = stdout
        self.stderr = stderr

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE checkpoint: 69 sources in two shards."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "qwen3-moe", preset("qwen3-moe"))


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run a command in this process."""

    def call(*arguments: str | Path) -> Result:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return call


@pytest.fixture(scope="session")
def spawn() -> Callable[..., Result]:
    """Run a command in a process of its own."""

    def call(*arguments: str | Path, **environment: str) -> Result:
        done = subprocess.run(
            [*COMMAND, *map(str, arguments)],
            capture_output=True,
            text=True,
            encoding="utf-8",
            cwd=ROOT,
            env={**os.environ, **environment},
            timeout=120,
            stdin=subprocess.DEVNULL,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture(scope="session")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a TP2 + EP2 topology."""
    out = tmp_path_factory.mktemp("bundle") / "manifests"
    assert main(["build", str(checkpoint), "--engine", "embedded", "--tp", "2", "--ep", "-o", str(out)]) == 0
    return out
