"""JSON with one long list in it, a row to a line: readable, and without as many megabytes of indentation as of content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

__all__ = ["object_members"]


def object_members(head: Mapping[str, Any], name: str, rows: Iterable[Any], indent: str) -> str:
    """The members of an object, without its braces: those of `head`, and the list `name`. Rows are encoded as they
    come, so a generator of them is never held as a whole."""
    members = [f'{indent}"{key}": {_json(value)}' for key, value in head.items()]
    listed = ",".join([f"\n{indent}  {_json(row)}" for row in rows])
    members.append(f'{indent}"{name}": [{listed}\n{indent}]' if listed else f'{indent}"{name}": []')
    return ",\n".join(members)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
