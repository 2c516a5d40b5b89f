"""Regions and boxes as people write them: `[0:64, :]`."""

from __future__ import annotations

from collections.abc import Sequence

from probe_cli.manifest.regions import slabs
from probe_cli.manifest.schema import Application, Box, View, Write

__all__ = ["box_text", "shape_text", "view_text", "write_text"]

_MAX_SLABS = 3


def shape_text(shape: Sequence[int]) -> str:
    """`64x128`; a scalar has the empty shape `scalar`."""
    return "x".join(map(str, shape)) if shape else "scalar"


def box_text(box: Box, shape: Sequence[int]) -> str:
    """A box as indices; a whole dimension is `:`."""
    if not box:
        return "[]"
    return "[" + ", ".join(_range_text(start, stop, 1, size) for (start, stop), size in zip(box, shape)) + "]"


def _range_text(start: int, stop: int, step: int, size: int) -> str:
    if step == 1 and start == 0 and stop == size:
        return ":"
    if stop - start == 1 or (step > 1 and start + step >= stop):
        return str(start)
    return f"{start}:{stop}" + (f":{step}" if step > 1 else "")


def view_text(view: View | None, shape: Sequence[int], stride: Sequence[int] | None = None) -> str:
    """The elements that a view selects of a tensor; None is all of it."""
    if view is None:
        return "all"
    found = slabs(view, tuple(shape), None if stride is None else tuple(stride))
    if found is None or len(found) > _MAX_SLABS:
        return f"{shape_text(view.shape)} from element {view.offset:,}, strides {list(view.stride)}"
    parts = []
    for slab in found:
        if all(start == 0 and stop == size and step == 1 for (start, stop, step), size in zip(slab, shape)):
            return "all"
        ranges = ", ".join(_range_text(start, stop, step, size) for (start, stop, step), size in zip(slab, shape))
        parts.append(f"[{ranges}]")
    return " + ".join(parts) or "nothing"


def write_text(
    write: Write, application: Application, shapes: dict[str, tuple[int, ...]], tensor: Sequence[int]
) -> str:
    """One write as `source[...] -> tensor[...]`, with what went on in between."""
    if write.source is None:
        origin = "a constant"
    else:
        name = application.sources[write.source]
        origin = _reinterpreted(write.src, shapes.get(name), write.src_dtype)
        if len(application.sources) > 1:
            origin = f"{name} {origin}"
    target = _reinterpreted(write.dst, tuple(tensor), write.dst_dtype)
    if write.tensor is not None:
        target = f"{write.tensor} {target}"
    notes = [
        note
        for note, holds in (
            ("computed", write.computed),
            ("upper bound", not write.exact),
            ("accumulates", write.accumulates),
        )
        if holds
    ]
    return f"{origin} -> {target}" + (f" ({', '.join(notes)})" if notes else "")


def _reinterpreted(view: View | None, shape: tuple[int, ...] | None, dtype: str | None) -> str:
    if view is None:
        return "all"
    if shape is None or dtype is not None:
        return f"{shape_text(view.shape)} from element {view.offset:,}" + (f" as {dtype}" if dtype else "")
    return view_text(view, shape)
