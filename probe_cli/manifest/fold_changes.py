"""Many like changes as few: names folded into patterns, ranks joined."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from probe_cli.manifest.canonical import canonical_bytes
from probe_cli.manifest.diff_change import Change
from probe_cli.manifest.diff_rules import CLASSES, ChangeClass, Section
from probe_cli.manifest.patterns import fold, merge_words

__all__ = ["FoldedChange", "change_detail", "fold_changes"]

_CLASS_ORDER = {name: index for index, name in enumerate(CLASSES)}
_LONG = 120
_NO_DETAIL = frozenset(
    {"layer-order-changed", "tensor-order-changed", "application-order-changed", "source-order-changed"}
)


class FoldedChange(msgspec.Struct, frozen=True):
    """Changes of one kind, with the same detail, to subjects that one pattern stands for."""

    kind: str
    change_class: ChangeClass
    section: Section
    reason: str
    subject: str
    #: Distinct subjects.
    count: int
    #: Ranks; empty where it is about all that ranks have in common.
    ranks: tuple[int, ...]
    detail: str


def fold_changes(changes: Iterable[Change]) -> list[FoldedChange]:
    """Breaking changes first; within a class by kind, in the order in which kinds first appear."""
    groups: dict[tuple[str, str], dict[str, set[int]]] = {}
    samples: dict[tuple[str, str], Change] = {}
    for change in changes:
        key = (change.kind, change_detail(change))
        samples.setdefault(key, change)
        ranks = groups.setdefault(key, {}).setdefault(change.subject, set())
        if change.rank is not None:
            ranks.add(change.rank)
    folded: list[FoldedChange] = []
    for (kind, detail), subjects in groups.items():
        sample = samples[kind, detail]
        for text, patterns in merge_words(fold(subjects)):
            names = [name for pattern in patterns for name in pattern.names()]
            folded.append(
                FoldedChange(
                    kind=kind,
                    change_class=sample.change_class,
                    section=sample.section,
                    reason=sample.reason,
                    subject=text,
                    count=len(names),
                    ranks=tuple(sorted({rank for name in names for rank in subjects[name]})),
                    detail=detail,
                )
            )
    return sorted(folded, key=lambda change: _CLASS_ORDER[change.change_class])


def change_detail(change: Change) -> str:
    """What it was and what it is, in a few words; empty where the kind says all. Equal for like changes."""
    kind, old, new = change.kind, change.old, change.new
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
    if kind in ("regions-changed", "region-notes-changed"):
        return f"{_writes(old)} -> {_writes(new)}"
    if isinstance(old, dict) and isinstance(new, dict):
        fields = [
            f for f in sorted({*old, *new}) if old.get(f) != new.get(f) and f not in ("name", "sources", "tensor")
        ]
        return ", ".join(f"{f}: {_show(old.get(f))} -> {_show(new.get(f))}" for f in fields)
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


def _writes(value: dict[str, Any]) -> str:
    writes = value.get("writes", [])
    if len(writes) != 1:
        return f"{len(writes)} writes"
    write = writes[0]
    parts = [f"{side} {_view(write[side])}" for side in ("src", "dst") if side in write]
    parts += [f"{field} {_show(write[field])}" for field in sorted(write) if field not in ("src", "dst")]
    return ", ".join(parts) or "the whole tensor"


def _view(view: list[Any]) -> str:
    # Offsets differ from shard to shard; shapes and strides tell the kind of change.
    return f"{view[1]} by {view[2]}"


def _show(value: Any) -> str:
    if value is None:
        return "default"
    text = value if isinstance(value, str) else canonical_bytes(value).decode()
    if text.startswith("sha256:"):
        return text[:19]
    return text if len(text) <= _LONG else text[: _LONG - 3] + "..."
