"""Orders of sources."""

from __future__ import annotations

from pathlib import Path

import pytest
from header_writer import write_sharded

from probe_cli.checkpoint import Checkpoint
from probe_cli.errors import CheckpointError, UsageError

U8 = ("U8", (1,))
NAMES = {
    "one.safetensors": {"norm": U8, "layers.10.w": U8, "layers.9.w": U8},
    "two.safetensors": {"layers.9.a": U8, "embed": U8, "layers.10.e.2.w": U8, "layers.10.e.11.w": U8},
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint.open(write_sharded(tmp_path, NAMES))


def test_file_order(checkpoint: Checkpoint) -> None:
    expected = tuple(name for names in NAMES.values() for name in names)
    assert checkpoint.names() == expected
    assert checkpoint.reordered("name").reordered("file").names() == expected


def test_name_order(checkpoint: Checkpoint, tmp_path: Path) -> None:
    expected = tuple(sorted(checkpoint.names()))
    assert checkpoint.reordered("name").names() == expected
    assert Checkpoint.open(tmp_path, order="name").names() == expected


def test_layer_order(checkpoint: Checkpoint) -> None:
    assert checkpoint.reordered("layer").names() == (
        "embed", "norm", "layers.9.a", "layers.9.w", "layers.10.e.2.w", "layers.10.e.11.w", "layers.10.w",
    )  # fmt: skip


def test_order_by_names(checkpoint: Checkpoint) -> None:
    names = checkpoint.names()[::-1]
    turned = checkpoint.reordered(names)
    assert turned.names() == names and turned.digest == checkpoint.digest
    assert turned["embed"] == checkpoint["embed"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda names: [*names, "x"], "order names 1 sources that the checkpoint lacks: 'x'"),
        (lambda names: [*names, names[0]], "order names a source twice"),
        (lambda names: names[1:], "order leaves out 1 sources: 'norm'"),
    ],
)
def test_order_that_does_not_fit(checkpoint: Checkpoint, change: object, expected: str) -> None:
    assert callable(change)
    with pytest.raises(CheckpointError, match=expected):
        checkpoint.reordered(change(list(checkpoint.names())))


def test_unknown_order(checkpoint: Checkpoint) -> None:
    with pytest.raises(UsageError, match="order 'size' is unknown, expected one of file, name, layer"):
        checkpoint.reordered("size")
