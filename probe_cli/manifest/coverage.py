"""Coverage of a tensor by the writes of its applications: what is written once, never, or more than once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product

from probe_cli.dtypes import numel
from probe_cli.manifest.regions import IndexRange, is_whole, slabs
from probe_cli.manifest.schema import Box, Coverage, View

__all__ = ["Footprint", "coverage", "union_size"]

#: What one application touches: its views (None: the whole tensor), and how many times the application is required.
Footprint = tuple[Sequence[View | None], int]

_MAX_CELLS = 1 << 21


def coverage(
    shape: tuple[int, ...],
    footprints: Sequence[Footprint],
    stride: tuple[int, ...] | None = None,
    *,
    exact: bool = True,
) -> Coverage | None:
    """Gaps and overlaps of a tensor, None if every element is written by exactly one application.

    What one application writes twice (a value that is then changed in place) is no overlap. `exact=False` says that some
    view is only an upper bound. A tensor that cannot be cut into boxes is reported as inexact.
    """
    total = numel(shape)
    if total == 0:
        return None
    if len(footprints) == 1 and footprints[0][1] == 1 and exact:
        views = footprints[0][0]
        if any(view is None or is_whole(view, shape) for view in views):
            return None
    grid = _Grid.of(shape, footprints, stride)
    if grid is None:
        return Coverage(exact=False)
    gaps, overlaps = (grid.boxes(lambda count: count == 0), grid.boxes(lambda count: count > 1))
    if not gaps and not overlaps and exact:
        return None
    return Coverage(
        gap_elements=sum(map(_volume, gaps)),
        gaps=gaps,
        overlap_elements=sum(map(_volume, overlaps)),
        overlaps=overlaps,
        exact=exact,
    )


def union_size(shape: tuple[int, ...], views: Iterable[View | None], stride: tuple[int, ...] | None = None) -> int:
    """How many elements of a tensor the views select together; all of them where that cannot be told."""
    views = list(views)
    total = numel(shape)
    if not views or total == 0:
        return 0
    if any(view is None or is_whole(view, shape) for view in views):
        return total
    grid = _Grid.of(shape, [(views, 1)], stride)
    return total if grid is None else total - sum(map(_volume, grid.boxes(lambda count: count == 0)))


def _volume(box: Box) -> int:
    return numel(tuple(stop - start for start, stop in box))


class _Grid:
    """The tensor cut, in each dimension, at every edge of every slab; with a count for each cell."""

    def __init__(self, edges: list[list[int]], counts: dict[tuple[int, ...], int]) -> None:
        self.edges = edges
        self.counts = counts

    @classmethod
    def of(
        cls, shape: tuple[int, ...], footprints: Sequence[Footprint], stride: tuple[int, ...] | None
    ) -> _Grid | None:
        pieces: list[tuple[list[tuple[IndexRange, ...]], int]] = []
        everything: tuple[IndexRange, ...] = tuple((0, size, 1) for size in shape)
        for views, count in footprints:
            slab_list: list[tuple[IndexRange, ...]] = []
            for view in views:
                found = [everything] if view is None else slabs(view, shape, stride)
                if found is None:
                    return None
                slab_list += found
            pieces.append((slab_list, count))
        marks = [{0, size} for size in shape]
        for slab_list, _ in pieces:
            for slab in slab_list:
                for dim, (start, stop, step) in enumerate(slab):
                    if step == 1:
                        marks[dim] |= {start, stop}
                    else:
                        marks[dim].update(range(start, stop, step), range(start + 1, stop + 1, step))
        edges = [sorted(mark) for mark in marks]
        cells = numel(tuple(len(edge) - 1 for edge in edges))
        if cells > _MAX_CELLS:
            return None
        place = [{edge: i for i, edge in enumerate(per_dim)} for per_dim in edges]
        counts: dict[tuple[int, ...], int] = {}
        for slab_list, count in pieces:
            touched: set[tuple[int, ...]] = set()
            for slab in slab_list:
                touched.update(product(*(_cells(r, at) for r, at in zip(slab, place))))
            for cell in touched:
                counts[cell] = counts.get(cell, 0) + count
        return cls(edges, counts)

    def boxes(self, wanted: Callable[[int], bool]) -> tuple[Box, ...]:
        """The cells whose count satisfies `wanted`, merged into boxes."""
        return tuple(self._boxes((), wanted))

    def _boxes(self, prefix: tuple[int, ...], wanted: Callable[[int], bool]) -> list[Box]:
        dim = len(prefix)
        if dim == len(self.edges):
            return [()] if wanted(self.counts.get(prefix, 0)) else []
        edges, merged = self.edges[dim], []
        run_start, run = 0, None
        for cell in range(len(edges)):
            inner = self._boxes((*prefix, cell), wanted) if cell < len(edges) - 1 else None
            if inner != run:
                if run:
                    merged += [((edges[run_start], edges[cell]), *box) for box in run]
                run_start, run = cell, inner
        return merged


def _cells(indices: IndexRange, place: dict[int, int]) -> Iterable[int]:
    start, stop, step = indices
    if step == 1:
        return range(place[start], place[stop])
    return [place[i] for i in range(start, stop, step)]
