"""Layers, tensors and applications of a rank, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from probe_cli.manifest import Manifest
from probe_cli.manifest.keys import CONSTANT, describe_selectors
from probe_cli.manifest.patterns import fold_text
from probe_cli.manifest.schema import Application, Coverage, TensorEntry
from probe_cli.report.geometry import box_text, shape_text, write_text
from probe_cli.report.numbers import plural
from probe_cli.report.plain import printable
from probe_cli.report.selection import PickedLayer, full_name, is_unfed

__all__ = ["application_lines", "coverage_lines", "coverage_text", "details_json", "layer_lines", "tensor_text"]

_MAX_BOXES = 6


def layer_lines(manifest: Manifest, picked: Iterable[PickedLayer]) -> list[str]:
    """Each layer with its tensors, and below each tensor what is loaded into it."""
    shapes = {source.name: source.shape for source in manifest.sources}
    lines: list[str] = []
    for item in picked:
        lines.append(f"{printable(item.layer.name) or '(the model itself)'}: {printable(item.layer.class_name)}")
        for tensor in item.tensors:
            lines.append(f"  {tensor_text(tensor)}")
            for application in item.applications:
                if application.tensor == tensor.name:
                    lines += [f"    {line}" for line in application_lines(application, shapes, tensor)]
    return lines


def tensor_text(tensor: TensorEntry) -> str:
    """One tensor on a line: name, dtype, shape, what is special about it."""
    parts = [f"{tensor.name}: {tensor.dtype} {shape_text(tensor.shape)}"]
    if tensor.kind == "buffer":
        parts.append("buffer" if tensor.persistent else "buffer, not in the state dict")
    if tensor.alias is not None:
        parts.append(f"shares storage as {tensor.alias}")
    covered = "never written" if is_unfed(tensor) else coverage_text(tensor.coverage, tensor.shape)
    return printable("; ".join([*parts, covered] if covered else parts))


def coverage_text(coverage: Coverage | None, shape: tuple[int, ...]) -> str:
    """Gaps and overlaps with their boxes; empty if every element is written once."""
    if coverage is None:
        return ""
    parts = []
    for count, boxes, what in (
        (coverage.gap_elements, coverage.gaps, "never written"),
        (coverage.overlap_elements, coverage.overlaps, "written more than once"),
    ):
        if count:
            shown = [box_text(box, shape) for box in boxes[:_MAX_BOXES]]
            more = f" and {len(boxes) - _MAX_BOXES} more" if len(boxes) > _MAX_BOXES else ""
            parts.append(f"{plural(count, 'element')} {what}: {', '.join(shown)}{more}")
    if not coverage.exact:
        parts.append("coverage is an upper bound")
    return "; ".join(parts)


def application_lines(application: Application, shapes: dict[str, tuple[int, ...]], tensor: TensorEntry) -> list[str]:
    """An application as one line, or a line per write if there are several."""
    head = " + ".join(application.sources) or CONSTANT
    selectors = describe_selectors(application.selectors)
    if selectors:
        head += f" [{selectors}]"
    if application.count > 1:
        head += f" x{application.count}"
    if application.direct:
        head += " (direct write)"
    if application.attribution == "stream":
        head += " (source known by the stream)"
    writes = [write_text(write, application, shapes, tensor.shape) for write in application.writes]
    if len(writes) == 1:
        return [printable(f"{head}: {writes[0]}")]
    return [printable(head), *(printable(f"  {write}") for write in writes)]


def coverage_lines(picked: Iterable[PickedLayer]) -> list[str]:
    """Tensors with the same gaps or overlaps on one line, their names folded."""
    groups: dict[str, list[str]] = {}
    for item in picked:
        for tensor in item.tensors:
            what = "never written" if is_unfed(tensor) else coverage_text(tensor.coverage, tensor.shape)
            text = f"{tensor.dtype} {shape_text(tensor.shape)}: {what}"
            groups.setdefault(text, []).append(full_name(item.layer.name, tensor.name))
    return [printable(line) for text, names in groups.items() for line in (*fold_text(names), f"  {text}")]


def details_json(picked: Iterable[PickedLayer]) -> list[dict[str, Any]]:
    """The picked layers as they stand in the manifest."""
    return [
        {
            "layer": item.layer.name,
            "class": item.layer.class_name,
            "tensors": [msgspec.to_builtins(tensor) for tensor in item.tensors],
            "applications": [msgspec.to_builtins(application) for application in item.applications],
        }
        for item in picked
    ]
