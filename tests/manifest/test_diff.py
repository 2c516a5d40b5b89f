"""Every kind of change to a manifest is found, classed by what it does to a serving process, and enough to rebuild
it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from probe_cli.checkpoint import Checkpoint
from probe_cli.errors import ManifestError, UsageError
from probe_cli.manifest import Bundle, Manifest
from probe_cli.manifest.canonical import digest
from probe_cli.manifest.diff import DiffReport, diff
from probe_cli.manifest.diff_patch import apply_index, apply_rank
from probe_cli.manifest.diff_rules import KINDS
from probe_cli.manifest.schema import Application, Coverage, Layer, ManifestDocument, TensorEntry, View, Write
from probe_cli.topology import Rank, Topology
from tests.manifest import corpus
from tests.manifest.corpus import Tensors

Layers = tuple[Layer, ...]
replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(corpus.write(tmp_path_factory.mktemp("original"), corpus.tensors()))


def edit(number: int, change: Callable[[Layer], Layer]) -> Callable[[Rank, Layers], Layers]:
    """Change one layer of every rank."""
    return lambda rank, made: (*made[:number], change(made[number]), *made[number + 1 :])


def application(number: int, **fields: Any) -> Callable[[Layer], Layer]:
    return lambda layer: replace(
        layer,
        applications=tuple(replace(a, **fields) if i == number else a for i, a in enumerate(layer.applications)),
    )


def tensor(number: int, **fields: Any) -> Callable[[Layer], Layer]:
    return lambda layer: replace(
        layer, tensors=tuple(replace(t, **fields) if i == number else t for i, t in enumerate(layer.tensors))
    )


QKV, O_PROJ, NORM, EXPERTS = 1, 2, 3, 4
CHANGES: dict[str, Callable[[Rank, Layers], Layers]] = {
    "layer-removed": lambda rank, made: made[:-1],
    "layer-added": lambda rank, made: (
        *made,
        Layer("extra", "Linear", (TensorEntry("w", "BF16", (8,)),), (Application(("model.norm.weight",), "w"),)),
    ),
    "layer-renamed": edit(NORM, lambda layer: replace(layer, name="model.layers.0.pre_norm")),
    "empty-layer-added": lambda rank, made: (
        *made,
        Layer("rotary", "Rotary", (TensorEntry("cos", "F32", (4,), kind="buffer"),)),
    ),
    "layer-class-changed": edit(QKV, lambda layer: replace(layer, class_name="Other")),
    "layer-order-changed": lambda rank, made: (made[1], made[0], *made[2:]),
    "tensor-added": edit(
        QKV, lambda layer: replace(layer, tensors=(*layer.tensors, TensorEntry("scale", "F32", (), kind="buffer")))
    ),
    "tensor-changed": edit(QKV, tensor(0, shape=(24, 8), dtype="F16")),
    "alias-changed": edit(QKV, tensor(0, alias="model.embed_tokens.weight")),
    "tensor-persistence-changed": edit(QKV, tensor(0, persistent=False)),
    "coverage-changed": edit(QKV, tensor(0, coverage=Coverage(8, (((11, 12), (0, 8)),)))),
    "tensor-order-changed": edit(EXPERTS, lambda layer: replace(layer, tensors=layer.tensors[::-1])),
    "application-added": edit(
        QKV,
        lambda layer: replace(layer, applications=(*layer.applications, Application(("model.norm.weight",), "weight"))),
    ),
    "application-removed": edit(QKV, lambda layer: replace(layer, applications=layer.applications[1:])),
    "application-order-changed": edit(QKV, lambda layer: replace(layer, applications=layer.applications[::-1])),
    "count-changed": edit(QKV, application(1, count=3)),
    "application-kind-changed": edit(QKV, application(1, direct=True)),
    "attribution-changed": edit(QKV, application(1, attribution="stream")),
    "selectors-changed": edit(QKV, application(1, selectors={"loaded_shard_id": 7})),
    "regions-changed": edit(QKV, application(1, writes=(Write(dst=View(0, (4, 8), (8, 1))),))),
    "region-notes-changed": edit(NORM, application(0, writes=(Write(computed=True),))),
}
ALSO = {
    "layer-removed": {"source-removed", "summary-changed", "source-now-unused"},
    "layer-added": {"summary-changed"},
    "empty-layer-added": {"summary-changed"},
    "tensor-added": {"summary-changed"},
    "application-added": {"summary-changed"},
    "application-removed": {"source-removed", "summary-changed", "source-now-unused"},
    "count-changed": {"summary-changed"},
    "region-notes-changed": {"regions-changed"},
}


def plain(manifest: Manifest | Bundle) -> Any:
    return json.loads(manifest.to_bytes() if isinstance(manifest, Manifest) else manifest.index_bytes())


def without_digests(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in ("digest", "contract_digest", "ranks")}


def patched(report: DiffReport, old: Manifest) -> Manifest:
    """`old` after the changes of a report, with digests calculated anew."""
    document = apply_rank(plain(old), report.changes, old.rank.index)
    typed = msgspec.convert(without_digests(document) | {"digest": "", "contract_digest": ""}, ManifestDocument)
    names = ("engine", "topology", "rank", "model", "checkpoint", "sources", "layers", "summary")
    return Manifest.build(**{name: getattr(typed, name) for name in names})


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_to_a_contract_is_found_in_every_rank_and_can_be_applied(kind: str, checkpoint: Checkpoint) -> None:
    old = corpus.bundle(checkpoint)
    new = corpus.bundle(checkpoint, corpus.manifests(checkpoint, change=CHANGES[kind]))
    report = diff(old, new)
    found = {change.kind for change in report.changes}
    if kind == "region-notes-changed":  # a write came with it
        assert found == {"regions-changed"}
    else:
        assert kind in found
    assert found <= {kind} | ALSO.get(kind, set())
    assert {change.rank for change in report.changes if change.kind == kind} <= {0, 1}
    assert report.worst == KINDS[kind].change_class or kind in ALSO
    for rank in (0, 1):
        assert patched(report, old.manifest(rank)) == new.manifest(rank)
    assert without_digests(apply_index(plain(old), report.changes)) == without_digests(plain(new))


def test_a_note_on_the_same_elements_is_compatible(checkpoint: Checkpoint) -> None:
    change = lambda computed: edit(NORM, application(0, writes=(Write(computed=computed),)))  # noqa: E731
    old, new = (corpus.manifests(checkpoint, change=change(computed))[0] for computed in (False, True))
    (found,) = diff(old, new).changes
    assert (found.kind, found.change_class, found.subject, found.into) == (
        "region-notes-changed",
        "compatible",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.input_layernorm.weight",
    )


IDENTITIES: dict[str, tuple[dict[str, Any], str]] = {
    "engine": ({"engine": replace(corpus.ENGINE, name="other")}, "engine-changed"),
    "version": ({"engine": replace(corpus.ENGINE, version="2")}, "engine-version-changed"),
    "torch": ({"engine": replace(corpus.ENGINE, torch="2.14.0")}, "torch-changed"),
    "target": ({"engine": replace(corpus.ENGINE, target="cuda:sm90")}, "target-changed"),
    "emulated": ({"engine": replace(corpus.ENGINE, emulated=True)}, "emulation-changed"),
    "arguments": ({"engine": replace(corpus.ENGINE, arguments={"a.b": 1})}, "engine-arguments-changed"),
    "none": ({"engine": replace(corpus.ENGINE, arguments={})}, "engine-arguments-changed"),
    "class": ({"model": replace(corpus.MODEL, class_name="Other")}, "model-changed"),
    "config": ({"model": corpus.MODEL}, "config-changed"),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_a_change_of_identity_is_told_once_and_can_be_applied(name: str, checkpoint: Checkpoint) -> None:
    fields, kind = IDENTITIES[name]
    base = {"model": replace(corpus.MODEL, config_digest="sha256:" + "8" * 64)}
    old = corpus.bundle(checkpoint, corpus.manifests(checkpoint, **base))
    new = corpus.bundle(checkpoint, corpus.manifests(checkpoint, **{**base, **fields}))
    report = diff(old, new)
    told = list(report.told())
    expected = {kind, "config-changed"} if name == "class" else {kind}
    assert {(change.kind, change.rank) for change in told} == {(k, None) for k in expected}
    for rank in (0, 1):
        assert patched(report, old.manifest(rank)) == new.manifest(rank)
    assert without_digests(apply_index(plain(old), report.changes)) == without_digests(plain(new))


def other(folder: Path, change: Callable[[Tensors], Tensors]) -> Checkpoint:
    return Checkpoint.open(corpus.write(folder, change(corpus.tensors())))


def drop(name: str) -> Callable[[Tensors], Tensors]:
    return lambda given: {key: value for key, value in given.items() if key != name}


NORM_SOURCE = "model.layers.1.input_layernorm.weight"
MTP = "model.mtp.0.proj.weight"
SOURCES: dict[str, tuple[Callable[[Tensors], Tensors], set[str], str]] = {
    "dropped": (drop(NORM_SOURCE), {"source-removed"}, NORM_SOURCE),
    "added": (lambda t: t | {"new": ("F32", (3,), "a.safetensors")}, {"source-added"}, "new"),
    "renamed": (
        lambda t: {("policy." + k if k == NORM_SOURCE else k): v for k, v in t.items()},
        {"source-renamed"},
        NORM_SOURCE,
    ),
    "reshaped": (lambda t: t | {NORM_SOURCE: ("BF16", (9,), "b.safetensors")}, {"source-changed"}, NORM_SOURCE),
    "retyped": (lambda t: t | {NORM_SOURCE: ("F32", (8,), "b.safetensors")}, {"source-changed"}, NORM_SOURCE),
    "moved": (
        lambda t: t | {NORM_SOURCE: ("BF16", (8,), "a.safetensors")},
        {"source-moved", "source-order-changed"},
        NORM_SOURCE,
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_two_checkpoints_are_compared_by_their_headers(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    change, kinds, subject = SOURCES[name]
    report = diff(checkpoint, other(tmp_path, change))
    assert {c.kind for c in report.changes} == kinds
    assert subject in {c.subject for c in report.changes}
    assert report.worst == ("compatible" if name in ("added", "moved") else "breaking")


def test_an_unused_source_may_go(checkpoint: Checkpoint, tmp_path: Path) -> None:
    less = other(tmp_path, drop(MTP))
    report = diff(corpus.bundle(checkpoint), corpus.bundle(less))
    assert [(c.kind, c.subject) for c in report.told() if c.section == "sources"] == [("unused-source-removed", MTP)]
    assert report.worst == "compatible"


def test_renamed_sources_are_recognized_in_the_contracts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    renamed = other(tmp_path, lambda t: {k.replace("model.layers.", "model.blocks."): v for k, v in t.items()})

    def change(rank: Rank, made: Layers) -> Layers:
        rows = msgspec.to_builtins(made)
        for layer in rows:
            for row in layer.get("applications", ()):
                row["sources"] = [name.replace("model.layers.", "model.blocks.") for name in row["sources"]]
        return msgspec.convert(rows, tuple[Layer, ...])

    old = corpus.bundle(checkpoint)
    new = corpus.bundle(renamed, corpus.manifests(renamed, change=change))
    report = diff(old, new)
    kinds = {c.kind for c in report.told()}
    assert {"source-renamed", "application-renamed"} <= kinds
    assert not kinds & {"application-added", "application-removed", "source-removed", "needed-source-added"}
    for rank in (0, 1):
        assert patched(report, old.manifest(rank)) == new.manifest(rank)
    assert without_digests(apply_index(plain(old), report.changes)) == without_digests(plain(new))


def test_a_renamed_source_is_the_same_where_selectors_hold_a_name(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Experts' loaders are told the parameter's name, which is renamed with the layer."""

    def named(prefix: str, rename: bool) -> Callable[[Rank, Layers], Layers]:
        def application(layer: Layer, one: Application) -> Application:
            sources = tuple(n.replace("model.layers.", "model.blocks.") for n in one.sources) if rename else one.sources
            selectors = {**one.selectors, "weight_name": f"{prefix}.{layer.name}.{one.tensor}"}
            return replace(one, sources=sources, selectors=selectors)

        return lambda rank, made: tuple(
            replace(layer, applications=tuple(application(layer, one) for one in layer.applications)) for layer in made
        )

    renamed = other(tmp_path, lambda t: {k.replace("model.layers.", "model.blocks."): v for k, v in t.items()})
    old = corpus.bundle(checkpoint, corpus.manifests(checkpoint, change=named("a", False)))
    new = corpus.bundle(renamed, corpus.manifests(renamed, change=named("b", True)))
    report = diff(old, new)
    moved = {c.kind for c in report.changes if c.subject.startswith("model.layers.") and c.section != "sources"}
    assert "application-renamed" in moved and not moved & {"application-added", "application-removed"}
    for rank in old.ranks:
        assert patched(report, old.manifest(rank)) == new.manifest(rank)


def test_renamed_layers_keep_their_details(checkpoint: Checkpoint) -> None:
    def change(rank: Rank, made: Layers) -> Layers:
        return tuple(
            replace(layer, name=layer.name.replace("self_attn", "attention"))
            if "qkv" not in layer.name
            else application(0, count=2)(replace(layer, name=layer.name.replace("self_attn", "attention")))
            for layer in made
        )

    old = corpus.manifests(checkpoint)[1]
    new = corpus.manifests(checkpoint, change=change)[1]
    report = diff(old, new)
    assert sorted((c.kind, c.subject) for c in report.changes if c.kind == "layer-renamed") == [
        ("layer-renamed", f"model.layers.{block}.self_attn.o_proj") for block in (0, 1)
    ]
    assert patched(report, old) == new


def test_ranks_that_came_and_went(checkpoint: Checkpoint) -> None:
    whole, part = corpus.bundle(checkpoint), corpus.bundle(checkpoint, corpus.manifests(checkpoint)[:1])
    assert ("rank-removed", 1) in {(c.kind, c.rank) for c in diff(whole, part).changes}
    assert ("rank-added", 1) in {(c.kind, c.rank) for c in diff(part, whole).changes}


def test_another_topology_is_breaking(checkpoint: Checkpoint) -> None:
    four = corpus.bundle(checkpoint, corpus.manifests(checkpoint, Topology(tp=4, ep=4)))
    report = diff(corpus.bundle(checkpoint), four)
    assert ("topology-changed", "topology.tp") in {(c.kind, c.subject) for c in report.told()}
    assert report.worst == "breaking"


def test_a_rank_of_a_bundle_against_a_manifest(checkpoint: Checkpoint) -> None:
    old = corpus.bundle(checkpoint)
    new = corpus.manifests(checkpoint, change=CHANGES["count-changed"])[1]
    report = diff(old, new)
    assert ("count-changed", 1) in {(c.kind, c.rank) for c in report.changes}
    with pytest.raises(UsageError, match="manifest of rank 1, not of rank 0"):
        diff(old, new, rank=0)


def test_equal_inputs_have_no_difference(checkpoint: Checkpoint) -> None:
    assert diff(corpus.bundle(checkpoint), corpus.bundle(checkpoint)).changes == ()
    assert diff(checkpoint, checkpoint).changes == ()
    assert diff(checkpoint, checkpoint).worst is None


def test_a_manifest_and_a_checkpoint_cannot_be_compared(checkpoint: Checkpoint) -> None:
    with pytest.raises(UsageError, match="cannot be compared with diff"):
        diff(corpus.bundle(checkpoint), checkpoint)


def test_sections_can_be_asked_for(checkpoint: Checkpoint) -> None:
    change = lambda rank, made: CHANGES["selectors-changed"](rank, CHANGES["layer-class-changed"](rank, made))  # noqa: E731
    report = diff(*(corpus.manifests(checkpoint, change=c)[0] for c in (lambda rank, made: made, change)))
    assert {c.kind for c in report.only(["selectors"]).changes} == {"selectors-changed"}
    assert {c.kind for c in report.only(["layers"]).changes} == {"layer-class-changed"}


#: Edits that keep a manifest valid, drawn in any number and order.
EDITS = [
    CHANGES[kind]
    for kind in CHANGES
    if kind not in ("layer-added", "empty-layer-added", "layer-removed", "layer-renamed")
] + [
    lambda rank, made: made[1:],
    lambda rank, made: made[::-1],
    lambda rank, made: tuple(replace(layer, name=f"x.{layer.name}") for layer in made),
    lambda rank, made: tuple(replace(layer, applications=layer.applications[:-1]) for layer in made),
    edit(2, lambda layer: replace(layer, applications=layer.applications * 2)),
    edit(3, tensor(0, coverage=None)),
]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_diff_applied_as_a_patch_gives_the_new_manifest(data: st.DataObject, checkpoint: Checkpoint) -> None:
    def side() -> Manifest:
        edits = data.draw(st.lists(st.sampled_from(range(len(EDITS))), max_size=5))

        def change(rank: Rank, made: Layers) -> Layers:
            for number in edits:
                if len(made) > 5 and all(layer.tensors for layer in made):
                    made = EDITS[number](rank, made)
            return made

        return corpus.manifests(checkpoint, change=change)[1]

    try:
        old, new = side(), side()
    except ManifestError:  # together, these edits make no valid manifest
        reject()
    report = diff(old, new)
    assert patched(report, old) == new
    assert (report.changes == ()) == (old == new)
    back = diff(new, old)
    assert patched(back, new) == old
    assert digest(plain(old)) != digest(plain(new)) or report.changes == ()
