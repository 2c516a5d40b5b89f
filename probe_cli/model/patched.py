"""Replace attributes of a class or module for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["patched"]

_MISSING = object()


@contextmanager
def patched(owner: Any, **replacements: Any) -> Iterator[None]:
    """Attributes of a class or module, replaced for a while; nesting in one thread is fine."""
    before = {name: vars(owner).get(name, _MISSING) for name in replacements}
    for name, value in replacements.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
