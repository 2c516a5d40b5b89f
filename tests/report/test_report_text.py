"""Tables, numbers and regions as text."""

from __future__ import annotations

import pytest

from probe_cli.manifest.regions import contiguous
from probe_cli.manifest.schema import View
from probe_cli.report.geometry import box_text, view_text
from probe_cli.report.numbers import bytes_text, plural, seconds_text
from probe_cli.report.table import display_width, table


def test_columns_are_aligned_and_records_take_over_when_they_do_not_fit() -> None:
    rows = [["0", "tp 0", "12"], ["11", "", "3,456"]]
    assert table(["rank", "place", "sum"], rows, right="rlr") == [
        "rank  place    sum",
        "   0  tp 0      12",
        "  11         3,456",
    ]
    assert table(["rank", "place", "sum"], rows, width=12) == [
        "- rank   0",
        "  place  tp 0",
        "  sum    12",
        "- rank   11",
        "  sum    3,456",
    ]


def test_wide_characters_take_two_columns() -> None:
    assert display_width("層.weight") == 9
    assert table(["a", "b"], [["層", "1"], ["xx", "2"]]) == ["a   b", "層  1", "xx  2"]


def test_control_characters_are_escaped() -> None:
    assert table(["a"], [["\x1b[2J"]]) == ["a", "\\x1b[2J"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1_370_000_000, "1.37 GB"),
        (688_586_727_753, "689 GB"),
        (999_999, "1.00 MB"),
    ],
)
def test_bytes(size: int, text: str) -> None:
    assert bytes_text(size) == text


def test_seconds_and_plurals() -> None:
    assert [seconds_text(s) for s in (0.417, 16.64, 200)] == ["0.42 s", "16.6 s", "3 min 20 s"]
    assert [plural(n, "rank") for n in (0, 1, 1200)] == ["0 ranks", "1 rank", "1,200 ranks"]


@pytest.mark.parametrize(
    ("view", "shape", "text"),
    [
        (None, (4, 6), "all"),
        (View(0, (4, 6), (6, 1)), (4, 6), "all"),
        (View(6, (2, 6), (6, 1)), (4, 6), "[1:3, :]"),
        (View(3, (4, 3), (6, 1)), (4, 6), "[:, 3:6]"),
        (View(0, (2, 6), (12, 1)), (4, 6), "[0:3:2, :]"),
        (View(64, (8,), (1,)), (4, 4, 8), "[2, 0, :]"),
        (View(0, (), ()), (), "all"),
    ],
)
def test_views(view: View | None, shape: tuple[int, ...], text: str) -> None:
    assert view_text(view, shape) == text


def test_a_view_across_the_grain_is_given_in_elements() -> None:
    diagonal = View(0, (4,), (contiguous((4, 4))[0] + 1,))
    assert view_text(diagonal, (4, 4)) == "4 from element 0, strides [5]"


def test_boxes() -> None:
    assert box_text(((122, 128), (0, 64)), (128, 64)) == "[122:128, :]"
    assert box_text(((3, 4),), (8,)) == "[3]"
    assert box_text((), ()) == "[]"
