"""Gaps and overlaps: held against counting, element by element."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from probe_cli.manifest.coverage import coverage, union_size
from probe_cli.manifest.schema import Box, Coverage, View
from tests.manifest.test_regions import bases, view_of, views
from tests.oracle import random_examples


def _mask(shape: torch.Size, boxes: tuple[Box, ...]) -> torch.Tensor:
    """How often each element lies in a box."""
    mask = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        mask[tuple(slice(*axis) for axis in box)] += 1
    return mask


@random_examples
@given(st.data())
def test_boxes_hold_exactly_what_is_never_or_doubly_written(data: st.DataObject) -> None:
    base = data.draw(bases())
    counts = torch.zeros(base.numel(), dtype=torch.int64)
    footprints = []
    for _ in range(data.draw(st.integers(0, 3))):
        parts = [data.draw(views(base)) for _ in range(data.draw(st.integers(1, 2)))]
        times = data.draw(st.integers(1, 2))
        touched = torch.zeros(base.numel(), dtype=torch.bool)
        for part in parts:
            touched[part.reshape(-1)] = True
        counts += touched * times
        footprints.append(([view_of(part) for part in parts], times))
    found = coverage(tuple(base.shape), footprints, base.stride())
    if found is not None and not found.exact:
        assert found == Coverage(exact=False)
        return
    numbers = counts[base]
    gaps = _mask(base.shape, found.gaps if found else ())
    overlaps = _mask(base.shape, found.overlaps if found else ())
    assert torch.equal(gaps, (numbers == 0).long())
    assert torch.equal(overlaps, (numbers > 1).long())
    assert (found.gap_elements if found else 0) == int((numbers == 0).sum())
    assert (found.overlap_elements if found else 0) == int((numbers > 1).sum())


@random_examples
@given(st.data())
def test_union_counts_every_element_once(data: st.DataObject) -> None:
    base = data.draw(bases()).contiguous()
    base = torch.arange(base.numel()).view(base.shape)
    parts = [data.draw(views(base)) for _ in range(data.draw(st.integers(0, 3)))]
    size = union_size(tuple(base.shape), [view_of(part) for part in parts])
    distinct = len({int(i) for part in parts for i in part.reshape(-1)})
    assert size == distinct or (size == base.numel() and size > distinct)


def test_padding_rows_are_one_box() -> None:
    """Case 4: a loader that writes rows 0-2 of 4."""
    assert coverage((4, 2), [([View(0, (3, 2), (2, 1))], 1)]) == Coverage(gap_elements=2, gaps=(((3, 4), (0, 2)),))


def test_written_whole_once_is_nothing_to_report() -> None:
    assert coverage((4, 2), [([None], 1)]) is None
    assert coverage((4, 2), [([View(0, (2, 2), (2, 1))], 1), ([View(4, (2, 2), (2, 1))], 1)]) is None
    assert coverage((0, 2), []) is None


def test_one_application_may_write_an_element_twice() -> None:
    """Case 2: a value that is changed in place is no collision."""
    assert coverage((4,), [([None, View(0, (2,), (1,))], 1)]) is None


def test_two_applications_collide() -> None:
    found = coverage((4,), [([View(0, (3,), (1,))], 1), ([View(2, (2,), (1,))], 1)])
    assert found == Coverage(overlap_elements=1, overlaps=(((2, 3),),))


def test_a_key_required_twice_is_an_overlap() -> None:
    """Case 3: `weight_shape`, once for each of q, k and v."""
    assert coverage((2,), [([None], 3)]) == Coverage(overlap_elements=2, overlaps=(((0, 2),),))


def test_what_is_not_known_exactly_says_so() -> None:
    assert coverage((4,), [([None], 1)], exact=False) == Coverage(exact=False)
    assert coverage((3, 3), [([View(0, (3,), (4,))], 1)]) == Coverage(exact=False), "a diagonal"


def test_a_scalar_has_the_empty_box() -> None:
    assert coverage((), []) == Coverage(gap_elements=1, gaps=((),))
    assert coverage((), [([View(0, (), ())], 1)]) is None


def test_far_too_many_cells_are_given_up_in_bounded_time() -> None:
    steps = [([View(0, (1000, 1000), (2048 * 2, 2))], 1)]
    assert coverage((2048, 2048), steps) == Coverage(exact=False)
    assert union_size((2048, 2048), steps[0][0]) == 2048 * 2048, "an upper bound"
