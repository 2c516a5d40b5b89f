"""From the text of a file to a typed document, trusting nothing in it."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from probe_cli.errors import ManifestError, UsageError
from probe_cli.manifest.canonical import canonical_bytes, digest_of_bytes
from probe_cli.manifest.schema import BUNDLE_FORMAT, MANIFEST_FORMAT, SCHEMA_VERSION, BundleIndex, ManifestDocument
from probe_cli.manifest.text import digest_of_lines, render

__all__ = ["decode_document", "normalized", "sniff", "verify_digest"]

Document = TypeVar("Document", ManifestDocument, BundleIndex)

#: Most JSON values in a file that is not in the written form. Bounds the memory of decoding it without types.
_MAX_VALUES = 10_000_000
_MAX_REASON = 300


class _Head(msgspec.Struct):
    format: str = ""
    version: str = ""


_heads = msgspec.json.Decoder(_Head)
_decoders: dict[type, msgspec.json.Decoder[Any]] = {
    ManifestDocument: msgspec.json.Decoder(ManifestDocument),
    BundleIndex: msgspec.json.Decoder(BundleIndex),
}


def sniff(text: bytes, where: str) -> str:
    """The format that the text states, after its version was found to be one that this release reads.

    Raises ManifestError on text that is not JSON, states no known format, or has another major version.
    """
    if text[:64].lstrip().startswith(b"["):
        raise ManifestError(
            f"{where}: is a list, expected a manifest",
            hint="a list of names that will be sent is given with `check --wire`",
        )
    head: _Head = _decode(_heads, text, where)
    if head.format not in (MANIFEST_FORMAT, BUNDLE_FORMAT):
        stated = f"states format {_short(head.format)!r}" if head.format else "states no format"
        raise ManifestError(
            f"{where}: {stated}, expected {MANIFEST_FORMAT!r} or {BUNDLE_FORMAT!r}",
            hint="is this a file that probe-manifest build wrote?",
        )
    major, _, minor = head.version.partition(".")
    ours = SCHEMA_VERSION.partition(".")[0]
    if not (major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit()):
        raise ManifestError(
            f"{where}: version is {_short(head.version)!r}, expected MAJOR.MINOR such as {SCHEMA_VERSION!r}"
        )
    if major != ours:
        newer = (len(major), major) > (len(ours), ours)
        relation = "a newer" if newer else "an older"
        raise ManifestError(
            f"{where}: schema version {_short(head.version)} is of {relation} major version than "
            f"{SCHEMA_VERSION}, which this release reads",
            hint="upgrade probe-manifest" if newer else "build the manifest again",
        )
    return head.format


def decode_document(text: bytes, kind: type[Document], where: str) -> Document:
    """The typed document; unknown fields are skipped. `sniff` the text first. Raises ManifestError with the field."""
    document: Document = _decode(_decoders[kind], text, where)
    return document


def verify_digest(text: bytes, stated: str, where: str) -> None:
    """Raise ManifestError unless the digest that the document states is that of the rest of it."""
    quick = digest_of_lines(text)
    if quick is not None and quick == (stated, stated):
        return
    found = digest_of_bytes(canonical_bytes({k: v for k, v in _plain(text, where).items() if k != "digest"}))
    if found != stated:
        raise ManifestError(
            f"{where}: the content has digest {found[:19]}..., but the file states {_short(stated, 19)!r}; "
            "it was edited or damaged",
            hint="build it again, or fetch it again",
        )


def normalized(text: bytes, where: str) -> bytes:
    """The same document in the form that is written to files, unknown fields and all."""
    return render(_plain(text, where))


def _plain(text: bytes, where: str) -> dict[str, Any]:
    # Rough but cheap: every value but the first in its container follows a comma, every container opens with a bracket.
    if text.count(b",") + text.count(b"[") + text.count(b"{") > _MAX_VALUES:
        raise ManifestError(f"{where}: more than {_MAX_VALUES:,} values, the most a manifest may hold")
    value = _decode(msgspec.json.Decoder(), text, where)
    if not isinstance(value, dict):
        raise ManifestError(f"{where}: expected a JSON object at the top")
    return value


def _decode(decoder: msgspec.json.Decoder[Any], text: bytes, where: str) -> Any:
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise ManifestError(f"{where}: {_short(str(error))}") from None
    except msgspec.DecodeError as error:
        raise ManifestError(f"{where}: not valid JSON: {_short(str(error))}") from None
    except UnicodeDecodeError as error:  # msgspec before 0.19
        raise ManifestError(f"{where}: not valid JSON: Invalid UTF-8 encoded string ({error.reason})") from None
    except RecursionError:
        raise ManifestError(f"{where}: nested too deeply for a manifest") from None
    except UsageError as error:  # from Topology
        raise ManifestError(f"{where}: topology: {error}") from None


def _short(text: str, limit: int = _MAX_REASON) -> str:
    text = "".join(c if c.isprintable() else "?" for c in text[: limit + 1])
    return text if len(text) <= limit else text[:limit] + "..."
