"""What changed within a layer: tensors, applications, selectors, counts, regions, coverage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from probe_cli.manifest.canonical import canonical_bytes
from probe_cli.manifest.diff_lists import diff_list, numbered
from probe_cli.manifest.keys import CONSTANT

__all__ = ["Emit", "compare_layer", "full_name", "layer_signature"]

Json: TypeAlias = dict[str, Any]
#: Called with the kind of a change, its subject, the tensor it goes into (of an application), and fields.
Emit: TypeAlias = Callable[..., None]

_LAYER_KNOWN = frozenset({"name", "class", "tensors", "applications"})
_TENSOR_FIELDS = ("dtype", "shape", "stride", "kind", "storage_offset")
_TENSOR_KNOWN = frozenset({*_TENSOR_FIELDS, "name", "alias", "persistent", "coverage"})
_KEY_FIELDS = ("sources", "tensor", "selectors")
_APPLICATION_KINDS = {
    "count": "count-changed",
    "direct": "application-kind-changed",
    "attribution": "attribution-changed",
    "writes": "regions-changed",
}
_NOTES = ("computed", "exact")


def full_name(layer: str, tensor: str) -> str:
    """A tensor's name in the model."""
    return f"{layer}.{tensor}" if layer else tensor


def layer_signature(layer: Json) -> bytes:
    """What two layers must have in common for one to be the other renamed: tensors and keys, without any names but
    those within the layer."""
    tensors = [[t["name"], t["dtype"], t["shape"], t.get("kind")] for t in layer.get("tensors", ())]
    # Selectors may hold the layer's name (`weight_name`), so only which there are counts.
    keys = [
        [len(a["sources"]), a["tensor"], sorted(a.get("selectors", ())), a.get("count", 1)]
        for a in layer.get("applications", ())
    ]
    return canonical_bytes([tensors, keys])


def compare_layer(old: Json, new: Json, emit: Emit, renamed_sources: Mapping[str, str]) -> None:
    """Emit every change between two forms of one layer, its name aside."""
    name = old["name"]
    if old["class"] != new["class"]:
        emit("layer-class-changed", name, old=_part(old, ("class",)), new=_part(new, ("class",)))
    for field in sorted((old.keys() | new.keys()) - _LAYER_KNOWN):
        if old.get(field) != new.get(field):
            emit("layer-field-changed", f"{name}: {field}", old=_part(old, (field,)), new=_part(new, (field,)))
    _tensors(name, old.get("tensors", []), new.get("tensors", []), emit)
    _applications(name, old.get("applications", []), new.get("applications", []), emit, renamed_sources)


def _tensors(layer: str, old: list[Json], new: list[Json], emit: Emit) -> None:
    lists = diff_list([t["name"] for t in old], [t["name"] for t in new])
    for at in lists.removed:
        emit("tensor-removed", full_name(layer, old[at]["name"]), old=old[at], at=at)
    for to in lists.added:
        emit("tensor-added", full_name(layer, new[to]["name"]), new=new[to], to=to)
    for at, to in lists.kept:
        if old[at] != new[to]:
            _tensor(layer, at, old[at], new[to], emit)
    if lists.order is not None:
        emit("tensor-order-changed", layer, new=lists.order)


def _tensor(layer: str, at: int, old: Json, new: Json, emit: Emit) -> None:
    subject = full_name(layer, old["name"])
    for kind, fields in (
        ("tensor-changed", _TENSOR_FIELDS),
        ("alias-changed", ("alias",)),
        ("tensor-persistence-changed", ("persistent",)),
        ("coverage-changed", ("coverage",)),
        ("tensor-field-changed", tuple(sorted((old.keys() | new.keys()) - _TENSOR_KNOWN))),
    ):
        if any(old.get(field) != new.get(field) for field in fields):
            emit(kind, subject, old=_part(old, fields), new=_part(new, fields), at=at)


def _part(value: Json, fields: Iterable[str]) -> Json:
    return {field: value[field] for field in fields if field in value}


def _key(application: Json, renamed: Mapping[str, str] | None = None) -> tuple[Any, ...]:
    sources = tuple(renamed.get(s, s) for s in application["sources"]) if renamed else tuple(application["sources"])
    selectors = application.get("selectors")
    return (sources, application["tensor"], canonical_bytes(selectors) if selectors else b"{}")


def _equal_keys(old: list[Json], new: list[Json]) -> bool:
    """Whether the same keys stand in the same order: then no key has to be made."""
    return len(old) == len(new) and all(
        a["sources"] == b["sources"] and a["tensor"] == b["tensor"] and a.get("selectors") == b.get("selectors")
        for a, b in zip(old, new)
    )


def _applications(layer: str, old: list[Json], new: list[Json], emit: Emit, renamed: Mapping[str, str]) -> None:
    if old == new:
        return
    if _equal_keys(old, new):
        for at, (before, after) in enumerate(zip(old, new)):
            if before != after:
                _application(layer, at, before, after, emit)
        return
    keys = numbered(map(_key, old)), numbered(map(_key, new))
    lists = diff_list(*keys)
    kinds: dict[int, str] = {}
    if lists.removed and lists.added:
        matches = _match(old, new, lists.removed, lists.added, renamed, kinds)
        lists = diff_list(*keys, {keys[0][at]: keys[1][to] for at, to in matches.items()})
    for at in lists.removed:
        emit("application-removed", *_subject(layer, old[at]), old=old[at], at=at)
    for to in lists.added:
        emit("application-added", *_subject(layer, new[to]), new=new[to], to=to)
    for at, to in lists.kept:
        if at in kinds:
            emit(kinds[at], *_subject(layer, old[at]), old=_rekey(old[at]), new=_rekey(new[to]), at=at)
        if old[at] != new[to]:
            _application(layer, at, old[at], new[to], emit)
    if lists.order is not None:
        emit("application-order-changed", layer, new=lists.order)


def _match(
    old: list[Json],
    new: list[Json],
    removed: list[int],
    added: list[int],
    renamed: Mapping[str, str],
    kinds: dict[int, str],
) -> dict[int, int]:
    """Among applications without a partner of equal key, find those that only changed selectors, or a source's name.
    Returns their positions, and says in `kinds` what happened."""
    taken: set[int] = set()
    matches: dict[int, int] = {}

    def pair(kind: str, left: Callable[[Json], Any], right: Callable[[Json], Any]) -> None:
        there: dict[Any, list[int]] = {}
        for to in added:
            if to not in taken:
                there.setdefault(right(new[to]), []).append(to)
        for at in removed:
            candidates = there.get(left(old[at])) if at not in kinds else None
            if candidates:
                to = candidates.pop(0)
                taken.add(to)
                kinds[at] = kind
                matches[at] = to

    if renamed:
        pair("application-renamed", lambda a: _key(a, renamed), _key)
    pair("selectors-changed", lambda a: _key(a)[:2], lambda a: _key(a)[:2])
    if renamed:  # selectors may hold the layer's name (`weight_name`)
        pair("application-renamed", lambda a: _key(a, renamed)[:2], lambda a: _key(a)[:2])
    return matches


def _application(layer: str, at: int, old: Json, new: Json, emit: Emit) -> None:
    fields = [
        field for field in (old if old.keys() == new.keys() else {**old, **new}) if old.get(field) != new.get(field)
    ]
    subject, into = _subject(layer, old)
    unknown: list[str] = []
    for field in fields:
        kind = _APPLICATION_KINDS.get(field)
        if field == "writes":
            before, after = old.get("writes", []), new.get("writes", [])
            kind = "region-notes-changed" if _geometry(before) == _geometry(after) else "regions-changed"
        if kind is not None:
            emit(kind, subject, into, old=_part(old, (field,)), new=_part(new, (field,)), at=at)
        elif field not in _KEY_FIELDS:
            unknown.append(field)
    if unknown:
        emit("application-field-changed", subject, into, old=_part(old, unknown), new=_part(new, unknown), at=at)


def _geometry(writes: list[Json]) -> list[Json]:
    if not any("computed" in write or "exact" in write for write in writes):
        return writes
    return [{field: value for field, value in write.items() if field not in _NOTES} for write in writes]


def _rekey(application: Json) -> Json:
    return _part(application, _KEY_FIELDS)


def _subject(layer: str, application: Json) -> tuple[str, str]:
    sources = application["sources"]
    return " + ".join(sources) or CONSTANT, full_name(layer, application["tensor"])
