"""Bounded enumerations for messages: the first few by name, the rest by number."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["plural", "some"]


def some(names: Sequence[str], limit: int) -> str:
    """`a, b, c and 4 more`."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def plural(count: int, noun: str) -> str:
    """`1 layer`, `2 layers`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
