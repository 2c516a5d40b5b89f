"""Numbers for people."""

from __future__ import annotations

__all__ = ["bytes_text", "count_text", "plural", "seconds_text"]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def bytes_text(size: int) -> str:
    """Decimal units, three digits: `1.37 GB`."""
    value, unit = float(size), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return f"{size} B"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {_UNITS[unit]}"


def count_text(count: int) -> str:
    """Thousands apart: `91,991`."""
    return f"{count:,}"


def plural(count: int, noun: str) -> str:
    """`1 rank`, `8 ranks`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def seconds_text(seconds: float) -> str:
    """`0.42 s`, `16.6 s`, `3 min 20 s`."""
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 119.5:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"
