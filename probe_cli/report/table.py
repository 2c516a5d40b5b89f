"""Tables in plain text that fit the terminal: columns where they fit, records where they do not."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from probe_cli.report.plain import printable

__all__ = ["display_width", "table"]

_GAP = "  "


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "", width: int = 160) -> list[str]:
    """The lines of a table. `right` has one letter per column: `r` for right-aligned (numbers), anything else for left.

    A table wider than `width` columns is written as one record per row instead: nothing is cut off.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    sizes = [
        max([display_width(header), *(display_width(row[column]) for row in cells)])
        for column, header in enumerate(headers)
    ]
    if sum(sizes) + len(_GAP) * (len(sizes) - 1) > width:
        return _records(headers, cells)
    align = right.ljust(len(headers), "l")
    return [
        _GAP.join(_pad(cell, size, side) for cell, size, side in zip(row, sizes, align)).rstrip()
        for row in [list(headers), *cells]
    ]


def _records(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines: list[str] = []
    size = max(map(display_width, headers))
    for row in rows:
        for column, (header, cell) in enumerate(zip(headers, row)):
            if cell:
                lines.append(f"{'- ' if column == 0 else '  '}{_pad(header, size, 'l')}  {cell}")
    return lines


def _pad(text: str, size: int, side: str) -> str:
    space = " " * (size - display_width(text))
    return space + text if side == "r" else text + space


def display_width(text: str) -> int:
    """Columns that a text takes in a terminal: East Asian wide characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )
