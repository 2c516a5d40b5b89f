"""Orders in which sources can stand."""

from __future__ import annotations

import re
from collections.abc import Sequence

from probe_cli.checkpoint.text import quote, some
from probe_cli.checkpoint.types import Source
from probe_cli.errors import CheckpointError, UsageError

__all__ = ["ORDERS", "arrange"]

#: "file": files by name, offsets within a file. "name": by name, as `safe_open(...).keys()` has them for one file.
#: "layer": by the first number in the name (sources without one first), then by name, numbers compared as numbers.
ORDERS = ("file", "name", "layer")
_NUMBER = re.compile(r"(\d+)")


def arrange(sources: Sequence[Source], order: str | Sequence[str]) -> tuple[Source, ...]:
    """`sources` in one of ORDERS, or in the order of the names given, which must be all of them."""
    if order == "file":
        # A wire file has no files: its own order stands (sorted is stable).
        return tuple(sorted(sources, key=lambda source: (-1 if source.file is None else source.file, source.start)))
    if order == "name":
        return tuple(sorted(sources, key=lambda source: source.name))
    if order == "layer":
        return tuple(sorted(sources, key=lambda source: _layer_key(source.name)))
    if isinstance(order, str):
        raise UsageError(f"order {quote(order)} is unknown, expected one of {', '.join(ORDERS)}")
    by_name = {source.name: source for source in sources}
    unknown = [name for name in order if name not in by_name]
    if unknown:
        raise CheckpointError(f"order names {len(unknown):,} sources that the checkpoint lacks: {some(unknown)}")
    if len(set(order)) != len(order):
        raise CheckpointError("order names a source twice")
    if len(order) != len(by_name):
        rest = [name for name in by_name if name not in set(order)]
        raise CheckpointError(f"order leaves out {len(rest):,} sources: {some(rest)}")
    return tuple(by_name[name] for name in order)


def _layer_key(name: str) -> tuple[int, tuple[str | int, ...]]:
    parts = _NUMBER.split(name)
    # split() alternates text and digits, so like compares with like.
    key = tuple(int(part) if at % 2 else part for at, part in enumerate(parts))
    return (int(parts[1]) if len(parts) > 1 else -1), key
