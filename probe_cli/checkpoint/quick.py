"""The fast road through a header that a known writer wrote, three times as fast as entry by entry.

It vouches for a header or stands aside (None): every error, and every form that it does not know, is left to
`entries.py`.
"""

from __future__ import annotations

from codecs import getincrementaldecoder

import msgspec

from probe_cli.checkpoint.entries import MAX_METADATA, MAX_NAME, MAX_RANK, MAX_TENSORS, METADATA, Record, size_in_bytes
from probe_cli.checkpoint.strict_json import Fault, Reader
from probe_cli.errors import CheckpointError

__all__ = ["parse_quickly"]

_OPENING = b'{"' + METADATA.encode() + b'":'
_QUOTES = 10
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
    if b"\\" in body:
        return None
    quotes = body.count(b'"')
    # Millions of tensors or of numbers would cost memory before they are refused.
    if quotes > _QUOTES * MAX_TENSORS or body.count(b",") > (MAX_RANK + 4) * (quotes // _QUOTES + 1):
        return None
    try:
        entries = msgspec.json.decode(body, type=dict[str, _Entry])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    # Without escapes quotes only delimit, and each entry has at least those of its name, three fields and dtype. There
    # are at least as many entries as distinct names, so equal numbers mean that no key stands twice.
    if quotes != _QUOTES * len(entries) or METADATA in entries:
        return None
    records = _checked(entries)
    return None if records is None else (records, metadata)


def _take_metadata(body: bytes) -> tuple[dict[str, str], bytes] | None:
    """Metadata at the front, and the header without it."""
    window = body[:_MAX_METADATA]
    try:
        # Incremental: the window may end within a character.
        text = getincrementaldecoder("utf-8")().decode(window)
        reader = Reader(text, len(_OPENING))
        metadata = reader.string_map(METADATA, MAX_METADATA)
    except (Fault, UnicodeDecodeError):
        return None
    rest = body[len(text[: reader.position].encode()) :]
    if rest[:1] == b",":
        return (metadata, b"{" + rest[1:]) if rest[1:2] == b'"' else None
    return metadata, b"{" + rest


def _checked(entries: dict[str, _Entry]) -> list[Record] | None:
    if not "".join(entries).isprintable() or max(map(len, entries), default=0) > MAX_NAME:
        return None
    records: list[Record] = []
    # Distinct (dtype, shape) pairs are few: size each once.
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, entry in entries.items():
        kind = entry.dtype, entry.shape
        begin, end = entry.data_offsets
        if kind not in known:
            nbytes = _size(*kind)
            if nbytes is None:
                return None
            known[kind] = nbytes
        if end - begin != known[kind] or begin < 0:
            return None
        records.append((begin, end, name, *kind))
    return records


def _size(dtype: str, shape: tuple[int, ...]) -> int | None:
    if len(shape) > MAX_RANK or any(size < 0 for size in shape):
        return None
    try:
        return size_in_bytes(dtype, shape, "", "")
    except CheckpointError:
        return None
