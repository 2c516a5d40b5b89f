"""Views cut into fragments and slabs: held against torch, element by element."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from probe_cli.manifest.regions import contiguous, decompose, is_whole, rescale, slabs, whole
from probe_cli.manifest.schema import View
from tests.oracle import random_examples

__all__ = ["bases", "view_of", "views"]


def view_of(tensor: torch.Tensor) -> View:
    return View(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


@st.composite
def bases(draw: st.DrawFn) -> torch.Tensor:
    """A numbered tensor, contiguous or with its dimensions permuted."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=3)))
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    if tensor.dim() > 1 and draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    return tensor


@st.composite
def views(draw: st.DrawFn, base: torch.Tensor) -> torch.Tensor:
    """A view as loaders make them."""
    view = base
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["narrow", "unflatten", "permute", "select", "flat", "step", "expand"]))
        if kind == "expand":
            view = view.unsqueeze(0).expand(2, *view.shape)
        elif kind == "flat":
            if view.is_contiguous():
                view = view.view(-1)
        elif kind == "permute":
            view = view.permute(draw(st.permutations(range(view.dim()))))
        elif view.dim():
            dim = draw(st.integers(0, view.dim() - 1))
            size = view.size(dim)
            if kind == "narrow":
                start = draw(st.integers(0, size - 1))
                view = view.narrow(dim, start, draw(st.integers(1, size - start)))
            elif kind == "unflatten":
                factor = draw(st.sampled_from([f for f in range(1, size + 1) if size % f == 0]))
                view = view.unflatten(dim, (factor, size // factor))
            elif kind == "select":
                view = view.select(dim, draw(st.integers(0, size - 1)))
            else:
                view = view[:: draw(st.integers(1, 3))]
    return view


@random_examples
@given(st.data())
def test_fragments_walk_the_same_elements_as_the_view(data: st.DataObject) -> None:
    base = data.draw(bases())
    view = data.draw(views(base))
    fragments = decompose(view_of(view), tuple(base.shape), base.stride())
    if fragments is None:  # allowed: then a region is an upper bound
        return
    storage = base.as_strided((base.numel(),), (1,), 0)
    walked = 0
    for fragment in fragments:
        found = fragment.of(view_of(view))
        taken = storage.as_strided(found.shape, found.stride, found.offset)
        part = view
        for dim, (start, size) in enumerate(fragment.ranges):
            part = part.narrow(dim, start, size)
        assert torch.equal(taken.reshape(-1), part.reshape(-1))
        # each refined dimension moves along one dimension of the base, from the stated start
        at = [torch.tensor(start) for start in fragment.start]
        for size, (dim, step) in zip(fragment.shape, fragment.moves):
            at = [
                (a.unsqueeze(-1) + (torch.arange(size) * step if d == dim else torch.zeros(size, dtype=torch.int64)))
                for d, a in enumerate(at)
            ]
        if base.dim():
            assert torch.equal(base[tuple(at)].expand(fragment.shape).reshape(-1), part.reshape(-1))
        walked += taken.numel()
    assert walked == view.numel()


@random_examples
@given(st.data())
def test_slabs_select_exactly_the_elements_of_the_view(data: st.DataObject) -> None:
    base = data.draw(bases())
    view = data.draw(views(base))
    found = slabs(view_of(view), tuple(base.shape), base.stride())
    if found is None:
        return
    selected: set[int] = set()
    for slab in found:
        assert all(0 <= start < stop <= size for (start, stop, _), size in zip(slab, base.shape))
        selected |= set(base[tuple(slice(*axis) for axis in slab)].reshape(-1).tolist())
    assert selected == set(view.reshape(-1).tolist())


@random_examples
@given(st.data())
def test_few_views_that_loaders_make_are_given_up(data: st.DataObject) -> None:
    """A narrow, a chunk, a transposition or a step of a contiguous tensor is always understood."""
    base = data.draw(bases()).contiguous()
    view = base
    for _ in range(3):
        if view.dim():
            dim = data.draw(st.integers(0, view.dim() - 1))
            start = data.draw(st.integers(0, view.size(dim) - 1))
            view = view.narrow(dim, start, data.draw(st.integers(1, view.size(dim) - start))).transpose(0, dim)
    assert decompose(view_of(view), tuple(base.shape)) is not None


def test_what_is_no_walk_along_the_dimensions_is_given_up() -> None:
    diagonal = View(0, (3,), (4,))
    assert decompose(diagonal, (3, 3)) is None
    assert decompose(View(0, (5,), (1,)), (4,)) is None, "leaves the base"
    assert decompose(View(0, (2,), (1,)), (2, 2), (1, 1)) is None, "the base overlaps itself"
    assert decompose(View(0, (0, 3), (3, 1)), (3, 3)) == []


@pytest.mark.parametrize(
    ("view", "shape", "expected"),
    [
        (View(0, (2, 3), (3, 1)), (2, 3), True),
        (View(0, (2, 1), (1, 99)), (2, 1), True),
        (View(0, (3, 2), (2, 1)), (2, 3), False),
        (View(3, (1, 3), (3, 1)), (2, 3), False),
        (View(0, (2, 3), (1, 2)), (2, 3), False),
        (View(0, (), ()), (), True),
    ],
)
def test_is_whole(view: View, shape: tuple[int, ...], expected: bool) -> None:
    assert is_whole(view, shape) is expected
    assert is_whole(whole(shape), shape)


def test_contiguous_strides_are_those_of_torch() -> None:
    for shape in [(), (1,), (2, 3), (4, 1, 2), (0, 3), (2, 0, 3)]:
        assert contiguous(shape) == torch.empty(shape).stride()


@random_examples
@given(st.data(), st.sampled_from([(8, 4), (8, 2), (8, 1), (4, 8), (1, 8), (2, 4), (4, 4)]))
def test_rescaled_views_reach_the_same_bytes(data: st.DataObject, sizes: tuple[int, int]) -> None:
    old, new = sizes
    view = view_of(data.draw(views(data.draw(bases()))))
    scaled = rescale(view, old, new)
    if scaled is None:
        return

    def bytes_of(v: View, size: int) -> list[int]:
        walk = [v.offset]
        for length, stride in zip(v.shape, v.stride):
            walk = [w + i * stride for w in walk for i in range(length)]
        return [w * size + b for w in walk for b in range(size)]

    assert bytes_of(scaled, new) == bytes_of(view, old)
