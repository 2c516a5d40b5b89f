"""One name explained over all ranks: what a source feeds, or what feeds a tensor."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import msgspec

from probe_cli.errors import UsageError
from probe_cli.manifest import Bundle, Manifest
from probe_cli.manifest.patterns import fold_text, format_numbers
from probe_cli.manifest.schema import Application, Layer, SourceEntry, TensorEntry
from probe_cli.report.details import application_lines, tensor_text
from probe_cli.report.geometry import shape_text
from probe_cli.report.numbers import plural
from probe_cli.report.plain import printable
from probe_cli.report.selection import full_name

__all__ = ["Explanation", "explain"]


class Target(msgspec.Struct, frozen=True):
    """One rank's tensor that the name concerns, with the applications that do."""

    rank: int
    layer: str
    class_name: str = msgspec.field(name="class")
    tensor: TensorEntry
    applications: tuple[Application, ...]
    #: Applications and sources that the layer needs before it is processed and published.
    layer_applications: int
    layer_sources: int


class Explanation(msgspec.Struct, frozen=True):
    """What a name is and what it has to do with each rank."""

    name: str
    #: "source" or "tensor".
    kind: str
    source: SourceEntry | None
    #: Why no rank uses the source, if none does.
    unused: str | None
    ranks: tuple[int, ...]
    targets: tuple[Target, ...]
    shapes: dict[str, tuple[int, ...]]

    def to_json(self) -> dict[str, Any]:
        """For programs; shapes are those of the sources involved."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def lines(self, limit: int | None = 40) -> list[str]:
        """For people; ranks that say the same share a section."""
        lines = [self._headline()]
        if self.unused is not None:
            lines.append(f"no rank uses it: {self.unused}")
        sections: dict[tuple[str, ...], list[int]] = {}
        for target in self.targets:
            sections.setdefault(tuple(self._section(target, limit)), []).append(target.rank)
        for section, ranks in sections.items():
            lines += ["", f"{_ranks(ranks)}:", *(f"  {line}" for line in section)]
        others = sorted(set(self.ranks).difference(target.rank for target in self.targets))
        if others and self.unused is None:
            lines += ["", f"{_ranks(others)}: {'do' if len(others) > 1 else 'does'} not {self._absent()}"]
        return lines

    def _headline(self) -> str:
        if self.source is None:
            return printable(f"{self.name}: a tensor of the model")
        return printable(f"{self.name}: source, {self.source.dtype} {shape_text(self.source.shape)}")

    def _absent(self) -> str:
        return "need it" if self.kind == "source" else "have it"

    def _section(self, target: Target, limit: int | None) -> list[str]:
        tensor = target.tensor
        lines = [printable(f"{target.layer or '(the model itself)'} ({target.class_name})"), f"  {tensor_text(tensor)}"]
        fed = [line for a in target.applications for line in application_lines(a, self.shapes, tensor)]
        if limit is not None and len(fed) > limit:
            fed = [*fed[:limit], f"... and {len(fed) - limit:,} more (-v)"]
        lines += [f"    {line}" for line in fed] or ["    nothing writes it"]
        if target.layer_applications == 1:
            lines.append("  the layer is published when this has arrived")
        elif target.layer_applications:
            lines.append(
                f"  the layer is published when all of its {plural(target.layer_applications, 'application')} from "
                f"{plural(target.layer_sources, 'source')} have arrived"
            )
        return lines


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + format_numbers(sorted(set(ranks)))


def explain(origin: Bundle | Manifest, name: str) -> Explanation:
    """Everything the manifests say about a source or a tensor of this name.

    Raises UsageError if there is neither, with the names that are close to it.
    """
    manifests = list(origin.manifests()) if isinstance(origin, Bundle) else [origin]
    every = origin.index.sources if isinstance(origin, Bundle) else origin.sources
    source = next((entry for entry in every if entry.name == name), None)
    targets = [target for one in manifests for target in _targets(one, name, is_source=source is not None)]
    unused = None
    if source is not None and not targets:
        unused = _why_unused(origin, name)
    if source is None and not targets:
        raise UsageError(f"no source and no tensor {name!r} in this manifest", hint=_suggestion(manifests, every, name))
    involved = {s for target in targets for application in target.applications for s in application.sources}
    return Explanation(
        name=name,
        kind="source" if source is not None else "tensor",
        source=source,
        unused=unused,
        ranks=tuple(one.rank.index for one in manifests),
        targets=tuple(targets),
        shapes={entry.name: entry.shape for entry in every if entry.name in involved},
    )


def _targets(manifest: Manifest, name: str, *, is_source: bool) -> Iterable[Target]:
    for layer in manifest.layers:
        for tensor in layer.tensors:
            full = full_name(layer.name, tensor.name)
            if is_source:
                concerned = tuple(a for a in layer.applications if name in a.sources and a.tensor == tensor.name)
                if concerned:
                    yield _target(manifest, layer, tensor, concerned)
            elif full == name or layer.name == name:
                yield _target(manifest, layer, tensor, tuple(a for a in layer.applications if _writes(a, layer, full)))


def _writes(application: Application, layer: Layer, full: str) -> bool:
    own = full_name(layer.name, application.tensor)
    return own == full or any(write.tensor == full for write in application.writes)


def _target(manifest: Manifest, layer: Layer, tensor: TensorEntry, applications: tuple[Application, ...]) -> Target:
    return Target(
        rank=manifest.rank.index,
        layer=layer.name,
        class_name=layer.class_name,
        tensor=tensor,
        applications=applications,
        layer_applications=sum(application.count for application in layer.applications),
        layer_sources=len({source for application in layer.applications for source in application.sources}),
    )


def _why_unused(origin: Bundle | Manifest, name: str) -> str:
    if isinstance(origin, Bundle):
        for reason, names in origin.index.unused.items():
            if name in names:
                return reason
    return "not by the ranks at hand"


def _suggestion(manifests: list[Manifest], every: Iterable[SourceEntry], name: str) -> str:
    known = {entry.name for entry in every}
    for one in manifests[:1]:
        known.update(full_name(layer.name, tensor.name) for layer in one.layers for tensor in layer.tensors)
    tail = name.rsplit(".", 2)[-1]
    close = difflib.get_close_matches(name, [n for n in known if n.endswith(tail)] or known, n=3, cutoff=0.7)
    if close:
        return f"close to it: {', '.join(sorted(close))}"
    inside = fold_text([n for n in known if name in n], 3)
    return f"names that contain it: {'; '.join(inside)}" if inside else "probe-manifest show lists what there is"
