"""Fold many names into few patterns: `model.layers.{0-60}.mlp.experts.{0-255}.down_proj.weight`.

Folding is exact: the patterns together stand for the given names, each once, and for no other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product
from typing import TypeAlias

__all__ = ["Pattern", "fold", "fold_text", "format_numbers", "merge_words"]

#: A number as it is spelled in names: no leading zeros (`rank-00001` stays text), and of a sane length.
_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,17})(?![0-9])")
_DIGITS = re.compile(r"([0-9]+)")
_ODD_NUMBER = re.compile(r"0[0-9]+|[0-9]{19,}")

_Numbers: TypeAlias = tuple[int, ...]
_Product: TypeAlias = tuple[_Numbers, ...]
_Segments: TypeAlias = tuple[tuple[str, ...], ...]
_Line: TypeAlias = "tuple[_Segments, tuple[Pattern, ...]]"

_MAX_WORDS = 8


@dataclass(frozen=True)
class Pattern:
    """Names that differ in their numbers only, each number running over its values independently of the others.

    `texts` has one entry more than `values`: what stands before, between and after the numbers.
    """

    texts: tuple[str, ...]
    values: tuple[tuple[int, ...], ...] = ()

    @property
    def count(self) -> int:
        """How many names it stands for."""
        count = 1
        for numbers in self.values:
            count *= len(numbers)
        return count

    def names(self) -> Iterator[str]:
        """The names, in order of their numbers."""
        for numbers in product(*self.values):
            yield self.texts[0] + "".join(f"{n}{text}" for n, text in zip(numbers, self.texts[1:]))

    def __str__(self) -> str:
        out = [self.texts[0]]
        for numbers, text in zip(self.values, self.texts[1:]):
            out.append(str(numbers[0]) if len(numbers) == 1 else "{" + format_numbers(numbers) + "}")
            out.append(text)
        return "".join(out)


def fold(names: Iterable[str]) -> tuple[Pattern, ...]:
    """The patterns that stand for exactly these names, in the order in which their kinds first appear. Repeats count
    once."""
    patterns: list[Pattern] = []
    for texts, points in _groups(names, _DIGITS):
        # By column, since the same digits come up again and again.
        columns = [map({d: int(d) for d in set(column)}.__getitem__, column) for column in zip(*points)]
        ordered = sorted(zip(*columns)) if columns else [()]
        patterns += [Pattern(texts, values) for values in _products(ordered, len(columns))]
    return tuple(patterns)


def _groups(
    names: Iterable[str], number: re.Pattern[str]
) -> Iterator[tuple[tuple[str, ...], dict[tuple[str, ...], None]]]:
    """Names by their texts, each with the numbers that occur in it, still as spelled."""
    groups: dict[tuple[str, ...], dict[tuple[str, ...], None]] = {}
    for name in names:
        parts = number.split(name)
        texts = tuple(parts[::2])
        points = groups.get(texts)
        if points is None:
            points = groups[texts] = {}
        points[tuple(parts[1::2])] = None
    for texts, points in groups.items():
        if number is _DIGITS and any(map(_ODD_NUMBER.fullmatch, {d for column in zip(*points) for d in set(column)})):
            # Splitting at plain digits is three times faster, and nearly always the same.
            again = ["".join(f"{t}{n}" for t, n in zip(texts, (*point, ""))) for point in points]
            yield from _groups(again, _NUMBER)
        else:
            yield texts, points


def fold_text(names: Iterable[str], limit: int | None = None) -> list[str]:
    """Names as few lines, with their number where it is more than one; a last line counts what `limit` cuts."""
    merged = merge_words(fold(names))
    counted = [(text, sum(pattern.count for pattern in patterns)) for text, patterns in merged]
    shown = counted if limit is None or len(counted) <= limit else counted[:limit]
    lines = [f"{text} ({count:,})" if count > 1 else text for text, count in shown]
    if len(shown) < len(counted):
        lines.append(f"... and {sum(count for _, count in counted[len(shown) :]):,} more names")
    return lines


def merge_words(patterns: Iterable[Pattern]) -> list[tuple[str, tuple[Pattern, ...]]]:
    """Patterns that differ in one name segment as one line: `experts.{0-7}.{down_proj,up_proj}.weight`; each with
    what it was made of. Still exact: a line stands for every combination of its words."""
    lines: list[_Line] = [(tuple((segment,) for segment in str(p).split(".")), (p,)) for p in patterns]
    longest = max((len(segments) for segments, _ in lines), default=0)
    for place in reversed(range(longest)):
        groups: dict[object, tuple[list[str], _Segments, list[tuple[Pattern, ...]]]] = {}
        for number, (segments, members) in enumerate(lines):
            if place >= len(segments):
                groups[number] = ([], segments, [members])
                continue
            words, _, joined = groups.setdefault((segments[:place], segments[place + 1 :]), ([], segments, []))
            words += segments[place]
            joined.append(members)
        lines = [
            (
                (*segments[:place], tuple(words), *segments[place + 1 :]) if words else segments,
                joined[0] if len(joined) == 1 else tuple(chain.from_iterable(joined)),
            )
            for words, segments, joined in groups.values()
        ]
    return [(".".join(map(_words, segments)), members) for segments, members in lines]


def _words(words: tuple[str, ...]) -> str:
    if len(words) == 1:
        return words[0]
    shown = sorted(words)
    if len(shown) > _MAX_WORDS:
        shown = [*shown[: _MAX_WORDS - 1], f"and {len(shown) - _MAX_WORDS + 1} more"]
    return "{" + ",".join(shown) + "}"


def format_numbers(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: `0-2,5,7-8`, or `0-254 step 2`."""
    if len(numbers) > 3:
        step = numbers[1] - numbers[0]
        if step > 1 and all(b - a == step for a, b in pairwise(numbers)):
            return f"{numbers[0]}-{numbers[-1]} step {step}"
    parts: list[str] = []
    start = previous = numbers[0]
    for number in (*numbers[1:], None):
        if number is not None and number == previous + 1:
            previous = number
            continue
        parts.append(str(start) if start == previous else f"{start}{'-' if previous > start + 1 else ','}{previous}")
        if number is not None:
            start = previous = number
    return ",".join(parts)


def _products(points: Sequence[_Numbers], dims: int) -> tuple[_Product, ...]:
    """Sorted distinct points as disjoint products of sets. First numbers with equal sets of rests are joined."""
    if dims == 0:
        return ((),)
    if dims == 1:
        return ((tuple(point[0] for point in points),),)
    joined: dict[tuple[_Numbers, ...], list[int]] = {}
    start = 0
    while start < len(points):
        first, stop = points[start][0], start
        while stop < len(points) and points[stop][0] == first:
            stop += 1
        joined.setdefault(tuple(point[1:] for point in points[start:stop]), []).append(first)
        start = stop
    return tuple((tuple(firsts), *rest) for rests, firsts in joined.items() for rest in _products(rests, dims - 1))
