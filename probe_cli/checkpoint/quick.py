"""The fast road through a header that a known writer wrote, three times as fast as entry by entry.

It vouches for a header or stands aside (None): every error, and every form that it does not know, is left to
`entries.py`.
"""

from __future__ import annotations

import msgspec

from probe_cli.checkpoint.entries import MAX_NAME, MAX_RANK, METADATA, Record, size_in_bytes
from probe_cli.checkpoint.strict_json import Fault, parse_string_map
from probe_cli.errors import CheckpointError

__all__ = ["parse_quickly"]

_OPENING = b'{"' + METADATA.encode() + b'":'
#: Most that `__metadata__` may take here: beyond it, the slow road decides.
_MAX_METADATA = 1_000_000


class _Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def parse_quickly(body: bytes) -> tuple[list[Record], dict[str, str]] | None:
    """What `parse_entries` returns for the same header, or None. `body` is the header's JSON."""
    metadata: dict[str, str] = {}
    if body.startswith(_OPENING):
        taken = _take_metadata(body)
        if taken is None:
            return None
        metadata, body = taken
    # Without escapes every key stands in the text as it is. Each entry has all three fields, so a field stands at least
    # as often as there are entries, and there are at least as many entries as distinct names: equal numbers mean that
    # no key stands twice.
    if b"\\" in body or b'"__metadata__"' in body:
        return None
    count = body.count(b'"data_offsets"')
    # A list of millions of numbers would cost memory before it is refused.
    if body.count(b",") > (MAX_RANK + 4) * (count + 1):
        return None
    try:
        entries = msgspec.json.decode(body, type=dict[str, _Entry])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not len(entries) == count == body.count(b'"dtype"') == body.count(b'"shape"'):
        return None
    records = _checked(entries)
    return None if records is None else (records, metadata)


def _take_metadata(body: bytes) -> tuple[dict[str, str], bytes] | None:
    """Metadata at the front, and the header without it."""
    window = body[:_MAX_METADATA]
    try:
        text = window.decode("utf-8", "ignore")
        metadata, end = parse_string_map(text, len(_OPENING), METADATA)
    except Fault:
        return None
    rest = body[len(text[:end].encode()) :]
    if rest[:1] == b",":
        return (metadata, b"{" + rest[1:]) if rest[1:2] == b'"' else None
    return metadata, b"{" + rest


def _checked(entries: dict[str, _Entry]) -> list[Record] | None:
    records: list[Record] = []
    # Distinct (dtype, shape) pairs are few: size each once.
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, entry in entries.items():
        dtype, shape = entry.dtype, entry.shape
        begin, end = entry.data_offsets
        nbytes = known.get((dtype, shape))
        if nbytes is None:
            if len(shape) > MAX_RANK or any(size < 0 for size in shape):
                return None
            try:
                nbytes = known[dtype, shape] = size_in_bytes(dtype, shape, "", "")
            except CheckpointError:
                return None
        if end - begin != nbytes or begin < 0 or not name.isprintable() or len(name) > MAX_NAME:
            return None
        records.append((begin, end, name, dtype, shape))
    return records
