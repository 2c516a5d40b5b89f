"""Python's garbage collector while a command runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["rare_collection"]

_THRESHOLDS = (100_000, 50, 100)


@contextmanager
def rare_collection() -> Iterator[None]:
    """Inside, and in processes forked inside, cycles are looked for seldom: what an engine imports and what a dry run makes
    stays to the end, and looking through it again and again is a seventh of a build's time. Still bounded, for loading
    code that leaves tensors in cycles."""
    before = gc.get_threshold()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
