"""How untrusted names and values are quoted in one-line messages: printable, and bounded in length."""

from __future__ import annotations

__all__ = ["is_plain", "quote", "some"]

_LIMIT = 100


def is_plain(text: str) -> bool:
    """True if `text` has no control characters, line separators or lone surrogates: it can stand in one line."""
    return text.isprintable() or not any(
        ord(char) < 32 or 127 <= ord(char) < 160 or char in "\u2028\u2029" or "\ud800" <= char <= "\udfff"
        for char in text
    )


def quote(value: object) -> str:
    """`value` as a short printable literal."""
    if isinstance(value, str) and len(value) > _LIMIT:
        return f"{value[:_LIMIT]!a}... ({len(value):,} characters)"
    if isinstance(value, int) and value.bit_length() > 400:
        return f"an integer of {value.bit_length():,} bits"
    text = repr(value) if not isinstance(value, str) or is_plain(value) else ascii(value)
    return text if len(text) <= 2 * _LIMIT else f"{text[: 2 * _LIMIT]}..."


def some(names: list[str], limit: int = 3) -> str:
    """The first few of `names`, quoted, and how many more there are."""
    shown = ", ".join(quote(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit:,} more"
