"""Recognize renames: names that went and names that came, of equal shape, related by a few rules such as "without the
prefix `model.`". A rule is found on a sample and then applied to all names, so a hundred thousand of them take no
longer to compare than to walk."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

__all__ = ["Rename", "Rule", "find_renames"]

_SAMPLE = 96
_MAX_RULES = 24
_NUMBER = re.compile(r"[0-9]+")


class Rule(NamedTuple):
    """A run of name segments that became another. `place` is where the run stands: "start", "end", "middle" or
    "whole"."""

    old: str
    new: str
    place: str

    def apply(self, name: str) -> str | None:
        """The new name, None if the rule does not fit this one."""
        old, new = self.old, self.new
        if self.place == "whole":
            return new if name == old else None
        if self.place == "start":
            if old and not name.startswith(f"{old}."):
                return None
            rest = name[len(old) + 1 :] if old else name
            return f"{new}.{rest}" if new else rest
        if self.place == "end":
            if old and not name.endswith(f".{old}"):
                return None
            rest = name[: -len(old) - 1] if old else name
            return f"{rest}.{new}" if new else rest
        if f".{old}." not in name:
            return None
        return name.replace(f".{old}.", f".{new}." if new else ".", 1)

    def __str__(self) -> str:
        if self.place == "start" and not self.old:
            return f"the prefix {self.new}. is added"
        if self.place == "start" and not self.new:
            return f"the prefix {self.old}. is missing"
        if self.place == "end" and not self.old:
            return f"the suffix .{self.new} is added"
        if self.place == "end" and not self.new:
            return f"the suffix .{self.old} is missing"
        if not self.new:
            return f"{self.old} is missing"
        return f"{self.old} became {self.new}"


class Rename(NamedTuple):
    """A rule, and the names that it takes from old to new."""

    rule: Rule
    pairs: tuple[tuple[str, str], ...]


def find_renames(old: Mapping[str, Hashable], new: Mapping[str, Hashable]) -> list[Rename]:
    """Pair names of `old` with names of `new` of equal signature. Each name is in one pair at most; a pair that no
    rule of likeness supports is not made. Rules that explain most names come first."""
    left, right = dict(old), dict(new)
    renames: list[Rename] = []
    buckets = _buckets(right)
    for _ in range(_MAX_RULES):
        if not left or not right:
            break
        best: list[tuple[str, str]] = []
        best_rule: Rule | None = None
        for rule, _ in _candidates(left, right, buckets).most_common(4):
            pairs = [
                (name, target)
                for name, signature in left.items()
                if (target := rule.apply(name)) is not None and target in right and right[target] == signature
            ]
            if len(pairs) > len(best):
                best, best_rule = pairs, rule
            if len(pairs) == len(left):
                break
        if best_rule is None:
            break
        kept: dict[str, str] = {}  # by new name: two old ones may lead to it
        for name, target in best:
            kept.setdefault(target, name)
        renames.append(Rename(best_rule, tuple((name, target) for target, name in kept.items())))
        for target, name in kept.items():
            del left[name], right[target]
    return sorted(renames, key=lambda rename: -len(rename.pairs))


def _buckets(names: Mapping[str, Hashable]) -> dict[tuple[str, ...], list[str]]:
    """Names by the numbers in them: a rename seldom touches those."""
    buckets: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        buckets.setdefault(tuple(_NUMBER.findall(name)), []).append(name)
    return buckets


def _candidates(
    left: Mapping[str, Hashable], right: Mapping[str, Hashable], buckets: Mapping[tuple[str, ...], list[str]]
) -> Counter[Rule]:
    """Rules that would explain names of an even sample, with the number of names each explains."""
    votes: Counter[Rule] = Counter()
    step = max(1, len(left) // _SAMPLE)
    for name in list(left)[::step]:
        partner = _closest(name, left[name], right, buckets.get(tuple(_NUMBER.findall(name)), []))
        if partner is not None:
            votes.update(_rules(name.split("."), partner.split(".")))
    return votes


def _closest(name: str, signature: Hashable, right: Mapping[str, Hashable], bucket: list[str]) -> str | None:
    segments = name.split(".")
    best, best_score = None, 0.0
    for candidate in bucket[:512]:
        if right.get(candidate) != signature or candidate not in right:
            continue
        other = candidate.split(".")
        head, tail = _common(segments, other)
        score = (head + tail + 0.5 * _alike(segments, other, head, tail)) / max(len(segments), len(other))
        if score > best_score:
            best, best_score = candidate, score
    return best if best_score >= 0.4 else None


def _alike(one: list[str], other: list[str], head: int, tail: int) -> bool:
    """Whether what differs begins alike (`weight_scale`, `weight_scale_inv`)."""
    a, b = ".".join(one[head : len(one) - tail]), ".".join(other[head : len(other) - tail])
    return bool(a and b) and (a.startswith(b) or b.startswith(a))


def _common(one: list[str], other: list[str]) -> tuple[int, int]:
    """Equal segments at the start and, apart from those, at the end."""
    limit = min(len(one), len(other))
    head = 0
    while head < limit and one[head] == other[head]:
        head += 1
    tail = 0
    while tail < limit - head and one[-1 - tail] == other[-1 - tail]:
        tail += 1
    return head, tail


def _rules(one: list[str], other: list[str]) -> Iterator[Rule]:
    head, tail = _common(one, other)
    old, new = one[head : len(one) - tail], other[head : len(other) - tail]
    if head == 0 and tail == 0:
        yield Rule(".".join(one), ".".join(other), "whole")
    elif head == 0:
        yield Rule(".".join(old), ".".join(new), "start")
    elif tail == 0:
        yield Rule(".".join(old), ".".join(new), "end")
    else:
        # Where something was put in or taken out, a neighbour says where.
        place = "middle"
        if not old or not new:
            if not one[head - 1].isdigit():
                old, new = [one[head - 1], *old], [one[head - 1], *new]
                place = "start" if head == 1 else place
            else:
                old, new = [*old, one[len(one) - tail]], [*new, one[len(one) - tail]]
                place = "end" if tail == 1 else place
        yield Rule(".".join(old), ".".join(new), place)
