"""Folders that are not what they seem: missing shards, broken links, indices of another checkpoint (case 28)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from header_writer import write, write_sharded

from probe_cli.checkpoint import Checkpoint
from probe_cli.errors import CheckpointError, UsageError

SHARDS = {
    "model-00001-of-00002.safetensors": {"b": ("F32", (2, 3)), "a": ("BF16", (4,))},
    "model-00002-of-00002.safetensors": {"c": ("I64", ())},
}
FIRST, SECOND = SHARDS
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_sharded(tmp_path, SHARDS)


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


def edit_index(root: Path, **changes: str | None) -> None:
    index = json.loads((root / INDEX).read_text())
    for name, file in changes.items():
        if file is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = file
    (root / INDEX).write_text(json.dumps(index))


def test_sharded_folder_in_file_order(sharded: Path) -> None:
    (sharded / "config.json").write_text('{"model_type": "llama", "time_step_limit": [0.0, Infinity]}')
    checkpoint = Checkpoint.open(sharded)
    assert checkpoint.names() == ("b", "a", "c")
    assert [file.name for file in checkpoint.files] == [FIRST, SECOND]
    assert [file.size for file in checkpoint.files] == [(sharded / name).stat().st_size for name in SHARDS]
    assert checkpoint["c"].file == 1 and checkpoint["c"].shape == () and checkpoint["c"].nbytes == 8
    assert checkpoint.nbytes == 24 + 8 + 8
    assert checkpoint.kind == "files" and checkpoint.root == sharded and checkpoint.revision is None
    assert checkpoint.config is not None and checkpoint.config["model_type"] == "llama"
    assert checkpoint.config_digest is not None and checkpoint.config_digest.startswith("sha256:")
    assert set(checkpoint.metadata) == {FIRST, SECOND}
    assert "a" in checkpoint and "d" not in checkpoint and len(checkpoint) == 3 and list(checkpoint) == ["b", "a", "c"]


def test_folder_without_index_and_index_file_itself(sharded: Path) -> None:
    by_index = Checkpoint.open(sharded / INDEX)
    (sharded / INDEX).unlink()
    assert Checkpoint.open(sharded).sources == by_index.sources


def test_digest_is_of_names_dtypes_and_shapes_alone(sharded: Path, tmp_path: Path) -> None:
    other = tmp_path / "one.safetensors"
    write(other, {"c": ("I64", ()), "a": ("BF16", (4,)), "b": ("F32", (2, 3))}, data=False)
    digest = Checkpoint.open(sharded / INDEX).digest
    assert Checkpoint.open(other).digest == digest
    write(other, {"c": ("I64", ()), "a": ("F16", (4,)), "b": ("F32", (2, 3))}, data=False)
    assert Checkpoint.open(other).digest != digest


def test_header_only_has_the_identity_of_the_whole(sharded: Path, tmp_path: Path) -> None:
    root = tmp_path / "headers"
    root.mkdir()
    write_sharded(root, SHARDS, data=False)
    whole, headers = Checkpoint.open(sharded), Checkpoint.open(root)
    assert headers.files == whole.files and headers.sources == whole.sources
    assert all(whole.has_data(source) for source in whole.sources)
    assert not any(headers.has_data(source) for source in headers.sources)
    with pytest.raises(CheckpointError, match="'b' is known from the header of model-00001-of-"):
        headers.read(headers["b"])


def test_missing_shard(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    assert refusal(sharded) == f"{INDEX}: names 1 of 2 files that are not there: '{SECOND}'"


def test_broken_link(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    (sharded / SECOND).symlink_to("../../blobs/0123abcd")
    assert refusal(sharded) == f"{SECOND}: is a broken link to '../../blobs/0123abcd', expected a file"


def test_good_link(sharded: Path) -> None:
    (sharded / SECOND).rename(sharded / "blob")
    (sharded / SECOND).symlink_to("blob")
    checkpoint = Checkpoint.open(sharded)
    assert len(checkpoint.read(checkpoint["c"])) == 8


def test_link_to_itself(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    (sharded / SECOND).symlink_to(SECOND)
    assert refusal(sharded).startswith(f"{SECOND}: cannot be opened: ")


def test_named_pipe_does_not_hang(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    os.mkfifo(sharded / SECOND)
    assert refusal(sharded) == f"{SECOND}: is not a regular file"


@pytest.mark.parametrize(
    "target",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/../../x.safetensors",
        "C:\\x.safetensors",
        "x.bin",
        "",
        "\n.safetensors",
    ],
)
def test_index_naming_something_outside(sharded: Path, target: str) -> None:
    edit_index(sharded, a=target)
    message = refusal(sharded)
    assert message.startswith(f"{INDEX}: weight_map of 'a' names ")
    assert message.endswith("expected a .safetensors file in the folder")


def test_index_naming_a_tensor_that_the_file_lacks(sharded: Path) -> None:
    edit_index(sharded, d=SECOND)
    assert refusal(sharded) == f"{INDEX}: names 1 tensors that their files lack: 'd' in {SECOND}"


def test_index_placing_a_tensor_in_another_file(sharded: Path) -> None:
    edit_index(sharded, a=SECOND)
    assert refusal(sharded) == f"{INDEX}: places 'a' in {SECOND}, but it is in {FIRST}"


def test_tensor_that_the_index_does_not_name(sharded: Path) -> None:
    edit_index(sharded, a=None)
    assert refusal(sharded) == f"{FIRST}: has 1 tensors that {INDEX} does not name: 'a'"


def test_tensor_in_two_files(sharded: Path) -> None:
    write(sharded / SECOND, {"c": ("I64", ()), "a": ("BF16", (4,))})
    assert refusal(sharded) == f"{SECOND}: tensor 'a' is in {FIRST} too, expected it in one file"
    (sharded / INDEX).unlink()
    assert refusal(sharded) == f"{SECOND}: tensor 'a' is in {FIRST} too, expected it in one file"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected '{', found the end"),
        ("[]", "expected '{', found '['"),
        ("{}", "has no 'weight_map'"),
        ('{"weight_map": []}', "expected '{', found '['"),
        ('{"weight_map": {}}', "weight_map is empty"),
        ('{"weight_map": {"a": 1}}', "expected a string as the value of 'a' in weight_map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "duplicate key 'a' in weight_map"),
        ('{"weight_map": {"a": "x.safetensors"}, "weight_map": {}}', "duplicate key 'weight_map' in the index"),
        ('{"metadata": NaN, "weight_map": {"a": "x.safetensors"}}', "NaN is not JSON"),
        ('{"metadata": ' + "[" * 9000 + "]" * 9000 + "}", "nested too deeply"),
        ('{"weight_map": {"a": "x.safetensors"}', "found the end"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1", "is a Git LFS pointer"),
        ('{"weight_map": {' + ",".join(f'"{n:x}":""' for n in range(120_000)) + "}}", "is not an index"),
    ],
)
def test_malformed_index(sharded: Path, text: str, expected: str) -> None:
    (sharded / INDEX).write_text(text)
    message = refusal(sharded)
    assert message.startswith(f"{INDEX}: ") and expected in message


def test_index_not_utf8(sharded: Path) -> None:
    (sharded / INDEX).write_bytes(b'{"\xff": 1}')
    assert refusal(sharded) == f"{INDEX}: is not UTF-8 at byte 2, expected JSON"


def test_index_with_escapes_and_subfolders(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "x.safetensors", {"é": ("U8", (1,))})
    (tmp_path / INDEX).write_text('{"weight_map": {"\\u00e9": "sub/x.safetensors"}}')
    assert Checkpoint.open(tmp_path).names() == ("é",)


def test_bin_only(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\3\4")
    assert refusal(tmp_path) == f"{tmp_path}: has 'pytorch_model.bin' but no safetensors file"


def test_folder_without_safetensors(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path}: has no safetensors file and no {INDEX}"


def test_consolidated_beside_shards(sharded: Path) -> None:
    """Mistral's repositories hold the model twice: the index decides; without one the user must."""
    write(sharded / "consolidated.safetensors", {"layers.0.a": ("BF16", (4,))})
    assert Checkpoint.open(sharded).names() == ("b", "a", "c")
    (sharded / INDEX).unlink()
    assert "has 'consolidated.safetensors' beside 'model-00001-of-00002.safetensors'" in refusal(sharded)
    assert Checkpoint.open(sharded / "consolidated.safetensors").names() == ("layers.0.a",)


def test_consolidated_alone(tmp_path: Path) -> None:
    write(tmp_path / "consolidated.safetensors", {"a": ("BF16", (4,))})
    assert Checkpoint.open(tmp_path).names() == ("a",)


def test_several_indices(sharded: Path) -> None:
    (sharded / INDEX).rename(sharded / "model.fp8.safetensors.index.json")
    assert len(Checkpoint.open(sharded)) == 3
    (sharded / "x.safetensors.index.json").write_text("{}")
    assert "has 2 indices" in refusal(sharded)
    assert len(Checkpoint.open(sharded / "model.fp8.safetensors.index.json")) == 3


def test_no_such_path(tmp_path: Path) -> None:
    assert refusal(tmp_path / "gone.safetensors") == f"{tmp_path / 'gone.safetensors'}: no such file or folder"


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "hf://" + "x" * 5000, "f.safetensors/x"])
def test_paths_that_no_system_has(path: str, tmp_path: Path) -> None:
    (tmp_path / "f.safetensors").touch()
    with pytest.raises((CheckpointError, UsageError)):
        Checkpoint.open(path if "/" in path and not path.startswith("f.") else str(tmp_path / path))


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_malformed_config(sharded: Path, text: str) -> None:
    (sharded / "config.json").write_text(text)
    assert refusal(sharded).startswith("config.json: ")
