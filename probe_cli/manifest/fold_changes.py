"""Many like changes as few: names folded into patterns, ranks joined."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec

from probe_cli.manifest.canonical import canonical_bytes
from probe_cli.manifest.diff_change import Change
from probe_cli.manifest.diff_rules import CLASSES, KINDS, ChangeClass, Section
from probe_cli.manifest.patterns import fold, merge_words

__all__ = ["FoldedChange", "change_detail", "fold_changes"]

_CLASS_ORDER = {name: index for index, name in enumerate(CLASSES)}
_LONG = 120
#: What a field means where it is left out.
_DEFAULTS = {"count": 1, "direct": False, "persistent": True, "kind": "parameter", "storage_offset": 0, "selectors": {}}
#: Ranks, and tensors that are written.
_Places: TypeAlias = tuple[set[int], set[str]]
_NO_DETAIL = frozenset(
    {"layer-order-changed", "tensor-order-changed", "application-order-changed", "source-order-changed"}
)
#: By far the most frequent, if regions change at all.
_OF_REGIONS = frozenset({"regions-changed", "region-notes-changed"})


class FoldedChange(msgspec.Struct, frozen=True):
    """Changes of one kind, with the same detail, to subjects that one pattern stands for."""

    kind: str
    change_class: ChangeClass
    section: Section
    reason: str
    subject: str
    #: Patterns of the tensors that applications write.
    into: tuple[str, ...]
    #: Distinct subjects.
    count: int
    #: Ranks; empty where it is about all that ranks have in common.
    ranks: tuple[int, ...]
    detail: str


def fold_changes(changes: Iterable[Change]) -> list[FoldedChange]:
    """Breaking changes first; within a class by kind, in the order in which kinds first appear."""
    groups: dict[tuple[str, str], dict[str, _Places]] = {}
    for change in changes:
        subjects = groups.setdefault((change.kind, change_detail(change)), {})
        places = subjects.get(change.subject)
        if places is None:
            places = subjects[change.subject] = (set(), set())
        if change.rank is not None:
            places[0].add(change.rank)
        if change.into is not None:
            places[1].add(change.into)
    folded: list[FoldedChange] = []
    for (kind, detail), subjects in groups.items():
        rule = KINDS[kind]
        for text, patterns in merge_words(fold(subjects)):
            names = [name for pattern in patterns for name in pattern.names()]
            into = merge_words(fold({tensor for name in names for tensor in subjects[name][1]}))
            folded.append(
                FoldedChange(
                    kind=kind,
                    change_class=rule.change_class,
                    section=rule.section,
                    reason=rule.reason,
                    subject=text,
                    into=tuple(target for target, _ in into),
                    count=len(names),
                    ranks=tuple(sorted(set().union(*(subjects[name][0] for name in names)))),
                    detail=detail,
                )
            )
    return sorted(folded, key=lambda change: _CLASS_ORDER[change.change_class])


def change_detail(change: Change) -> str:
    """What it was and what it is, in a few words; empty where the kind says all. Equal for like changes."""
    kind, old, new = change.kind, change.old, change.new
    if kind in _OF_REGIONS:
        return _regions(old.get("writes", []), new.get("writes", []))
    if kind in _NO_DETAIL:
        return ""
    if kind.endswith("layer-renamed"):
        return _renamed(str(old), str(new))
    if kind.endswith("source-renamed"):
        return _renamed(old["name"], new["name"])
    if kind == "application-renamed":
        return "" if len(old["sources"]) != len(new["sources"]) else _renamed(old["sources"][0], new["sources"][0])
    if kind.endswith(("-added", "-removed")):
        value = new if kind.endswith("-added") else old
        return _described(value) if isinstance(value, dict) else ""
    if change.section == "identity":
        return f"{_show(old[0] if old else None)} -> {_show(new[0] if new else None)}"
    if isinstance(old, dict) and isinstance(new, dict):
        fields = [
            f for f in sorted({*old, *new}) if old.get(f) != new.get(f) and f not in ("name", "sources", "tensor")
        ]
        before, after = {**_DEFAULTS, **old}, {**_DEFAULTS, **new}
        return ", ".join(f"{f}: {_show(before.get(f))} -> {_show(after.get(f))}" for f in fields)
    return f"{_show(old)} -> {_show(new)}"


def _renamed(old: str, new: str) -> str:
    """What happened to the name, so that a thousand like renames read the same."""
    left, right = old.split("."), new.split(".")
    head = 0
    while head < min(len(left), len(right)) and left[head] == right[head]:
        head += 1
    tail = 0
    while tail < min(len(left), len(right)) - head and left[-1 - tail] == right[-1 - tail]:
        tail += 1
    before, after = ".".join(left[head : len(left) - tail]), ".".join(right[head : len(right) - tail])
    return f"{before or '(nothing)'} -> {after or '(nothing)'}"


def _described(value: dict[str, Any]) -> str:
    if "shape" in value:
        return f"{value['dtype']} {list(value['shape'])}"
    if "class" in value:
        return f"{value['class']}, {len(value.get('applications', ()))} applications"
    if value.get("selectors"):
        # Numbers tell shards and experts apart; with them, nothing would fold.
        return "selectors " + ", ".join(sorted(value["selectors"]))
    return ""


def _regions(old: list[Any], new: list[Any]) -> str:
    """What differs between the writes of an application, without what is the same."""
    if len(old) != 1 or len(new) != 1:
        return f"{len(old)} writes -> {len(new)} writes"
    left, right = old[0], new[0]
    # A changed layout repeats in every expert and rank, offsets aside: most texts were made before.
    key = canonical_bytes(
        [_shapes(left), _shapes(right), left.get("src") == right.get("src"), left.get("dst") == right.get("dst")]
    )
    text = _texts.get(key)
    if text is None:
        text = _texts[key] = _regions_text(left, right)
    return text


_texts: dict[bytes, str] = {}


def _shapes(write: dict[str, Any]) -> dict[str, Any]:
    return {field: value[1:] if value and field in ("src", "dst") else value for field, value in write.items()}


def _regions_text(left: dict[str, Any], right: dict[str, Any]) -> str:
    same = {field for field in left if left[field] == right.get(field)}
    before, after = (
        _geometry(
            _view(None if "src" in same else side.get("src")),
            _view(None if "dst" in same else side.get("dst")),
            tuple(f"{f} {_show(side[f])}" for f in sorted(side) if f not in ("src", "dst") and f not in same),
        )
        for side in (left, right)
    )
    return f"{before} -> {after}" if before != after else f"{before}, at another offset"


_View: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...]] | None"


def _view(view: list[Any] | None) -> _View:
    # Offsets differ from shard to shard; shapes and strides tell the kind of change.
    return None if view is None else (tuple(view[1]), tuple(view[2]))


def _geometry(src: _View, dst: _View, rest: tuple[str, ...]) -> str:
    views = [f"{side} {list(v[0])} by {list(v[1])}" for side, v in (("src", src), ("dst", dst)) if v is not None]
    return ", ".join([*views, *rest]) or "the whole tensor"


def _show(value: Any) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else canonical_bytes(value).decode()
    if text.startswith("sha256:"):
        return text[:19]
    return text if len(text) <= _LONG else text[: _LONG - 3] + "..."
