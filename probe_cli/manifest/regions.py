"""Geometry of strided views, in elements and without torch: which box of a tensor a view selects, and what a second view
with the same elements in the same order selects of another tensor.

A view walks a base tensor; every step along one of its dimensions is a step along one dimension of the base, unless the view
merges or splits dimensions (`view(-1)`, `unflatten`), or starts in the middle of a row. `decompose` undoes that: it cuts the view into
fragments whose refined dimensions each move along a single dimension of the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from probe_cli.dtypes import numel
from probe_cli.manifest.schema import View

__all__ = ["Fragment", "IndexRange", "contiguous", "decompose", "is_whole", "rescale", "slabs", "whole"]

#: Indices start, start + step, ... below stop.
IndexRange: TypeAlias = tuple[int, int, int]

_MAX_FRAGMENTS = 4096


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of a shape."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def whole(shape: tuple[int, ...]) -> View:
    """The view of a whole contiguous tensor."""
    return View(0, shape, contiguous(shape))


def is_whole(view: View, shape: tuple[int, ...]) -> bool:
    """Whether a view is all of a contiguous tensor of this shape, in order."""
    return view.offset == 0 and view.shape == shape and _same_walk(view.shape, view.stride, contiguous(shape))


def _same_walk(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    return all(size == 1 or a == b for size, a, b in zip(shape, one, other))


@dataclass(frozen=True)
class Fragment:
    """A part of a view, refined so that each of its dimensions moves along one dimension of the base.

    `ranges`: (start, size) in each dimension of the original view. `factors`: how each of those is split, outermost
    first. `moves`: for each refined dimension the base dimension (-1 for none: stride 0) and the step along it. `start`: base
    coordinates of the first element.
    """

    ranges: tuple[tuple[int, int], ...]
    factors: tuple[tuple[int, ...], ...]
    moves: tuple[tuple[int, int], ...]
    start: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for factors in self.factors for size in factors)

    def of(self, view: View) -> View:
        """The same elements, in the same order, of another view with the shape of the original one."""
        offset = view.offset
        strides: list[int] = []
        for (start, _), factors, stride in zip(self.ranges, self.factors, view.stride):
            offset += start * stride
            inner = stride
            walk: list[int] = []
            for size in reversed(factors):
                walk.append(inner)
                inner *= size
            strides += reversed(walk)
        return View(offset, self.shape, tuple(strides))


def decompose(view: View, shape: tuple[int, ...], stride: tuple[int, ...] | None = None) -> list[Fragment] | None:
    """Cut a view of a base tensor (`shape`, `stride`, offset 0) into fragments; None if it does not walk along the
    base's dimensions (a diagonal, a view that leaves the base, a base that overlaps itself)."""
    strides = contiguous(shape) if stride is None else stride
    dims = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: strides[d], reverse=True)
    base = [(d, shape[d], strides[d]) for d in dims]
    if any(outer[2] < inner[2] * inner[1] for outer, inner in pairwise(base)) or (base and base[-1][2] < 1):
        return None
    fragments: list[Fragment] = []
    if 0 in view.shape:
        return fragments
    pending = [(tuple((0, size) for size in view.shape), view.offset)]
    while pending:
        ranges, offset = pending.pop()
        result = _refine(ranges, offset, view.stride, base, len(shape))
        if result is None or len(fragments) + len(pending) > _MAX_FRAGMENTS:
            return None
        if isinstance(result, Fragment):
            fragments.append(result)
        else:  # (dimension, indices before the cut)
            dim, cut = result
            start, size = ranges[dim]
            head = (*ranges[:dim], (start, cut), *ranges[dim + 1 :])
            tail = (*ranges[:dim], (start + cut, size - cut), *ranges[dim + 1 :])
            pending.append((tail, offset + cut * view.stride[dim]))
            pending.append((head, offset))
    return fragments


def _refine(
    ranges: tuple[tuple[int, int], ...],
    offset: int,
    strides: tuple[int, ...],
    base: list[tuple[int, int, int]],
    ndim: int,
) -> Fragment | tuple[int, int] | None:
    """One fragment, or where to cut the view so that its parts can be fragments, or None."""
    start = [0] * ndim
    rest = offset
    for dim, size, stride in base:
        start[dim], rest = divmod(rest, stride)
        if start[dim] >= size:
            return None
    if rest:
        return None
    reach = list(start)
    factors: list[tuple[int, ...]] = [()] * len(ranges)
    moves: list[list[tuple[int, int]]] = [[] for _ in ranges]
    # Small steps first: they decide whether a larger step starts at the edge of a row.
    for view_dim in sorted(range(len(ranges)), key=lambda d: strides[d]):
        size, step = ranges[view_dim][1], strides[view_dim]
        split: list[int] = []
        move: list[tuple[int, int]] = []
        position = len(base) - 1
        while size > 1 and step > 0:
            while position > 0 and base[position - 1][2] <= step:
                position -= 1
            if position < 0 or step % base[position][2]:
                return None
            dim, length, stride = base[position]
            stride_steps = step // stride
            room = (length - 1 - reach[dim]) // stride_steps + 1
            if size <= room:
                split.append(size)
                move.append((dim, stride_steps))
                reach[dim] += stride_steps * (size - 1)
                size = 1
                break
            # The walk crosses the edge of a row: it must continue evenly in the next dimension out.
            if position == 0 or base[position - 1][2] != stride * length or length % stride_steps:
                return None
            row = length // stride_steps
            if start[dim] >= stride_steps or reach[dim] >= stride_steps:
                return (view_dim, room) if not split and reach[dim] == start[dim] else None
            if size % row:
                return (view_dim, size - size % row) if not split else None
            split.append(row)
            move.append((dim, stride_steps))
            reach[dim] += stride_steps * (row - 1)
            size //= row
            step = stride * length
            position -= 1
        if size > 1 or not split:
            split.append(size)
            move.append((-1, 0))
        factors[view_dim] = tuple(reversed(split))
        moves[view_dim] = list(reversed(move))
    return Fragment(ranges, tuple(factors), tuple(m for per_dim in moves for m in per_dim), tuple(start))


def slabs(
    view: View, shape: tuple[int, ...], stride: tuple[int, ...] | None = None
) -> list[tuple[IndexRange, ...]] | None:
    """The elements that a view selects, as products of index ranges (one per base dimension); None if they are not."""
    fragments = decompose(view, shape, stride)
    if fragments is None:
        return None
    return [slab for fragment in fragments for slab in _slabs_of(fragment, len(shape))]


def _slabs_of(fragment: Fragment, ndim: int) -> list[tuple[IndexRange, ...]]:
    walks: list[list[tuple[int, int]]] = [[] for _ in range(ndim)]
    for size, (dim, step) in zip(fragment.shape, fragment.moves):
        if dim >= 0 and size > 1:
            walks[dim].append((step, size))
    choices: list[list[IndexRange]] = []
    for dim, start in enumerate(fragment.start):
        ranges: list[IndexRange] = [(start, start + 1, 1)]
        for step, size in sorted(walks[dim]):
            first = ranges[0]
            length = (first[1] - first[0] + first[2] - 1) // first[2]
            if len(ranges) == 1 and (length == 1 or step == first[2] * length):
                new_step = step if length == 1 else first[2]
                ranges = [(first[0], first[0] + new_step * (length * size - 1) + 1, new_step)]
            else:
                ranges = [(a + i * step, b + i * step, s) for i in range(size) for a, b, s in ranges]
        choices.append(ranges)
    products: list[tuple[IndexRange, ...]] = [()]
    for ranges in choices:
        products = [(*head, item) for head in products for item in ranges]
    return products


def rescale(view: View, numerator: int, denominator: int) -> View | None:
    """The same bytes in elements of another size: one old element is `numerator / denominator` new ones. None if the
    elements do not divide evenly. Larger elements need an innermost dimension of stride 1."""
    if numerator == denominator:
        return view
    if numerator % denominator == 0:
        factor = numerator // denominator
        scaled = tuple(s * factor for s in view.stride)
        if view.shape and view.stride[-1] == 1:
            return View(view.offset * factor, (*view.shape[:-1], view.shape[-1] * factor), (*scaled[:-1], 1))
        return View(view.offset * factor, (*view.shape, factor), (*scaled, 1))
    if denominator % numerator:
        return None
    factor = denominator // numerator
    if not view.shape or view.stride[-1] != 1 or view.shape[-1] % factor or view.offset % factor:
        return None
    if any(s % factor for s in view.stride[:-1]):
        return None
    return View(
        view.offset // factor,
        (*view.shape[:-1], view.shape[-1] // factor),
        (*(s // factor for s in view.stride[:-1]), 1),
    )


def elements(view: View) -> int:
    """How many elements a view walks, repeats included."""
    return numel(view.shape)
