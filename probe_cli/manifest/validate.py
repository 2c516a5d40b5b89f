"""What the types cannot say: that the parts of a document agree with each other and stay within their bounds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from probe_cli.dtypes import DTYPE_BITS, numel
from probe_cli.errors import ManifestError
from probe_cli.manifest.schema import BundleIndex, Layer, ManifestDocument, SourceEntry, TensorEntry, View
from probe_cli.topology import Rank, Topology

__all__ = ["MAX_ELEMENTS", "RANK_FILE", "validate_index", "validate_manifest"]

#: Elements of a tensor: beyond this, byte offsets do not fit 64 bits.
MAX_ELEMENTS = (1 << 63) // 16

RANK_FILE = re.compile(r"rank-[0-9]{5,9}\.json(\.gz)?")


def validate_manifest(document: ManifestDocument, where: str) -> None:
    """Raise ManifestError, naming the field, if the document contradicts itself."""
    _rank(document.rank, document.topology, where)
    shapes = _sources(document.sources, len(document.checkpoint.files), where)
    seen: set[str] = set()
    tensors: dict[str, TensorEntry] = {}
    for layer in document.layers:
        if layer.name in seen:
            _fail(where, "layers", f"layer {layer.name!r} is there twice")
        seen.add(layer.name)
        for tensor in layer.tensors:
            name = f"{layer.name}.{tensor.name}" if layer.name else tensor.name
            if not tensor.name or name in tensors:
                _fail(where, f"layer {layer.name!r}", f"tensor {tensor.name!r} is there twice or has no name")
            _tensor(tensor.dtype, tensor.shape, where, f"tensor {name!r}")
            tensors[name] = tensor
    checked: set[tuple[View, int]] = set()
    for layer in document.layers:
        _applications(layer, shapes, tensors, checked, where)


def validate_index(index: BundleIndex, where: str) -> None:
    """Raise ManifestError, naming the field, if the index contradicts itself."""
    if not index.ranks:
        _fail(where, "ranks", "the bundle has no rank, expected at least one")
    names = _sources(index.sources, len(index.checkpoint.files), where)
    seen: set[int] = set()
    files: set[str] = set()
    for entry in index.ranks:
        _rank(entry.rank, index.topology, where)
        if not RANK_FILE.fullmatch(entry.file):
            _fail(where, "ranks", f"file {entry.file[:80]!r} is not a rank's file name, expected rank-00000.json.gz")
        if entry.rank.index in seen or entry.file in files:
            _fail(where, "ranks", f"rank {entry.rank.index} or its file is there twice")
        seen.add(entry.rank.index)
        files.add(entry.file)
    for reason, unused in index.unused.items():
        for name in unused:
            if name not in names:
                _fail(where, f"unused.{reason}", f"{name!r} is not among the sources")
    for name, ranks in index.unfed.items():
        if not seen.issuperset(ranks):
            _fail(where, "unfed", f"{name!r} names a rank that the bundle does not hold")


def _fail(where: str, field: str, message: str) -> NoReturn:
    raise ManifestError(f"{where}: {field}: {message}")


def _rank(rank: Rank, topology: Topology, where: str) -> None:
    if rank.topology != topology:
        _fail(where, "rank.topology", f"({rank.topology}) differs from the topology ({topology})")
    if not 0 <= rank.index < topology.world_size:
        _fail(where, "rank.index", f"{rank.index} is not in this topology of {topology.world_size} ranks")
    for name in ("tp", "pp", "ep", "dp"):
        if not 0 <= getattr(rank, name) < getattr(topology, name):
            _fail(where, f"rank.{name}", f"{getattr(rank, name)} is not below {name}={getattr(topology, name)}")


def _tensor(dtype: str, shape: tuple[int, ...], where: str, what: str) -> int:
    if dtype not in DTYPE_BITS:
        _fail(where, what, f"unknown dtype {dtype[:40]!r}")
    elements = numel(shape)
    if elements > MAX_ELEMENTS:
        _fail(where, what, f"shape {list(shape)} has more than 2^59 elements")
    return elements


def _sources(sources: Sequence[SourceEntry], files: int, where: str) -> dict[str, int]:
    """Elements by name. Whole columns at a time: an index may list a hundred thousand."""
    kinds = [(source.dtype, source.shape) for source in sources]
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    for kind in set(kinds):
        known[kind] = _tensor(*kind, where, f"source {sources[kinds.index(kind)].name!r}")
    elements = dict(zip([source.name for source in sources], map(known.__getitem__, kinds)))
    if len(elements) != len(sources):
        twice = Counter(source.name for source in sources).most_common(1)[0][0]
        _fail(where, "sources", f"{twice!r} is there twice")
    for file in {source.file for source in sources}:
        if file is not None and file >= files:
            name = next(source.name for source in sources if source.file == file)
            _fail(where, f"source {name!r}", f"file {file} is not among the {files} files")
    return elements


def _applications(
    layer: Layer, sources: dict[str, int], tensors: dict[str, TensorEntry], checked: set[tuple[View, int]], where: str
) -> None:
    prefix = f"{layer.name}." if layer.name else ""
    for application in layer.applications:
        if prefix + application.tensor not in tensors:
            _fail(
                where, f"layer {layer.name!r}", f"an application writes {application.tensor!r}, which it does not own"
            )
        for source in application.sources:
            if source not in sources:
                _fail(
                    where, f"layer {layer.name!r}", f"an application reads {source!r}, which is not among the sources"
                )
        for write in application.writes:
            what = f"layer {layer.name!r}, a write of {application.tensor!r}"
            if write.tensor is not None and write.tensor not in tensors:
                _fail(where, what, f"goes to {write.tensor!r}, which no layer owns")
            src, dst = write.src, write.dst
            if write.source is not None and write.source >= len(application.sources):
                _fail(where, what, f"reads source {write.source} of {len(application.sources)}")
            if src is not None and write.source is not None and write.src_dtype is None:
                _view(src, sources[application.sources[write.source]], checked, where, what, "source")
            if dst is not None and write.dst_dtype is None and write.exact:
                tensor = tensors[write.tensor or prefix + application.tensor]
                _view(dst, _extent(tensor), checked, where, what, "destination")


def _extent(tensor: TensorEntry) -> int:
    if tensor.stride is None:
        return numel(tensor.shape)
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride)) if numel(tensor.shape) else 0


def _view(view: View, extent: int, checked: set[tuple[View, int]], where: str, what: str, side: str) -> None:
    if (view, extent) in checked:
        return
    if len(view.shape) != len(view.stride):
        _fail(where, what, f"the {side} view has {len(view.shape)} sizes and {len(view.stride)} strides")
    if 0 not in view.shape:
        last = view.offset + sum((size - 1) * step for size, step in zip(view.shape, view.stride))
        if last >= extent:
            _fail(where, what, f"the {side} view reaches element {last} of {extent}")
    checked.add((view, extent))
