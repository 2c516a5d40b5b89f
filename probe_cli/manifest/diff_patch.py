"""Apply changes to a document: `apply(diff(a, b), a)` is `b`. What makes a diff known to be complete."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeAlias

from probe_cli.manifest.diff_change import Change
from probe_cli.manifest.diff_lists import apply_list

__all__ = ["apply_index", "apply_rank"]

Json: TypeAlias = dict[str, Any]

_SOURCES = frozenset({"source", "needed", "unused"})


def apply_rank(document: Json, changes: Iterable[Change], rank: int | None) -> Json:
    """The rank's document after the changes that are about this rank. Digests and summaries are left to the caller."""
    own = [change for change in changes if change.rank == rank]
    result = copy.deepcopy(document)
    _fields(result, own)
    result["sources"] = _list(result["sources"], _about_sources(own), "source-order-changed")
    result["layers"] = _layers(result["layers"], [c for c in own if c.layer is not None or "layer-" in c.kind])
    return result


def apply_index(document: Json, changes: Iterable[Change]) -> Json:
    """The bundle's index after the changes that are about all ranks. Its list of ranks is left to the caller."""
    own = [change for change in changes if change.rank is None]
    result = copy.deepcopy(document)
    _fields(result, own)
    result["sources"] = _list(result["sources"], _about_sources(own), "source-order-changed")
    order = {source["name"]: place for place, source in enumerate(result["sources"])}
    reasons = {name: reason for reason, names in document.get("unused", {}).items() for name in names}
    unfed = dict(document.get("unfed", {}))
    for change in own:
        table = unfed if change.kind == "unfed-changed" else reasons
        if change.kind in ("unfed-changed", "source-now-used", "source-now-unused", "unused-reason-changed"):
            table.pop(change.subject, None)
            if change.new is not None:
                table[change.subject] = change.new
    unused: dict[str, list[str]] = {}
    for name in sorted(reasons, key=lambda name: order.get(name, -1)):
        unused.setdefault(reasons[name], []).append(name)
    for field, value in (("unused", unused), ("unfed", unfed)):
        result.pop(field, None)
        if value:
            result[field] = value
    return result


def _about_sources(changes: Iterable[Change]) -> list[Change]:
    return [c for c in changes if c.section == "sources" and (c.at is not None or c.to is not None or _is_order(c))]


def _is_order(change: Change) -> bool:
    return change.kind.endswith("-order-changed")


def _fields(document: Json, changes: Iterable[Change]) -> None:
    for change in changes:
        if change.section != "identity" or change.kind in ("rank-added", "rank-removed"):
            continue
        *path, last = change.subject.split(".")
        place = document
        # Engine arguments may have dots in their names.
        if change.subject.startswith("engine.arguments."):
            path, last = ["engine", "arguments"], change.subject.removeprefix("engine.arguments.")
        for key in path:
            place = place.setdefault(key, {})
        if change.new is None:
            place.pop(last, None)
        else:
            place[last] = change.new[0]


def _list(old: list[Any], changes: list[Change], order_kind: str) -> list[Any]:
    """Whole elements removed, added and replaced."""
    order = [c.new for c in changes if c.kind == order_kind]
    return apply_list(
        old,
        removed=[c.at for c in changes if c.at is not None and c.new is None],
        replaced={c.at: c.new for c in changes if c.at is not None and c.new is not None},
        added={c.to: c.new for c in changes if c.to is not None},
        order=order[0] if order else None,
    )


def _layers(old: list[Json], changes: list[Change]) -> list[Json]:
    whole = [c for c in changes if c.kind.removeprefix("empty-") in ("layer-added", "layer-removed")]
    order = [c for c in changes if c.kind == "layer-order-changed"]
    within: dict[str, list[Change]] = {}
    for change in changes:
        if change.layer is not None:
            within.setdefault(change.layer, []).append(change)
    edited = [_layer(layer, within[layer["name"]]) if layer["name"] in within else layer for layer in old]
    return _list(edited, [*whole, *order], "layer-order-changed")


def _layer(layer: Json, changes: list[Change]) -> Json:
    result = dict(layer)
    for change in changes:
        if change.kind.removeprefix("empty-") == "layer-renamed":
            result["name"] = change.new
        elif change.kind in ("layer-class-changed", "layer-field-changed"):
            _merge(result, change)
    for field, prefixes in (("tensors", ("tensor-", "alias-", "coverage-")), ("applications", _APPLICATION)):
        own = [change for change in changes if change.kind.startswith(prefixes)]
        if not own:
            continue
        items = [dict(item) for item in result.pop(field, [])]
        whole: list[Change] = []
        for change in own:
            if change.kind.endswith(("-added", "-removed")) or _is_order(change):
                whole.append(change)
            elif change.at is not None:
                _merge(items[change.at], change)
        merged = _list(items, whole, "tensor-order-changed" if field == "tensors" else "application-order-changed")
        if merged:
            result[field] = merged
    return result


_APPLICATION = ("application-", "count-", "attribution-", "selectors-", "regions-", "region-")


def _merge(value: Json, change: Change) -> None:
    """Fields that `old` has go, those that `new` has come."""
    for field in change.old or {}:
        value.pop(field, None)
    value.update(change.new or {})
