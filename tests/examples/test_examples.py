"""The examples and the configurations run as their texts say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from probe_cli import Manifest
from probe_cli.config import read_config

ROOT = Path(__file__).parents[2]


def run(*command: object, code: int = 0) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def test_reload_example_publishes_b_and_names_what_is_lost() -> None:
    out = run("examples/reload.py")
    assert "all parameters in the same storage: True" in out
    assert "cold load of the same weights: 21 of 21" in out
    assert "an update without one tensor: the update is incomplete: 1 application missing in 1 layer" in out
    assert "model.layers.1.mlp.experts.6.up_proj.weight -> model.layers.1.mlp.experts.w13" in out


def test_embedded_configuration(tmp_path: Path) -> None:
    run("examples/make_checkpoint.py", tmp_path / "checkpoint", "--seed", "4", "--layers", "1")
    run(
        "-m", "probe_cli", "build", tmp_path / "checkpoint", "--config", "configs/embedded-qwen3-moe.toml",
        "-o", tmp_path / "out",
    )  # fmt: skip
    manifest = Manifest.read(tmp_path / "out", rank=1)
    assert manifest.engine.name == "embedded"
    assert (manifest.topology.tp, manifest.topology.ep) == (2, 2)
    # Four local experts of three matrices each.
    assert len(manifest.layer("model.layers.0.mlp.experts").applications) == 12


def test_your_own_model_and_its_configuration(tmp_path: Path) -> None:
    run("examples/two_tower.py", tmp_path / "checkpoint")
    run(
        "-m", "probe_cli", "build", tmp_path / "checkpoint", "--config", "configs/python-two-tower.toml",
        "-o", tmp_path / "out",
    )  # fmt: skip
    manifest = Manifest.read(tmp_path / "out", rank=1)
    assert manifest.engine.arguments == {"factory": "two_tower.py:create", "width": 32}
    first, second = manifest.layer("towers").applications
    assert [first.selectors, second.selectors] == [{"tower": "document"}, {"tower": "query"}]
    # Rank 1 reads the second half of each tower, 16 rows of 16.
    assert first.writes[0].src.offset == 256


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.toml")), ids=lambda file: file.name)
def test_every_configuration_can_be_read(file: Path) -> None:
    assert read_config(file).engine is not None
