"""What changed between two documents: identity, sources, layers. Layers whose text is equal are never decoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from probe_cli.manifest.diff_change import Change
from probe_cli.manifest.diff_layers import compare_layer, layer_signature
from probe_cli.manifest.diff_lists import diff_list
from probe_cli.manifest.renames import find_renames

__all__ = ["DERIVED", "compare_index", "compare_rank", "compare_sources", "source_renames"]

Json: TypeAlias = dict[str, Any]
_Raw: TypeAlias = dict[str, msgspec.Raw]

#: What follows from the rest of a document, and is calculated again when a patch is applied.
DERIVED = frozenset({"digest", "contract_digest", "ranks"})

#: Kind of change by the path of the field; the longest prefix counts.
_FIELDS = {
    "format": "format-changed",
    "version": "format-changed",
    "engine.name": "engine-changed",
    "engine.version": "engine-version-changed",
    "engine.torch": "torch-changed",
    "engine.target": "target-changed",
    "engine.emulated": "emulation-changed",
    "engine.arguments": "engine-arguments-changed",
    "topology": "topology-changed",
    "rank": "rank-changed",
    "model.class": "model-changed",
    "model.architecture": "model-changed",
    "model.config_digest": "config-changed",
    "checkpoint.kind": "checkpoint-kind-changed",
    "checkpoint.revision": "revision-changed",
    "checkpoint.repo_id": "revision-changed",
    "checkpoint": "checkpoint-changed",
    "summary": "summary-changed",
}
_OBJECTS = ("engine", "engine.arguments", "topology", "rank", "model", "checkpoint", "summary")
_ABSENT = object()

_raws = msgspec.json.Decoder(dict[str, msgspec.Raw])
_raw_list = msgspec.json.Decoder(list[msgspec.Raw])
_objects = msgspec.json.Decoder(dict[str, Any])
_object_list = msgspec.json.Decoder(list[dict[str, Any]])


class _Named(msgspec.Struct, gc=False):
    name: str


_names = msgspec.json.Decoder(list[_Named])


def compare_index(old: bytes, new: bytes) -> list[Change]:
    """Changes between the indices of two bundles, their ranks aside."""
    before, after = _raws.decode(old), _raws.decode(new)
    changes = _fields(before, after, None, echo=False, lists=frozenset({"sources", "unused", "unfed"}))
    unused_before = _reasons(before)
    unused_after = _reasons(after)
    if bytes(before["sources"]) != bytes(after["sources"]):
        changes += compare_sources(
            _object_list.decode(before["sources"]), _object_list.decode(after["sources"]), unused_before, unused_after
        )
    changes += _unused(unused_before, unused_after, before, after)
    unfed = [msgspec.json.decode(side["unfed"]) if "unfed" in side else {} for side in (before, after)]
    for name in sorted(unfed[0].keys() | unfed[1].keys()):
        if unfed[0].get(name) != unfed[1].get(name):
            changes.append(Change(kind="unfed-changed", subject=name, old=unfed[0].get(name), new=unfed[1].get(name)))
    return changes


def compare_rank(
    old: bytes, new: bytes, rank: int | None, renamed: Mapping[str, str] | None = None, *, echo: bool = False
) -> list[Change]:
    """Changes between two manifests of a rank. `echo` marks what the index says too: identity and sources."""
    before, after = _raws.decode(old), _raws.decode(new)
    changes = _fields(before, after, rank, echo=echo, lists=frozenset({"sources", "layers"}))
    if bytes(before["sources"]) != bytes(after["sources"]):
        pair = _object_list.decode(before["sources"]), _object_list.decode(after["sources"])
        renamed = renamed if renamed is not None else source_renames(*pair)
        found = compare_sources(*pair, {}, {}, renamed)
        changes += [msgspec.structs.replace(change, rank=rank, echo=echo) for change in found]
    if bytes(before["layers"]) != bytes(after["layers"]):
        changes += _layers(before["layers"], after["layers"], rank, renamed or {})
    return changes


def source_renames(old: list[Json], new: list[Json]) -> dict[str, str]:
    """Sources that went and came under another name, with equal dtype and shape."""
    before = {source["name"]: source for source in old}
    after = {source["name"]: source for source in new}
    renames = find_renames(
        {name: (s["dtype"], tuple(s["shape"])) for name, s in before.items() if name not in after},
        {name: (s["dtype"], tuple(s["shape"])) for name, s in after.items() if name not in before},
    )
    return {left: right for rename in renames for left, right in rename.pairs}


def compare_sources(
    old: list[Json],
    new: list[Json],
    unused_before: Mapping[str, str],
    unused_after: Mapping[str, str],
    renamed: Mapping[str, str] | None = None,
    *,
    used: bool = True,
) -> list[Change]:
    """Changes between two lists of sources. `used`: a source that is not listed as unused is part of a contract."""
    renamed = source_renames(old, new) if renamed is None else renamed
    lists = diff_list([s["name"] for s in old], [s["name"] for s in new], renamed)
    changes: list[Change] = []
    for at in lists.removed:
        name = old[at]["name"]
        kind = "unused-source-removed" if name in unused_before else "source-removed"
        changes.append(Change(kind=kind, subject=name, old=old[at], at=at))
    for to in lists.added:
        name = new[to]["name"]
        kind = "needed-source-added" if used and name not in unused_after else "source-added"
        changes.append(Change(kind=kind, subject=name, new=new[to], to=to))
    for at, to in lists.kept:
        if old[at] != new[to]:
            changes.append(_source(at, old[at], new[to], old[at]["name"] in unused_before))
    if lists.order is not None:
        changes.append(Change(kind="source-order-changed", subject="sources", new=lists.order))
    return changes


def _source(at: int, old: Json, new: Json, unused: bool) -> Change:
    if old["name"] != new["name"]:
        kind = "source-renamed"
    elif (old["dtype"], old["shape"]) != (new["dtype"], new["shape"]):
        kind = "source-changed"
    else:
        return Change(kind="source-moved", subject=old["name"], old=old, new=new, at=at)
    return Change(kind=f"unused-{kind}" if unused else kind, subject=old["name"], old=old, new=new, at=at)


def _reasons(index: _Raw) -> dict[str, str]:
    unused = msgspec.json.decode(index["unused"], type=dict[str, list[str]]) if "unused" in index else {}
    return {name: reason for reason, names in unused.items() for name in names}


def _unused(before: Mapping[str, str], after: Mapping[str, str], old: _Raw, new: _Raw) -> list[Change]:
    changes: list[Change] = []
    if before == after:
        return changes
    there = [{source.name for source in _names.decode(side["sources"])} for side in (old, new)]
    for name in {**before, **after}:
        if before.get(name) == after.get(name):
            continue
        kind = "unused-reason-changed"
        if name not in before:
            kind = "source-now-unused" if name in there[0] else kind
        elif name not in after:
            kind = "source-now-used" if name in there[1] else kind
        # Of a source that came or went, the list of sources has told it.
        echo = not all(name in names for names in there)
        changes.append(Change(kind=kind, subject=name, old=before.get(name), new=after.get(name), echo=echo))
    return changes


def _fields(old: _Raw, new: _Raw, rank: int | None, *, echo: bool, lists: frozenset[str]) -> list[Change]:
    changes: list[Change] = []

    def compare(path: str, left: Any, right: Any) -> None:
        if left == right:
            return
        if path in _OBJECTS and isinstance(left, dict) and isinstance(right, dict):
            for field in sorted(left.keys() | right.keys()):
                compare(f"{path}.{field}", left.get(field, _ABSENT), right.get(field, _ABSENT))
            return
        changes.append(
            Change(
                kind=_kind(path),
                subject=path,
                rank=rank,
                echo=echo and not path.startswith("summary"),
                # Wrapped, so that null and absent stay apart.
                old=None if left is _ABSENT else [left],
                new=None if right is _ABSENT else [right],
            )
        )

    for field in sorted((old.keys() | new.keys()) - DERIVED - lists):
        left, right = old.get(field), new.get(field)
        if left is None or right is None or bytes(left) != bytes(right):
            compare(
                field,
                _ABSENT if left is None else msgspec.json.decode(left),
                _ABSENT if right is None else msgspec.json.decode(right),
            )
    return changes


def _kind(path: str) -> str:
    while path:
        if path in _FIELDS:
            return _FIELDS[path]
        path = path.rpartition(".")[0]
    return "field-changed"


def _layers(old: msgspec.Raw, new: msgspec.Raw, rank: int | None, renamed: Mapping[str, str]) -> list[Change]:
    texts = _raw_list.decode(old), _raw_list.decode(new)
    names = [n.name for n in _names.decode(old)], [n.name for n in _names.decode(new)]
    gone = [i for i, name in enumerate(names[0]) if name not in set(names[1])]
    came = [i for i, name in enumerate(names[1]) if name not in set(names[0])]
    decoded_old = {i: _objects.decode(texts[0][i]) for i in gone}
    decoded_new = {i: _objects.decode(texts[1][i]) for i in came}
    renames = find_renames(
        {names[0][i]: layer_signature(layer) for i, layer in decoded_old.items()},
        {names[1][i]: layer_signature(layer) for i, layer in decoded_new.items()},
    )
    pairs = {left: right for rename in renames for left, right in rename.pairs}
    lists = diff_list(names[0], names[1], pairs)
    changes: list[Change] = []
    for at in lists.removed:
        layer = decoded_old[at]
        changes.append(Change(kind=_layer_kind("removed", layer), subject=names[0][at], rank=rank, old=layer, at=at))
    for to in lists.added:
        layer = decoded_new[to]
        changes.append(Change(kind=_layer_kind("added", layer), subject=names[1][to], rank=rank, new=layer, to=to))
    for at, to in lists.kept:
        if bytes(texts[0][at]) == bytes(texts[1][to]):
            continue
        name = names[0][at]
        before = decoded_old.get(at) or _objects.decode(texts[0][at])
        after = decoded_new.get(to) or _objects.decode(texts[1][to])
        if name != names[1][to]:
            kind = _layer_kind("renamed", before)
            changes.append(Change(kind=kind, subject=name, rank=rank, layer=name, old=name, new=names[1][to], at=at))

        def emit(kind: str, subject: str, into: str | None = None, *, layer: str = name, **fields: Any) -> None:
            changes.append(Change(kind=kind, subject=subject, rank=rank, layer=layer, into=into, **fields))

        compare_layer(before, after, emit, renamed)
    if lists.order is not None:
        changes.append(Change(kind="layer-order-changed", subject="layers", rank=rank, new=lists.order))
    return changes


def _layer_kind(what: str, layer: Json) -> str:
    return f"layer-{what}" if layer.get("applications") else f"empty-layer-{what}"
