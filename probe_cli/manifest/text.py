"""The text of a manifest file: canonical JSON with line breaks, one source, tensor and application on a line.

Line breaks stand only between tokens and a JSON string holds none, so the canonical form is the text without them. That
makes verification a hash over the bytes, and a text diff of two files readable.
"""

from __future__ import annotations

import re
from typing import Any

from probe_cli.manifest.canonical import canonical_bytes, digest_of_bytes

__all__ = ["digest_of_lines", "render", "split_digest"]

#: Keys whose arrays are written one element to a line, at any depth down to a layer's.
_LISTED = frozenset({"sources", "layers", "ranks", "applications", "tensors", "files"})
_DIGEST_LINE = re.compile(rb'^"digest":"([^"\\]*)",?\n', re.MULTILINE)


def render(document: dict[str, Any]) -> bytes:
    """The file text of a document made of plain JSON types (`msgspec.to_builtins`)."""
    members = [_key(key) + _value(key, document[key]) for key in sorted(document)]
    return b"{\n" + b",\n".join(members) + b"\n}\n"


def split_digest(text: bytes) -> tuple[str, bytes] | None:
    """The document's digest as its own line states it, and the canonical bytes of the rest; None if the text has no
    such line (it was re-indented, or another program wrote it)."""
    match = _DIGEST_LINE.search(text)
    if match is None:
        return None
    head, tail = text[: match.start()], text[match.end() :]
    try:
        return match[1].decode("ascii"), (head + tail).replace(b"\n", b"")
    except UnicodeDecodeError:
        return None


def digest_of_lines(text: bytes) -> tuple[str, str] | None:
    """(stated, found) digest of a text in the form that `render` writes; None if it is not in that form."""
    parts = split_digest(text)
    return None if parts is None else (parts[0], digest_of_bytes(parts[1]))


def _key(key: str) -> bytes:
    return canonical_bytes(key) + b":"


def _value(key: str, value: Any) -> bytes:
    if key not in _LISTED or not isinstance(value, (list, tuple)) or not value:
        return canonical_bytes(value)
    lines = [_layer(item) if key == "layers" and isinstance(item, dict) else canonical_bytes(item) for item in value]
    return b"[\n" + b",\n".join(lines) + b"\n]"


def _layer(layer: dict[str, Any]) -> bytes:
    return b"{" + b",".join(_key(key) + _value(key, layer[key]) for key in sorted(layer)) + b"}"
