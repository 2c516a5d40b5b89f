"""Bundles: written in one step, read rank by rank, and proved over all ranks (rule 11)."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from samples import dense_bundle, dense_checkpoint, dense_manifests

from probe_cli.errors import ManifestError, UsageError
from probe_cli.manifest import Bundle, Manifest


def test_what_was_written_is_read_rank_by_rank(tmp_path: Path) -> None:
    bundle = dense_bundle()
    assert bundle.write(tmp_path / "out") == tmp_path / "out"
    read = Bundle.read(tmp_path / "out")
    assert read.index == bundle.index
    assert [m.digest for m in read.manifests()] == [m.digest for m in bundle.manifests()]
    assert Manifest.read(tmp_path / "out", rank=1) == bundle.manifest(1)
    assert Manifest.read(tmp_path / "out" / "bundle.json.gz", rank=1) == bundle.manifest(1)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "bundle.json.gz",
        "rank-00000.json.gz",
        "rank-00001.json.gz",
    ]


def test_written_twice_the_bytes_are_equal(tmp_path: Path) -> None:
    dense_bundle().write(tmp_path / "a")
    dense_bundle().write(tmp_path / "b")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_a_bundle_replaces_a_bundle_and_leaves_nothing_behind(tmp_path: Path) -> None:
    dense_bundle(world=4).write(tmp_path / "out")
    dense_bundle(world=2).write(tmp_path / "out")
    assert Bundle.read(tmp_path / "out").ranks == (0, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_directory_with_anything_else_is_not_replaced(tmp_path: Path) -> None:
    dense_bundle().write(tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds 'notes.txt', not a bundle"):
        dense_bundle().write(tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert Bundle.read(tmp_path / "out").digest == dense_bundle().digest


def test_a_source_that_no_rank_accounts_for_fails_the_build() -> None:
    with pytest.raises(ManifestError, match=r"'model.layers.9.mtp.weight': used by no rank, and no rank says why"):
        Bundle.build(dense_checkpoint(), dense_manifests(), [{}, {}])  # type: ignore[arg-type]


def test_the_strongest_reason_of_any_rank_stands() -> None:
    name = "model.layers.9.mtp.weight"
    bundle = Bundle.build(dense_checkpoint(), dense_manifests(), [{name: "unread"}, {name: "declined"}])  # type: ignore[arg-type]
    assert bundle.index.unused == {"declined": (name,)}


def test_a_swapped_rank_file_is_found(tmp_path: Path) -> None:
    dense_bundle().write(tmp_path / "out")
    other = (tmp_path / "out" / "rank-00001.json.gz").read_bytes()
    (tmp_path / "out" / "rank-00000.json.gz").write_bytes(other)
    with pytest.raises(ManifestError, match=r"rank-00000.json.gz: this is the manifest of rank 1 .*expects rank 0"):
        Bundle.read(tmp_path / "out").manifest(0)


def test_an_edited_index_is_found(tmp_path: Path) -> None:
    dense_bundle().write(tmp_path / "out")
    file = tmp_path / "out" / "bundle.json.gz"
    file.write_bytes(gzip.compress(gzip.decompress(file.read_bytes()).replace(b"mtp.weight", b"mtp.height")))
    with pytest.raises(ManifestError, match=r"edited or damaged"):
        Bundle.read(tmp_path / "out")
