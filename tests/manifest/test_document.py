"""A manifest's text: the same for the same manifest, read back whole, and different after every single change."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probe_cli.errors import ManifestError, UsageError
from probe_cli.manifest import ContractKey, Manifest, canonical_bytes, digest
from probe_cli.manifest.keys import contract_digest, describe_selectors
from probe_cli.manifest.schema import (
    Application,
    CheckpointIdentity,
    Coverage,
    Layer,
    SourceEntry,
    TensorEntry,
    View,
    Write,
)
from probe_cli.topology import Topology
from tests.manifest.samples import ENGINE, MODEL, dense_manifests, summary

names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
sizes = st.integers(0, 4)
views = st.lists(st.tuples(sizes, sizes), max_size=3).map(
    lambda dims: View(0, tuple(d[0] for d in dims), tuple(d[1] for d in dims))
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | names
)
values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(names, scalars, max_size=2)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    sources = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    layers = []
    for name in draw(st.lists(st.just("") | names.map("layer.".__add__), max_size=3, unique=True)):
        tensors = draw(st.lists(names.filter(lambda n: "." not in n), min_size=1, max_size=3, unique=True))
        entries = tuple(
            TensorEntry(
                tensor,
                draw(st.sampled_from(["BF16", "F32", "F8_E4M3", "F4"])),
                (9, 9, 9),
                kind=draw(st.sampled_from(["parameter", "buffer"])),
                coverage=draw(st.none() | st.just(Coverage(3, (((0, 3), (0, 1), (0, 1)),)))),
            )
            for tensor in tensors
        )
        applications = tuple(
            Application(
                tuple(draw(st.lists(st.sampled_from(sources), min_size=1, max_size=2))),
                draw(st.sampled_from(tensors)),
                draw(st.dictionaries(names, values, max_size=2)),
                count=draw(st.integers(1, 3)),
                direct=draw(st.booleans()),
                writes=tuple(
                    Write(src=draw(st.none() | views), dst=draw(st.none() | views), computed=draw(st.booleans()))
                    for _ in range(draw(st.integers(0, 2)))
                ),
            )
            for _ in range(draw(st.integers(0, 3)))
        )
        layers.append(Layer(name, draw(names), entries, applications))
    topology = draw(st.sampled_from([Topology(), Topology(tp=2), Topology(tp=2, pp=2, ep=2)]))
    return Manifest.build(
        engine=ENGINE,
        topology=topology,
        rank=topology.rank(draw(st.integers(0, topology.world_size - 1))),
        model=MODEL,
        checkpoint=CheckpointIdentity(digest="sha256:" + "1" * 64, sources=len(sources), nbytes=draw(sizes)),
        sources=[SourceEntry(name, "F32", (9, 9, 9)) for name in sources],
        layers=layers,
        summary=summary(tuple(layers), len(sources)),
    )


@settings(max_examples=50, deadline=None)
@given(manifests())
def test_what_is_written_is_read_and_written_again_the_same(manifest: Manifest) -> None:
    text = manifest.to_bytes()
    read = Manifest.from_bytes(text)
    assert msgspec.to_builtins(read.document) == msgspec.to_builtins(manifest.document)
    assert read.digest == manifest.digest == digest({k: v for k, v in json.loads(text).items() if k != "digest"})
    assert read.keys() == manifest.keys()
    assert read.to_bytes() == text
    assert Manifest(read.document).to_bytes() == text


@settings(max_examples=50, deadline=None)
@given(manifests())
def test_a_text_reformatted_by_another_program_still_verifies(manifest: Manifest) -> None:
    read = Manifest.from_bytes(json.dumps(json.loads(manifest.to_bytes()), indent=3, ensure_ascii=True).encode())
    assert read == manifest
    assert read.to_bytes() == manifest.to_bytes()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value of a JSON document."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [*value, value[-1] if value else 0]
    return {**value, "extra": 1}


@pytest.mark.parametrize("indent", [None, 1])
def test_every_single_change_is_refused(indent: int | None) -> None:
    manifest = dense_manifests()[1]
    document = json.loads(manifest.to_bytes())
    every = list(places(document))
    assert len(every) > 200
    for path in every:
        edited = json.loads(manifest.to_bytes())
        place = edited
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = changed(place[path[-1]])
        with pytest.raises(ManifestError):
            Manifest.from_bytes(json.dumps(edited, indent=indent).encode())


def test_every_removed_line_and_every_cut_is_refused() -> None:
    text = dense_manifests()[0].to_bytes()
    lines = text.splitlines(keepends=True)
    for number in range(len(lines)):
        with pytest.raises(ManifestError):
            Manifest.from_bytes(b"".join(lines[:number] + lines[number + 1 :]))
    for cut in range(0, len(text) - 1, 97):
        with pytest.raises(ManifestError):
            Manifest.from_bytes(text[:cut])


@pytest.mark.parametrize("name", ["m.json", "m.json.gz"])
def test_files_are_reproducible_and_told_by_their_content(tmp_path: Path, name: str) -> None:
    manifest = dense_manifests()[0]
    first = manifest.write(tmp_path / name).read_bytes()
    assert manifest.write(tmp_path / name).read_bytes() == first
    renamed = (tmp_path / name).rename(tmp_path / "anything")
    assert Manifest.read(renamed) == manifest
    assert [p.name for p in tmp_path.iterdir()] == ["anything"]


def test_reading_another_rank_than_the_file_holds_is_refused(tmp_path: Path) -> None:
    path = dense_manifests()[1].write(tmp_path / "m.json")
    assert Manifest.read(path, rank=1).rank.index == 1
    with pytest.raises(UsageError, match="manifest of rank 1, not of rank 0"):
        Manifest.read(path, rank=0)


def test_fields_of_a_newer_minor_version_are_ignored_and_kept() -> None:
    document = json.loads(dense_manifests()[0].to_bytes())
    document["version"] = "1.7"
    document["layers"][0]["applications"][0]["novel"] = {"a": [1]}
    document["novel"] = True
    del document["digest"]
    document["digest"] = digest(document)
    read = Manifest.from_bytes(canonical_bytes(document))
    assert read.keys() == dense_manifests()[0].keys()
    assert json.loads(read.to_bytes()) == document
    assert Manifest.from_bytes(read.to_bytes()).to_bytes() == read.to_bytes()


def test_a_newer_major_version_is_refused_by_name() -> None:
    text = dense_manifests()[0].to_bytes().replace(b'"version":"1.1"', b'"version":"2.0"')
    with pytest.raises(ManifestError, match=r"schema version 2.0 is of a newer major version than 1.1") as error:
        Manifest.from_bytes(text)
    assert error.value.hint == "upgrade probe-manifest"


def test_the_contract_digest_sees_keys_and_counts_alone() -> None:
    layer = Layer("l", "Linear", (TensorEntry("w", "F32", (4,)),), (Application(("a",), "w"), Application(("b",), "w")))
    again = Layer("l", "Other", (), (Application(("b",), "w", writes=(Write(),)), Application(("a",), "w")))
    assert contract_digest([layer]) == contract_digest([again])
    for other in (
        Application(("a",), "w", count=2),
        Application(("a",), "v"),
        Application(("a", "b"), "w"),
        Application(("a",), "w", {"shard_id": 0}),
    ):
        assert contract_digest([layer]) != contract_digest([Layer("l", "", (), (other, Application(("b",), "w")))])


def test_keys_are_a_multiset_and_read_well() -> None:
    """CASES 3: `weight_shape` of fused q, k and v is required three times."""
    shape = Application(("l.weight_shape",), "weight_shape", count=3)
    weight = Application(("l.q",), "weight", {"shard_id": "q", "part": {"enum": "Part.LEFT"}})
    key = ContractKey(("l.q",), "l", "weight", '{"part":{"enum":"Part.LEFT"},"shard_id":"q"}')
    layers = (
        Layer("l", "", (TensorEntry("weight_shape", "I64", (2,)), TensorEntry("weight", "F32", (2,))), (shape, weight)),
    )
    given = dense_manifests()[0].document
    manifest = Manifest(msgspec.structs.replace(given, layers=layers))
    assert manifest.keys() == {ContractKey(("l.weight_shape",), "l", "weight_shape"): 3, key: 1}
    assert str(key) == "l.q -> l.weight [part=Part.LEFT, shard_id=q]"


def test_selectors_read_as_what_they_are_on_one_line() -> None:
    """Text that looks like another value, or would break the line, is quoted."""
    given = {"a": 3, "b": "3", "c": None, "d": "null", "e": "", "f": "q", "g": "q\n\x1b[31m", "h": " q"}
    shown = 'a=3, b="3", c=null, d="null", e="", f=q, g="q\\n\\u001b[31m", h=" q"'
    assert describe_selectors(given) == shown


@pytest.mark.parametrize("link", [False, True])
def test_only_files_are_replaced_and_links_stay_links(tmp_path: Path, link: bool) -> None:
    target = tmp_path / "elsewhere" / "rank.json"
    target.parent.mkdir()
    path = tmp_path / "rank.json"
    if link:
        path.symlink_to(target)
        dense_manifests()[0].write(path)
        assert path.is_symlink() and Manifest.read(target) == dense_manifests()[0]
    else:
        os.mkfifo(path)
        with pytest.raises(ManifestError, match=r"rank\.json: cannot be written \(not a regular file\)"):
            dense_manifests()[0].write(path)
        assert path.is_fifo()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**70, {1: 2}, object()])
def test_selectors_without_a_json_form_are_refused(value: object) -> None:
    given = dense_manifests()[0].document
    layer = Layer(
        "l", "", (TensorEntry("w", "F32", (2,)),), (Application((given.sources[0].name,), "w", {"s": value}),)
    )
    parts = {
        name: getattr(given, name)
        for name in ("engine", "topology", "rank", "model", "checkpoint", "sources", "summary")
    }
    with pytest.raises(ManifestError, match=r"layer 'l', tensor 'w': selectors"):
        Manifest.build(**parts, layers=[layer])


def test_what_only_equals_a_default_is_left_out_like_the_default() -> None:
    """A string that was read from a file or put together is another object than the one in the code."""

    def fresh(text: str) -> str:
        return "".join(list(text))

    given = dense_manifests()[0].document
    layers = [
        msgspec.structs.replace(
            layer,
            tensors=tuple(msgspec.structs.replace(t, kind=fresh(t.kind)) for t in layer.tensors),
            applications=tuple(
                msgspec.structs.replace(a, attribution=fresh("storage"), count=int("1")) for a in layer.applications
            ),
        )
        for layer in given.layers
    ]
    engine = msgspec.structs.replace(given.engine, target=fresh("cpu"))
    checkpoint = msgspec.structs.replace(given.checkpoint, kind=fresh("files"))
    names = ("topology", "rank", "model", "sources", "summary")
    parts = {name: getattr(given, name) for name in names}
    manifest = Manifest.build(**parts, engine=engine, checkpoint=checkpoint, layers=layers)
    assert manifest.to_bytes() == dense_manifests()[0].to_bytes()
