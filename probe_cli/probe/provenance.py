"""Where the elements of a tensor come from: for every storage that a replay sees, which source elements it holds.

A source's own storage holds the source. A storage that an operation made holds what the operation read: exactly, piece
by piece, for copies, casts, pointwise arithmetic, concatenation and padding; as an upper bound for everything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch

from probe_cli.dtypes import numel
from probe_cli.manifest.coverage import union_size
from probe_cli.manifest.regions import Fragment, contiguous, decompose, rescale
from probe_cli.manifest.schema import View

__all__ = ["Origin", "Piece", "Read", "view_of"]

_MAX_SPLITS = 64
_turns = count(1)


def view_of(tensor: torch.Tensor) -> View:
    """A tensor's place in its storage, in elements of its dtype."""
    return View(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


@dataclass(frozen=True)
class Piece:
    """Elements `at` of a storage hold elements `src` of a source, in the same order. `at` is in elements of the
    storage's base dtype, `src` in elements of `src_dtype` (None: the source's own). A source of -1 is a constant.
    `recalled`: the elements were read back from a tensor of the model. `turn`: pieces that one operator mixed together
    share it, and do not hide each other."""

    source: int
    at: View
    src: View
    computed: bool
    exact: bool = True
    src_dtype: torch.dtype | None = None
    recalled: bool = False
    turn: int = 0


@dataclass(frozen=True)
class Read:
    """A part of a tensor, and the source elements that it holds. `part` selects the same part of any view with the
    tensor's shape."""

    source: int
    src: View
    part: _Part | None
    computed: bool
    exact: bool
    src_dtype: torch.dtype | None
    recalled: bool = False

    def of(self, view: View) -> View:
        """The part of another view that corresponds to this read."""
        return view if self.part is None else self.part.of(view)


@dataclass(frozen=True)
class _Part:
    fragment: Fragment
    #: (start, size) in each refined dimension.
    ranges: tuple[tuple[int, int], ...]

    def of(self, view: View) -> View:
        refined = self.fragment.of(view)
        offset = refined.offset + sum(start * stride for (start, _), stride in zip(self.ranges, refined.stride))
        return View(offset, tuple(size for _, size in self.ranges), refined.stride)


@dataclass
class Origin:
    """What one storage holds. `base` is the view that the storage was made for, in elements of `dtype`."""

    base: View
    dtype: torch.dtype
    #: In the order in which they were written: a later one hides what it covers.
    pieces: list[Piece] = field(default_factory=list)

    def reads(self, view: View, dtype: torch.dtype) -> list[Read]:
        """The source elements behind a view of this storage (`view` in elements of `dtype`)."""
        if not self.pieces:
            return []
        if dtype.itemsize != self.dtype.itemsize:
            return [self._bound(piece) for piece in self.pieces]
        reads: list[Read] = []
        pieces = self._visible()
        for piece in pieces:
            found = _match(piece, view, self.base, alone=len(pieces) == 1)
            reads += [self._bound(piece)] if found is None else found
        return reads

    def sources(self) -> list[int]:
        """The sources behind any element of this storage, in the order in which they were written."""
        return list(dict.fromkeys(piece.source for piece in self.pieces if piece.source >= 0))

    def overwrite(self, at: View) -> None:
        """All elements of `at` get a constant; what was there is hidden."""
        self.pieces.append(Piece(-1, at, at, False))

    def blur(self) -> None:
        """Some elements may have been overwritten, nobody knows which."""
        self.pieces = [replace(piece, exact=False) for piece in self.pieces]

    def _visible(self) -> list[Piece]:
        if len(self.pieces) == 1:
            return self.pieces if self.pieces[0].source >= 0 else []
        visible: list[Piece] = []
        for piece in self.pieces:
            box = _box(piece.at, self.base) if piece.exact else None
            if box is not None:
                mixed = [old for old in visible if piece.turn and old.turn == piece.turn]
                hidden = [old for old in visible if not piece.turn or old.turn != piece.turn]
                visible = [part for old in hidden for part in _remainder(old, box, self.base)] + mixed
            elif piece.source < 0:
                visible = [replace(old, exact=False) for old in visible]
            if piece.source >= 0:
                visible.append(piece)
        return visible

    @staticmethod
    def _bound(piece: Piece) -> Read:
        return Read(piece.source, piece.src, None, True, False, piece.src_dtype, piece.recalled)


def _remainder(old: Piece, box: Sequence[tuple[int, int]], base: View) -> list[Piece]:
    """What is left of a piece when a box of the base is overwritten."""
    inner = _box(old.at, base) if old.exact else None
    if inner is None:
        return [old]  # still there in part, and later ones come after it
    shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(inner, box)]
    if any(low >= high for low, high in shared):
        return [old]
    left: list[Piece] = []
    current = list(inner)
    for dim, (low, high) in enumerate(shared):
        for start, stop in ((current[dim][0], low), (high, current[dim][1])):
            if start < stop:
                part = [*current[:dim], (start, stop), *current[dim + 1 :]]
                left.append(_sliced(old, inner, part))
        current[dim] = (low, high)
    return left


def _sliced(piece: Piece, box: Sequence[tuple[int, int]], part: Sequence[tuple[int, int]]) -> Piece:
    def cut(view: View) -> View:
        offset = view.offset
        for (whole, _), (start, _), stride in zip(box, part, view.stride):
            offset += (start - whole) * stride
        return View(offset, tuple(stop - start for start, stop in part), view.stride)

    return replace(piece, at=cut(piece.at), src=cut(piece.src))


def _box(at: View, base: View) -> tuple[tuple[int, int], ...] | None:
    """The box of the base that a view selects in the base's own order of dimensions, None if it is none."""
    fragments = decompose(View(at.offset - base.offset, at.shape, at.stride), base.shape, base.stride)
    if fragments is None or len(fragments) != 1:
        return None
    (fragment,) = fragments
    if len(at.shape) != len(base.shape) or fragment.shape != at.shape:
        return None
    box = []
    for dim, size in enumerate(at.shape):
        moved, step = fragment.moves[dim]
        if size > 1 and (moved != dim or step != 1):
            return None
        box.append((fragment.start[dim], fragment.start[dim] + size))
    return tuple(box)


def _match(piece: Piece, view: View, base: View, *, alone: bool) -> list[Read] | None:
    """The reads of a view within one piece: empty if they share nothing, None if that cannot be told exactly."""
    if not piece.exact:
        return None
    if alone and numel(piece.at.shape) == numel(base.shape):
        grid, box = piece.at, tuple((0, size) for size in piece.at.shape)
    else:
        found = _box(piece.at, base)
        if found is None:
            return None
        grid, box = base, found
    fragments = decompose(View(view.offset - grid.offset, view.shape, view.stride), grid.shape, grid.stride)
    if fragments is None:
        return None
    reads: list[Read] = []
    for fragment in fragments:
        parts = _clip(fragment, tuple((0, size) for size in fragment.shape), box)
        if parts is None:
            return None
        for ranges in parts:
            reads.append(_read(piece, fragment, ranges, box))
    return reads


def _read(
    piece: Piece, fragment: Fragment, ranges: tuple[tuple[int, int], ...], box: tuple[tuple[int, int], ...]
) -> Read:
    offset = piece.src.offset
    for coordinate, (low, _), stride in zip(fragment.start, box, piece.src.stride):
        offset += (coordinate - low) * stride
    strides = []
    for (start, _), (dim, step) in zip(ranges, fragment.moves):
        stride = step * piece.src.stride[dim] if dim >= 0 else 0
        offset += start * stride
        strides.append(stride)
    src = View(offset, tuple(size for _, size in ranges), tuple(strides))
    return Read(piece.source, src, _Part(fragment, ranges), piece.computed, True, piece.src_dtype, piece.recalled)


def _clip(
    fragment: Fragment, ranges: tuple[tuple[int, int], ...], box: tuple[tuple[int, int], ...]
) -> list[tuple[tuple[int, int], ...]] | None:
    """The ranges of a fragment that fall into a box of the base."""
    for dim, (low, high) in enumerate(box):
        movers = [k for k, (moved, _) in enumerate(fragment.moves) if moved == dim and ranges[k][1] > 1]
        fixed = fragment.start[dim] + sum(
            ranges[k][0] * step for k, (moved, step) in enumerate(fragment.moves) if moved == dim
        )
        last = fixed + sum((ranges[k][1] - 1) * fragment.moves[k][1] for k in movers)
        if last < low or fixed >= high:
            return []
        if fixed >= low and last < high:
            continue
        outer = max(movers, key=lambda k: fragment.moves[k][1])
        start, size = ranges[outer]
        step = fragment.moves[outer][1]
        if len(movers) == 1:
            first = max(0, -(-(low - fixed) // step))
            stop = min(size, (high - 1 - fixed) // step + 1)
            if first >= stop:
                return []
            return _clip(fragment, (*ranges[:outer], (start + first, stop - first), *ranges[outer + 1 :]), box)
        if size > _MAX_SPLITS:
            return None
        parts: list[tuple[tuple[int, int], ...]] = []
        for index in range(size):
            clipped = _clip(fragment, (*ranges[:outer], (start + index, 1), *ranges[outer + 1 :]), box)
            if clipped is None:
                return None
            parts += clipped
        return parts
    return [ranges]


def broadcast(view: View, shape: Sequence[int]) -> View | None:
    """A view expanded to a larger shape, None if it does not broadcast."""
    lead = len(shape) - len(view.shape)
    if lead < 0:
        extra = view.shape[:-lead]
        if any(size != 1 for size in extra):
            return None
        view, lead = View(view.offset, view.shape[-lead:], view.stride[-lead:]), 0
    strides = [0] * lead
    for size, stride, wanted in zip(view.shape, view.stride, shape[lead:]):
        if size == wanted:
            strides.append(stride)
        elif size == 1:
            strides.append(0)
        else:
            return None
    return View(view.offset, tuple(shape), tuple(strides))


def fresh(tensor: torch.Tensor) -> Origin:
    """The origin of a storage that was made for `tensor`."""
    return Origin(view_of(tensor), tensor.dtype)


def in_units(view: View, of: torch.dtype, to: torch.dtype) -> View | None:
    """A view counted in elements of another dtype."""
    return rescale(view, of.itemsize, to.itemsize)


def dense(shape: Sequence[int]) -> View:
    """The view of a contiguous tensor of this shape."""
    return View(0, tuple(shape), contiguous(shape))


def next_turn() -> int:
    """A number that the pieces of one operator share."""
    return next(_turns)


def pieces_of(reads: Sequence[Read], at: View, *, computed: bool) -> Iterator[Piece]:
    """What a storage holds after `reads` were written to its elements `at`."""
    turn = next_turn() if len(reads) > 1 else 0
    for read in reads:
        how = (computed or read.computed, read.exact, read.src_dtype, read.recalled, turn)
        yield Piece(read.source, read.of(at), read.src, *how)


def cover(reads: Sequence[Read], shape: tuple[int, ...]) -> bool:
    """Whether reads reach every element of a tensor of this shape; what they do not reach is a constant."""
    if any(read.part is None for read in reads):
        return True
    return bool(reads) and union_size(shape, [read.of(dense(shape)) for read in reads]) == numel(shape)
