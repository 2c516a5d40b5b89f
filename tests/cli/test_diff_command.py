"""`probe-manifest diff` and `textconv`, run as people and git run them."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from probe_cli.checkpoint import Checkpoint
from probe_cli.cli.main import main
from probe_cli.manifest.canonical import digest_of_bytes
from tests.manifest import corpus
from tests.manifest.test_diff import CHANGES


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """checkpoint/ with bundles: old/, new/ (a selector changed), soft/ (a class changed)."""
    folder = tmp_path_factory.mktemp("place")
    checkpoint = Checkpoint.open(corpus.write(folder / "checkpoint", corpus.tensors()))
    corpus.bundle(checkpoint).write(folder / "old")
    for name, kind in (("new", "selectors-changed"), ("soft", "layer-class-changed")):
        corpus.bundle(checkpoint, corpus.manifests(checkpoint, change=CHANGES[kind])).write(folder / name)
    retyped = corpus.tensors() | {"model.norm.weight": ("F32", (8,), "a.safetensors")}
    corpus.write(folder / "retyped", retyped)
    return folder


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    code = main(["diff", *arguments])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def test_equal_bundles(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "old", "old", "--exit-code")
    assert (code, out[-1]) == (0, "no difference")


@pytest.mark.parametrize("side", ["old", "damaged"])
@pytest.mark.parametrize("damage", ["missing", "cut", "edited"])
def test_what_an_index_states_of_a_damaged_file_is_not_believed(
    damage: str, side: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copytree("old", tmp_path / "damaged")
    file = next(path for path in sorted((tmp_path / "damaged").iterdir()) if path.name.startswith("rank-00001"))
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-40])
    else:
        packed = file.suffix == ".gz"
        text = gzip.decompress(file.read_bytes()) if packed else file.read_bytes()
        edited = text.replace(b"k_proj", b"x_proj", 1)
        assert edited != text
        file.write_bytes(gzip.compress(edited) if packed else edited)
    given = ("old", str(tmp_path / "damaged"))
    code, out, error = run(capsys, *(given if side == "old" else given[::-1]))
    assert (code, out) == (2, []) and file.name in error


def test_a_breaking_change_is_named_and_fails_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "old", "new")
    name = "model.layers.0.self_attn"
    assert code == 0
    assert out[2:] == [
        f"breaking selectors-changed {name}.k_proj.weight -> {name}.qkv_proj.weight: "
        'selectors: {"loaded_shard_id":"k"} -> {"loaded_shard_id":7} [ranks 0,1]',
        "2 breaking",
    ]
    assert run(capsys, "old", "new", "--breaking")[0] == 1
    assert run(capsys, "old", "new", "--exit-code")[0] == 1


def test_a_compatible_change_does_not_fail_breaking(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "old", "soft", "--breaking")
    assert (code, out[-1]) == (0, "no such difference (2 others not asked for)")
    assert run(capsys, "old", "soft", "--exit-code")[0] == 1


def test_one_rank_and_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "old", "new", "--rank", "1")[1][2].endswith("[rank 1]")
    assert run(capsys, "old", "new", "--only", "regions")[1][-1] == "no such difference (2 others not asked for)"
    assert run(capsys, "old", "new", "--only", "selectors", "--only", "regions")[1][-1] == "2 breaking"
    code, _, err = run(capsys, "old", "new", "--rank", "5")
    assert (code, "no rank 5 in this bundle; it holds ranks 0-1" in err) == (2, True)
    assert run(capsys, "old", "new", "--rank", "0", "--all-ranks")[0] == 2


def test_two_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "checkpoint", "retyped", "--breaking")
    assert code == 1
    assert "breaking source-changed model.norm.weight: dtype: BF16 -> F32" in out


def test_a_bundle_and_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "old", "checkpoint")
    assert code == 2
    assert "cannot be compared with diff" in err
    assert "probe-manifest check" in err


def test_json_and_markdown_to_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(capsys, "old", "new", "--format", "json", "--output", str(tmp_path / "diff.json"))
    assert [row["kind"] for row in json.loads((tmp_path / "diff.json").read_text())["changes"]] == [
        "selectors-changed"
    ] * 2
    run(capsys, "old", "new", "--format", "markdown", "--output", str(tmp_path / "diff.md"))
    assert (tmp_path / "diff.md").read_text().startswith("### probe-manifest diff: 2 breaking")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_diff_shows_packed_manifests_as_text(place: Path, tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        env = {
            **os.environ,
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@e", *arguments]
        return subprocess.run(command, env=env, capture_output=True, check=True, text=True).stdout

    git("init", "-q")
    git("config", "diff.probe-manifest.textconv", f"{sys.executable} -m probe_cli textconv")
    (tmp_path / ".gitattributes").write_text("*.json.gz diff=probe-manifest\n")
    shutil.copy(place / "old" / "rank-00000.json.gz", tmp_path)
    git("add", ".")
    git("commit", "-qm", "old")
    shutil.copy(place / "new" / "rank-00000.json.gz", tmp_path)
    changed = [line for line in git("diff").splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    name = "model.layers.0.self_attn"
    assert changed == [
        f"-  {name}.k_proj.weight -> {name}.qkv_proj.weight [loaded_shard_id=k]",
        f"+  {name}.k_proj.weight -> {name}.qkv_proj.weight [loaded_shard_id=7]",
    ]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_diff_goes_on_past_what_is_no_manifest(place: Path, tmp_path: Path) -> None:
    """One failure of a converter ends `git diff` for every file."""
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "PYTHONPATH": root}
    command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@e"]

    def git(*arguments: str) -> str:
        return subprocess.run([*command, *arguments], env=env, capture_output=True, check=True, text=True).stdout

    git("init", "-q")
    git("config", "diff.probe-manifest.textconv", f"{sys.executable} -m probe_cli textconv")
    (tmp_path / ".gitattributes").write_text("manifests/** diff=probe-manifest\n")
    folder = tmp_path / "manifests"
    folder.mkdir()
    whole = (place / "old" / "rank-00000.json.gz").read_bytes()
    (folder / "a-other.json.gz").write_bytes(gzip.compress(b'{"a": 1}'))
    (folder / "b-bytes.bin").write_bytes(b"\xff\x00")
    (folder / "c-cut.json.gz").write_bytes(whole)
    (folder / "d-plain.json").write_bytes(gzip.decompress(whole))
    git("add", ".")
    git("commit", "-qm", "old")
    (folder / "a-other.json.gz").write_bytes(gzip.compress(b'{"a": 2}'))
    (folder / "b-bytes.bin").write_bytes(b"\xff\x01")
    (folder / "c-cut.json.gz").write_bytes(whole[:-9])
    (folder / "d-plain.json").write_bytes(gzip.decompress((place / "new" / "rank-00000.json.gz").read_bytes()))
    changed = [line for line in git("diff").splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert changed[:2] == ['-{"a": 1}', '+{"a": 2}']
    assert [line.partition(",")[0] for line in changed[2:4]] == ["-2 bytes", "+2 bytes"]
    reason = "+not a manifest that can be read: the gzip data ends early; the file was cut short"
    assert changed.index(reason) + 1 == changed.index(f"+{len(whole) - 9:,} bytes, {digest_of_bytes(whole[:-9])}")
    name = "model.layers.0.self_attn"
    assert changed[-2:] == [
        f"-  {name}.k_proj.weight -> {name}.qkv_proj.weight [loaded_shard_id=k]",
        f"+  {name}.k_proj.weight -> {name}.qkv_proj.weight [loaded_shard_id=7]",
    ]


def test_textconv_of_nothing_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        assert main(["textconv", str(path)]) == 2
        assert capsys.readouterr().err.startswith(f"error: {path}: no ")


def test_checkpoints_have_no_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "checkpoint", "retyped", "--rank", "0")
    assert (code, err) == (2, "error: a checkpoint has no ranks, but rank 0 was asked for\n")


def test_manifests_of_two_ranks_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "old/rank-00000.json.gz", "new/rank-00001.json.gz")
    assert (code, err) == (2, "error: new/rank-00001.json.gz: this is the manifest of rank 1, not of rank 0\n")
