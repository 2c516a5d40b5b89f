"""The difference between two lists of things with names, and how to apply it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["ListDiff", "apply_list", "diff_list", "numbered"]


class ListDiff(NamedTuple):
    """Positions in the old list (`removed`, the first of `kept`) and in the new one (`added`, the second of `kept`)."""

    removed: list[int]
    added: list[int]
    #: Pairs (old position, new position), by old position.
    kept: list[tuple[int, int]]
    #: Old positions of what stayed, in their new order; None if that is the old one.
    order: list[int] | None


def diff_list(
    old: Sequence[Hashable], new: Sequence[Hashable], renames: Mapping[Any, Hashable] | None = None
) -> ListDiff:
    """Compare by key. Keys are unique within a list; `renames` says which old key became which new one."""
    place = {key: index for index, key in enumerate(new)}
    removed: list[int] = []
    kept: list[tuple[int, int]] = []
    for index, key in enumerate(old):
        target = place.get(renames.get(key, key) if renames else key)
        if target is None:
            removed.append(index)
        else:
            kept.append((index, target))
    stayed = {target for _, target in kept}
    added = [index for index in range(len(new)) if index not in stayed]
    targets = [target for _, target in kept]
    order = [index for index, _ in sorted(kept, key=lambda pair: pair[1])] if targets != sorted(targets) else None
    return ListDiff(removed, added, kept, order)


def apply_list(
    old: Sequence[Any],
    removed: Iterable[int],
    replaced: Mapping[int, Any],
    added: Mapping[int, Any],
    order: Sequence[int] | None,
) -> list[Any]:
    """The new list: what stayed (replaced where it changed) in its order, and what was added at its positions."""
    gone = set(removed)
    positions = order if order is not None else [index for index in range(len(old)) if index not in gone]
    result = [replaced.get(index, old[index]) for index in positions]
    for index in sorted(added):
        result.insert(index, added[index])
    return result


def numbered(keys: Iterable[Hashable]) -> list[Hashable]:
    """The keys, made unique: with the number of equal ones before."""
    seen: dict[Hashable, int] = {}
    result: list[Hashable] = []
    for key in keys:
        count = seen.get(key, 0)
        seen[key] = count + 1
        result.append((key, count))
    return result
