"""Canonical JSON: one text for one value, and the digests over it.

Canonical form: UTF-8, object keys sorted by code point, no white space, no escapes but those JSON demands, floats in
their shortest form. Files hold the canonical form with line breaks put in (`probe_cli.manifest.text`), so the digest
of a file is found without decoding it, and a file that someone has re-indented still verifies.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec

from probe_cli.errors import ManifestError

__all__ = ["canonical_bytes", "check_json", "digest", "digest_of_bytes"]

_encoder = msgspec.json.Encoder(order="sorted")


def canonical_bytes(value: Any) -> bytes:
    """The canonical JSON of a value made of JSON types, msgspec structs and tuples. Raises ManifestError on others."""
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ManifestError(f"a manifest cannot hold this value: {error}") from None


def digest(value: Any) -> str:
    """`sha256:<hex>` of the canonical JSON of a value."""
    return digest_of_bytes(canonical_bytes(value))


def digest_of_bytes(data: bytes) -> str:
    """`sha256:<hex>` of bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def check_json(value: Any, where: str) -> None:
    """Raise ManifestError unless `value` is JSON that survives a round trip: NaN and infinities do not (msgspec writes
    them as null), nor do integers beyond 64 bits in most readers, nor keys that are not strings."""
    if value is None or isinstance(value, (bool, str)):
        return
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise ManifestError(f"{where}: {value} does not fit 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ManifestError(f"{where}: {value} has no JSON form")
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_json(item, where)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ManifestError(f"{where}: key {key!r} is a {type(key).__name__}, expected a string")
            check_json(item, where)
    else:
        raise ManifestError(f"{where}: {type(value).__name__} has no JSON form")
