"""`reload-check`: a real reload of a small real checkpoint, whole and broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from probe_cli.cli.main import main
from probe_cli.engines.embedded.checkpoints import preset, write_checkpoint


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("reload-check")
    config = preset("qwen3-moe-extras")
    return str(write_checkpoint(root / "a", config, seed=1)), str(write_checkpoint(root / "b", config, seed=2))


@pytest.mark.parametrize("options", [[], ["--in-place"], ["--commit", "model", "--order", "random:3", "--chunks", "7"]])
def test_a_whole_update_equals_a_cold_load(
    folders: tuple[str, str], options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = folders
    assert main(["reload-check", a, b, "--tp", "2", "--ep", "--rank", "1", *options, "--format", "json"]) == 0
    trial = json.loads(capsys.readouterr().out)
    assert trial["ok"] and trial["differing"] == [] and trial["moved"] == [] and trial["state"] == "ready"
    receipt = trial["receipt"]
    assert receipt["observed"] == receipt["expected"] > 0 and receipt["missing"] == []
    assert receipt["staging_peak"] <= receipt["staging_budget"]


def test_without_an_update_every_sign_is_flipped(folders: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reload-check", folders[0], "--order", "reversed"]) == 0
    out = capsys.readouterr().out
    assert "equal those of a cold load, bit for bit; 0 moved" in out and "update 1 rank 0 ok" in out


@pytest.mark.parametrize("commit", ["layer", "model"])
def test_a_lost_tensor_is_named(folders: tuple[str, str], commit: str, capsys: pytest.CaptureFixture[str]) -> None:
    lost = "model.layers.0.self_attn.kv_a_proj.weight"
    other = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert main(["reload-check", *folders, "--drop", lost, "--drop", other, "--commit", commit]) == 1
    out = capsys.readouterr().out
    assert lost in out and other in out and "2 applications missing in 2 layers" in out
    if commit == "model":
        assert "tensors equal what they were before the update, bit for bit" in out and "session: ready" in out
    else:
        assert "mixture" in out and "session: undefined" in out


def test_a_manifest_of_another_rank_or_model_is_refused(
    folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "rank.json")
    assert main(["build", folders[0], "--tp", "2", "--ranks", "1", "-o", path]) == 0
    capsys.readouterr()
    assert main(["reload-check", *folders, "--manifest", path, "--rank", "1", "--tp", "2"]) == 0
    other = str(write_checkpoint(tmp_path / "other", preset("qwen3-moe-extras", num_hidden_layers=3), seed=1))
    capsys.readouterr()
    assert main(["reload-check", other, "--manifest", path, "--rank", "1", "--tp", "2"]) in (2, 3)
    assert "model.layers.2.self_attn" in capsys.readouterr().err


def test_trouble_is_one_line(folders: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reload-check", folders[0], "--drop", "no.such.tensor"]) == 2
    assert "no.such.tensor is no source" in capsys.readouterr().err
    assert main(["reload-check", folders[0], "--staging-bytes", "8"]) == 2
    assert "does not hold layer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "zz"], "--device zz: not a device"),
        (["--device", "meta"], "--device meta: a model cannot be reloaded there"),
        (["--device", "cuda:99"], "--device cuda:99: there is no such device here"),
        (["--order", "random"], "--order random: expected file, reversed or random:SEED"),
        (["--order", "random:x"], "--order random:x: expected file, reversed or random:SEED"),
        (["--order", "reversed:1"], "--order reversed:1: expected file, reversed or random:SEED"),
    ],
)
def test_what_cannot_be_tried_is_said_in_a_line(
    folders: tuple[str, str], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reload-check", folders[0], "--engine", "embedded", *options]) == 2
    assert f"error: {message}" in capsys.readouterr().err
