"""Bundles: written in one step, read rank by rank, and proved over all ranks (rule 11)."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from probe_cli.errors import ManifestError, UsageError
from probe_cli.manifest import Bundle, Manifest, swap
from probe_cli.manifest.schema import TensorEntry
from tests.manifest.samples import dense_bundle, dense_checkpoint, dense_manifests


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


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_without_exchange_the_old_bundle_is_moved_away_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probe_cli.manifest.swap._exchange", lambda one, other: False)
    dense_bundle(world=4).write(tmp_path / "out")
    dense_bundle(world=2).write(tmp_path / "out")
    assert Bundle.read(tmp_path / "out").ranks == (0, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_failing_rename_leaves_the_old_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense_bundle(world=4).write(tmp_path / "out")
    before = bytes_of(tmp_path / "out")
    monkeypatch.setattr("probe_cli.manifest.swap._exchange", lambda one, other: False)
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if str(source).endswith(".new"):
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(ManifestError, match=r"out: cannot be written \(No space left on device\)"):
        dense_bundle(world=2).write(tmp_path / "out")
    assert bytes_of(tmp_path / "out") == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("exchanged", [True, False])
def test_an_interrupt_at_any_step_leaves_one_whole_bundle_and_nothing_else(
    exchanged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each change of the file system that replacing a bundle makes."""
    steps = {"at": 0, "stop": -1}

    def stopping(change: Callable[..., object]) -> Callable[..., object]:
        def step(*args: object, **options: object) -> object:
            result = change(*args, **options)
            steps["at"] += 1
            if steps["at"] == steps["stop"]:
                raise KeyboardInterrupt
            return result

        return step

    exchange = swap._exchange if exchanged else lambda one, other: False
    monkeypatch.setattr("probe_cli.manifest.swap._exchange", stopping(exchange) if exchanged else exchange)
    for name in ("rename", "replace", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, stopping(getattr(os, name)))
    outcomes = set()
    for stop in range(1, 100):
        folder = tmp_path / str(stop)
        steps["stop"] = -1
        dense_bundle(world=4).write(folder / "out")
        steps.update(at=0, stop=stop)
        try:
            dense_bundle(world=2).write(folder / "out")
        except KeyboardInterrupt:
            assert [p.name for p in folder.iterdir()] == ["out"]
            outcomes.add(len(list(Bundle.read(folder / "out").manifests())))
        else:
            break
    assert outcomes == {2, 4} and 5 < stop < 99


def test_an_interrupt_while_writing_leaves_the_old_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense_bundle(world=4).write(tmp_path / "out")
    before = bytes_of(tmp_path / "out")
    written: list[Path] = []

    def interrupted(path: Path, data: bytes) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(path)
        path.write_bytes(data)

    monkeypatch.setattr("probe_cli.manifest.bundle.write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dense_bundle(world=2).write(tmp_path / "out")
    assert bytes_of(tmp_path / "out") == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_link_to_a_bundle_stays_a_link(tmp_path: Path) -> None:
    dense_bundle(world=4).write(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    dense_bundle(world=2).write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert Bundle.read(tmp_path / "real").ranks == (0, 1)


@pytest.mark.parametrize("content", [{"bundle.json": "{}"}, {"rank-00000.json": "{}"}, {"sub/rank-00000.json": "{}"}])
def test_what_only_looks_like_a_bundle_is_not_replaced(tmp_path: Path, content: dict[str, str]) -> None:
    for name, text in content.items():
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text(text)
    with pytest.raises(UsageError, match=r"not a bundle, so it is not replaced"):
        dense_bundle().write(tmp_path / "out")
    for name, text in content.items():
        assert (tmp_path / "out" / name).read_text() == text


def test_a_file_is_not_replaced_by_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match=r"out: a file, not a bundle"):
        dense_bundle().write(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_an_empty_directory_becomes_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    dense_bundle().write(tmp_path / "out")
    assert Bundle.read(tmp_path / "out").digest == dense_bundle().digest


def test_a_file_that_appears_meanwhile_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense_bundle().write(tmp_path / "out")
    put = swap.put_in_place

    def late(new: Path, target: Path) -> Path | None:
        (target / "notes.txt").write_text("mine")
        return put(new, target)

    monkeypatch.setattr("probe_cli.manifest.bundle.put_in_place", late)
    with pytest.raises(ManifestError, match=r"written, but files that are no part of a bundle"):
        dense_bundle().write(tmp_path / "out")
    (kept,) = tmp_path.glob(".out.*/notes.txt")
    assert kept.read_text() == "mine"


def test_a_missing_rank_file_is_named(tmp_path: Path) -> None:
    dense_bundle().write(tmp_path / "out")
    (tmp_path / "out" / "rank-00001.json.gz").unlink()
    assert Bundle.read(tmp_path / "out").manifest(0).rank.index == 0
    with pytest.raises(ManifestError, match=r"rank-00001.json.gz: no such file"):
        Bundle.read(tmp_path / "out").manifest(1)


def test_ranks_that_do_not_belong_together_are_refused() -> None:
    mixed = [dense_manifests(world=2)[0], dense_manifests(world=4)[1]]
    with pytest.raises(ManifestError, match=r"rank 1 \(tp 1/4\): its topology is not that of the bundle"):
        Bundle.build(dense_checkpoint(), mixed, [{}, {}])  # type: ignore[arg-type]


def test_the_index_names_parameters_that_nothing_feeds() -> None:
    given = dense_manifests()
    parts = []
    for manifest in given:
        document = manifest.document
        layer = document.layers[1]
        extra = TensorEntry("bias", "BF16", (8,))
        tied = TensorEntry("tied", "BF16", (8,), alias=f"{layer.name}.weight")
        weight = msgspec.structs.replace(layer.tensors[0], alias=f"{layer.name}.weight")
        tensors = (weight, layer.tensors[1], tied, *((extra,) if manifest.rank.index else ()))
        layers = (document.layers[0], msgspec.structs.replace(layer, tensors=tensors), *document.layers[2:])
        names = ("engine", "topology", "rank", "model", "checkpoint", "sources", "summary")
        parts.append(Manifest.build(**{n: getattr(document, n) for n in names}, layers=layers))
    bundle = Bundle.build(dense_checkpoint(), parts, [{"model.layers.9.mtp.weight": "skipped"}] * 2)  # type: ignore[arg-type]
    assert bundle.index.unfed == {"model.layers.0.norm.bias": (1,)}


def test_asking_for_no_rank_of_many_says_which_there_are() -> None:
    with pytest.raises(UsageError, match=r"which rank\? it holds ranks 0-3"):
        dense_bundle(world=4).manifest()
