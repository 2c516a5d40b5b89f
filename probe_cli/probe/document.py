"""From a recording to a manifest: names for indices, compact regions, coverage, the numbers of the summary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from probe_cli.checkpoint import Checkpoint
from probe_cli.dtypes import DTYPE_BITS, numel
from probe_cli.manifest import Manifest
from probe_cli.manifest.coverage import Footprint, coverage, union_size
from probe_cli.manifest.identity import checkpoint_identity
from probe_cli.manifest.regions import contiguous, is_whole, rescale
from probe_cli.manifest.schema import (
    Application,
    Coverage,
    EngineIdentity,
    Layer,
    ModelIdentity,
    SourceEntry,
    Summary,
    TensorEntry,
    View,
    Write,
)
from probe_cli.model.dtypes import dtype_name, torch_dtype
from probe_cli.probe.applications import Entry
from probe_cli.probe.replay import Recording, TensorState
from probe_cli.probe.writes import ModelWrite
from probe_cli.topology import Rank

__all__ = ["manifest_of"]


def manifest_of(
    recording: Recording, checkpoint: Checkpoint, rank: Rank, engine: EngineIdentity, model_class: str
) -> Manifest:
    """The manifest of one rank. The recording's model may be gone."""
    writes = _writes_by_tensor(recording)
    layers = tuple(_layer(name, recording, checkpoint, writes) for name in recording.layers)
    return Manifest.build(
        engine=engine,
        topology=rank.topology,
        rank=rank,
        model=_model_identity(checkpoint, model_class),
        checkpoint=checkpoint_identity(checkpoint),
        sources=tuple(
            SourceEntry(source.name, source.dtype, source.shape, source.file)
            for index, source in enumerate(checkpoint.sources)
            if index in recording.consumed
        ),
        layers=layers,
        summary=_summary(recording, checkpoint, layers),
    )


def _model_identity(checkpoint: Checkpoint, model_class: str) -> ModelIdentity:
    architectures = (checkpoint.config or {}).get("architectures")
    return ModelIdentity(
        class_name=model_class,
        architecture=architectures[0] if isinstance(architectures, list) and architectures else None,
        config_digest=checkpoint.config_digest,
    )


#: For each tensor (by full name): a footprint for what applications write to it, and whether all of them are exact.
_Footprints = dict[str, tuple[list[Footprint], bool]]


def _writes_by_tensor(recording: Recording) -> _Footprints:
    states = {state.owned.full_name: state for layer in recording.tensors.values() for state in layer.values()}
    groups: dict[str, list[str]] = {}
    for name, leader in recording.aliases.items():
        groups.setdefault(leader, []).append(name)
    found: _Footprints = {}
    for writes, times in _calls(recording):
        touched: dict[str, list[ModelWrite]] = {}
        for write in writes:
            touched.setdefault(write.owned.full_name, []).append(write)
        for name, part in touched.items():
            written = states.get(name)
            for member in groups.get(recording.aliases.get(name, ""), [name]):
                state = states.get(member)
                if state is None:
                    continue
                footprints, exact = found.get(member, ([], True))
                shared = part
                if written is not None and written is not state:
                    shared = [write for write in part if _shared(write, written, state)]
                    if not shared:
                        continue
                views = [_destination(write, state, written) for write in shared]
                known = [view for view in views if view is not None]
                footprints.append((known, times))
                exact = exact and len(known) == len(views) and not any(write.partial for write in shared)
                found[member] = (footprints, exact)
    return found


def _calls(recording: Recording) -> Iterator[tuple[tuple[ModelWrite, ...], int]]:
    """What each application wrote, and how many times just that was written: one key may write now here, now there."""
    for keys in recording.contracts.values():
        for entry in keys.values():
            yield from entry.calls.items()


def _destination(write: ModelWrite, state: TensorState, written: TensorState | None) -> View | None:
    """A write as a view of a tensor (or of one that shares its storage), in that tensor's elements."""
    view = write.dst
    if write.dst_dtype is not None:
        scaled = rescale(view, write.dst_dtype.itemsize, state.dtype.itemsize)
        if scaled is None:
            return None
        view = scaled
    if written is not None and written is not state:
        if written.dtype.itemsize != state.dtype.itemsize:
            return None
        view = View(view.offset + written.storage_offset - state.storage_offset, view.shape, view.stride)
    return view if view.offset >= 0 else None


def _shared(write: ModelWrite, written: TensorState, state: TensorState) -> bool:
    """Whether a write to one tensor of a storage reaches bytes of another."""
    dtype = write.dst_dtype or written.dtype
    view = View(0, write.dst.shape, write.dst.stride)
    start = written.storage_offset * written.dtype.itemsize + write.dst.offset * dtype.itemsize
    low = state.storage_offset * state.dtype.itemsize
    own = View(0, state.shape, state.stride)
    return start < low + _reach(own) * state.dtype.itemsize and low < start + _reach(view) * dtype.itemsize


def _reach(view: View) -> int:
    """Elements from the first to the last of a view."""
    return 0 if 0 in view.shape else 1 + sum((size - 1) * step for size, step in zip(view.shape, view.stride))


def _layer(name: str, recording: Recording, checkpoint: Checkpoint, writes: _Footprints) -> Layer:
    tensors = tuple(_tensor(state, recording, writes) for state in recording.tensors[name].values())
    module = recording.layers[name].module
    applications = tuple(
        _application(entry, recording, checkpoint) for entry in recording.contracts.get(name, {}).values()
    )
    return Layer(name=name, class_name=type(module).__name__, tensors=tensors, applications=applications)


def _tensor(state: TensorState, recording: Recording, writes: _Footprints) -> TensorEntry:
    owned = state.owned
    stride = None if state.stride == contiguous(state.shape) else state.stride
    covered: Coverage | None = None
    if owned.full_name in writes:
        footprints, exact = writes[owned.full_name]
        covered = coverage(state.shape, footprints, stride, exact=exact)
    return TensorEntry(
        name=owned.name,
        dtype=dtype_name(state.dtype),
        shape=state.shape,
        stride=stride,
        kind=owned.kind,
        persistent=owned.persistent,
        alias=recording.aliases.get(owned.full_name),
        storage_offset=state.storage_offset,
        coverage=covered if owned.full_name in writes else _never_written(state),
    )


def _never_written(state: TensorState) -> Coverage | None:
    total = numel(state.shape)
    return None if total == 0 else Coverage(gap_elements=total, gaps=(tuple((0, size) for size in state.shape),))


def _application(entry: Entry, recording: Recording, checkpoint: Checkpoint) -> Application:
    order = {source: position for position, source in enumerate(entry.sources)}
    return Application(
        sources=tuple(checkpoint.sources[index].name for index in entry.sources),
        tensor=entry.owned.name,
        selectors=entry.selectors,
        count=entry.count,
        direct=entry.direct,
        attribution=entry.attribution,
        writes=tuple(_write(write, entry, order, recording, checkpoint) for write in entry.writes),
    )


def _write(
    write: ModelWrite, entry: Entry, order: dict[int, int], recording: Recording, checkpoint: Checkpoint
) -> Write:
    owned = write.owned
    state = recording.tensors.get(owned.layer, {}).get(owned.name)
    src = write.src
    if (
        write.source is not None
        and src is not None
        and write.src_dtype is None
        and is_whole(src, checkpoint.sources[write.source].shape)
    ):
        src = None
    dst: View | None = write.dst
    dense = state is not None and write.dst_dtype is None and state.stride == contiguous(state.shape)
    if dense and state is not None and is_whole(write.dst, state.shape):
        dst = None
    dst_dtype, exact = write.dst_dtype, write.exact
    if dst is not None and state is not None and not _fits(write, state):
        dst, dst_dtype, exact = None, None, False  # the tensor was larger then, and has been replaced since
    return Write(
        source=None if write.source is None else order[write.source],
        src=src,
        dst=dst,
        tensor=None if owned.full_name == entry.owned.full_name else owned.full_name,
        src_dtype=_name(write.src_dtype),
        dst_dtype=_name(dst_dtype),
        computed=write.computed,
        exact=exact,
        accumulates=write.accumulates,
    )


def _fits(write: ModelWrite, state: TensorState) -> bool:
    """Whether a write lies within the tensor as it is when the load is over."""
    size = state.dtype.itemsize if write.dst_dtype is None else write.dst_dtype.itemsize
    own = _reach(View(0, state.shape, state.stride)) * state.dtype.itemsize
    return write.dst.offset >= 0 and (write.dst.offset + _reach(write.dst)) * size <= own


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else dtype_name(dtype)


def _summary(recording: Recording, checkpoint: Checkpoint, layers: tuple[Layer, ...]) -> Summary:
    entries = [entry for keys in recording.contracts.values() for entry in keys.values()]
    tensors = [tensor for layer in layers for tensor in layer.tensors]
    unfed = [tensor for tensor in tensors if _is_unfed(tensor)]
    return Summary(
        layers=len(layers),
        tensors=len(tensors),
        applications=sum(entry.count for entry in entries),
        declined=recording.declined,
        direct_writes=sum(entry.count for entry in entries if entry.direct),
        computed=sum(entry.count for entry in entries if any(write.computed for write in entry.writes)),
        gaps=sum(1 for t in tensors if t.coverage is not None and t.coverage.gap_elements and not _is_unfed(t)),
        overlaps=sum(1 for t in tensors if t.coverage is not None and t.coverage.overlap_elements),
        unfed=len(unfed),
        sources_used=len(recording.consumed),
        bytes_read=_bytes_read(entries, checkpoint),
    )


def _is_unfed(tensor: TensorEntry) -> bool:
    return tensor.coverage is not None and tensor.coverage.gap_elements == numel(tensor.shape)


def _bytes_read(entries: Iterable[Entry], checkpoint: Checkpoint) -> int:
    views: dict[int, list[View | None]] = {}
    for entry in entries:
        read = {write.source for write in entry.writes}
        for write in entry.writes:
            if write.source is not None:
                views.setdefault(write.source, []).append(_in_source_units(write, checkpoint))
        for source in entry.sources:
            if source not in read:  # offered and accepted, but only constants were written
                views.setdefault(source, [])
    total = 0
    for index, selected in views.items():
        header = checkpoint.sources[index]
        total += union_size(header.shape, selected) * DTYPE_BITS[header.dtype] // 8
    return total


def _in_source_units(write: ModelWrite, checkpoint: Checkpoint) -> View | None:
    if write.src is None or write.source is None:
        return None
    source = checkpoint.sources[write.source]
    if source.dtype == "F4":
        return None
    if write.src_dtype is None:
        return write.src
    return rescale(write.src, write.src_dtype.itemsize, torch_dtype(source.dtype).itemsize)
