"""A manifest or a bundle's index as text for `git diff`: one fact to a line, each line complete in itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from probe_cli.manifest.bundle import Bundle
from probe_cli.manifest.canonical import canonical_bytes, digest_of_bytes
from probe_cli.manifest.document import Manifest
from probe_cli.manifest.keys import application_key
from probe_cli.manifest.schema import Layer, View, Write
from probe_cli.report.plain import printable

__all__ = ["textconv", "textconv_other"]


def textconv(origin: Bundle | Manifest) -> str:
    """The lines, in the order of the document. Digests are left out: they change with everything."""
    lines = _index(origin) if isinstance(origin, Bundle) else _manifest(origin)
    return "".join(printable(line) + "\n" for line in lines)


def textconv_other(reason: str, content: bytes) -> str:
    """The lines for a file that is no manifest: why, and its content; of content that is no text, the digest."""
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        lines = [f"{len(content):,} bytes, {digest_of_bytes(content)}"]
    return "".join(printable(line) + "\n" for line in (f"not a manifest that can be read: {reason}", *lines))


def _index(bundle: Bundle) -> Iterator[str]:
    index = bundle.index
    yield from _identity(index)
    for entry in index.ranks:
        yield f"{entry.rank}: contract {entry.contract_digest[:19]}, {entry.summary.applications:,} applications"
    reasons = {name: reason for reason, names in index.unused.items() for name in names}
    for source in index.sources:
        unused = f", unused: {reasons[source.name]}" if source.name in reasons else ""
        yield f"source {source.name} {source.dtype} {list(source.shape)}{unused}"
    for name, ranks in index.unfed.items():
        yield f"unfed {name} on ranks {list(ranks)}"


def _manifest(manifest: Manifest) -> Iterator[str]:
    document = manifest.document
    yield f"{document.rank}"
    yield from _identity(document)
    for field, number in msgspec.structs.asdict(document.summary).items():
        yield f"summary {field} {number}"
    for source in document.sources:
        yield f"source {source.name} {source.dtype} {list(source.shape)}"
    for layer in document.layers:
        yield from _layer(layer)


def _identity(document: Any) -> Iterator[str]:
    yield f"format {document.version}"
    for name in ("engine", "topology", "model", "checkpoint"):
        for field, value in msgspec.to_builtins(getattr(document, name)).items():
            if field != "digest":
                text = value if isinstance(value, str) else canonical_bytes(value).decode()
                yield f"{name} {field} {text}"


def _layer(layer: Layer) -> Iterator[str]:
    name = layer.name or "(the model itself)"
    yield f"layer {name} ({layer.class_name})"
    for tensor in layer.tensors:
        extra = "" if tensor.kind == "parameter" else f" {tensor.kind}"
        extra += f" stride {list(tensor.stride)}" if tensor.stride is not None else ""
        extra += f" shares storage with {tensor.alias}" if tensor.alias else ""
        yield f"  {name}.{tensor.name} {tensor.dtype} {list(tensor.shape)}{extra}"
        if tensor.coverage is not None:
            gaps, overlaps = tensor.coverage.gap_elements, tensor.coverage.overlap_elements
            yield f"  {name}.{tensor.name} gaps {gaps} {_boxes(tensor.coverage.gaps)}, overlaps {overlaps}"
    for application in layer.applications:
        times = f" x{application.count}" if application.count > 1 else ""
        direct = " direct" if application.direct else ""
        yield f"  {application_key(layer.name, application)}{times}{direct}"
        for write in application.writes:
            yield f"    {_write(write)}"


def _write(write: Write) -> str:
    parts = [f"from {_view(write.src)}", f"to {_view(write.dst)}"]
    if write.source is None:
        parts[0] = "from a constant"
    elif write.source:
        parts[0] += f" of source {write.source}"
    if write.tensor:
        parts[1] += f" of {write.tensor}"
    parts += [f"read as {write.src_dtype}"] if write.src_dtype else []
    parts += [f"written as {write.dst_dtype}"] if write.dst_dtype else []
    parts += ["computed"] if write.computed else []
    parts += [] if write.exact else ["at most"]
    parts += ["added"] if write.accumulates else []
    return ", ".join(parts)


def _view(view: View | None) -> str:
    return "all" if view is None else f"{view.offset}+{list(view.shape)} by {list(view.stride)}"


def _boxes(boxes: tuple[tuple[tuple[int, int], ...], ...]) -> str:
    return " ".join("[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]" for box in boxes)
