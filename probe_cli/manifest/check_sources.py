"""Does a checkpoint hold what contracts ask for? The comparison of sources, with near misses explained."""

from __future__ import annotations

from typing import Any, NamedTuple

from probe_cli.checkpoint import Checkpoint
from probe_cli.checkpoint.types import Source
from probe_cli.manifest.bundle import Bundle
from probe_cli.manifest.document import Manifest
from probe_cli.manifest.near_misses import explain_shape, explain_unknown, find_layouts, find_renamed, tied_head
from probe_cli.manifest.schema import BundleIndex, ManifestDocument, SourceEntry
from probe_cli.manifest.uses import find_uses

__all__ = ["Draft", "compare_sources"]

_UNUSED = {
    "declined": "no rank consumes it: loaders were offered it and declined",
    "skipped": "no rank consumes it: load_weights passes over it",
    "unread": "no rank consumes it: load_weights stops before it",
}


class Draft(NamedTuple):
    """A finding before its severity is known."""

    code: str
    fields: dict[str, Any]


def compare_sources(origin: Bundle | Manifest, checkpoint: Checkpoint) -> list[Draft]:
    """What differs between the sources that a bundle (or one rank) was built from and those of a checkpoint."""
    document = origin.index if isinstance(origin, Bundle) else origin.document
    comparison = _Comparison(document, checkpoint)
    # Of an index `check` knows that this digest is that of its sources; a rank's manifest does not list them all.
    if isinstance(origin, Manifest) or document.checkpoint.digest != checkpoint.digest:
        comparison.compare()
    comparison.files()
    return comparison.finish(origin)


class _Comparison:
    def __init__(self, document: BundleIndex | ManifestDocument, checkpoint: Checkpoint) -> None:
        self.document = document
        self.checkpoint = checkpoint
        self.unused: dict[str, str] = {}
        if isinstance(document, BundleIndex):
            self.unused = {name: reason for reason, names in document.unused.items() for name in names}
        self.drafts: list[Draft] = []
        #: Sources for which the ranks and layers that use them are to be found.
        self.touched: dict[int, tuple[str, ...]] = {}

    def add(self, code: str, subject: str, what: str, *, touches: tuple[str, ...] = (), **fields: Any) -> None:
        if touches:
            self.touched[len(self.drafts)] = touches
        self.drafts.append(Draft(code, {"subject": subject, "what": what, **fields}))

    def compare(self) -> None:
        expected = {source.name: source for source in self.document.sources}
        unknown: dict[str, Source] = {}
        for source in self.checkpoint.sources:
            entry = expected.pop(source.name, None)
            if entry is None:
                unknown[source.name] = source
            elif (entry.dtype, entry.shape) != (source.dtype, source.shape) and source.name not in self.unused:
                self.changed(entry, source)
        renamed = find_renamed(expected, unknown)
        was = {there: (name, how) for name, (there, how) in renamed.items() if name in self.unused}
        missing = {name: entry for name, entry in expected.items() if name not in self.unused}
        apart = {name: entry for name, entry in missing.items() if name not in renamed}
        for name, (there, _) in renamed.items():
            if name in missing:
                del unknown[there]
        for layout in find_layouts(apart, unknown):
            self.add(
                "PM106",
                layout.prefix,
                layout.what,
                touches=layout.wanted,
                expected=list(layout.wanted),
                found=list(layout.there),
                explanation=layout.explanation,
            )
            for name in layout.wanted:
                del missing[name]
            for name in layout.there:
                del unknown[name]
        names = self.checkpoint.names() if missing else ()
        for name, entry in missing.items():
            found = renamed.get(name)
            self.add(
                "PM101",
                name,
                "missing",
                touches=(name,),
                expected=_kind(entry),
                found=found[0] if found else None,
                explanation=found[1] if found else tied_head(name, names),
            )
        if isinstance(self.document, BundleIndex):  # one rank cannot tell what others consume
            for name, source in unknown.items():
                what = "not there when the manifest was built, so no rank consumes it"
                before, how = was.get(name, (None, None))
                note = explain_unknown(name) if how is None else f"unused then too, under its old name: {how}"
                self.add(
                    "PM104", name, what, expected=before, found=_kind(source), explanation=note, file=self.file(source)
                )

    def changed(self, entry: SourceEntry, source: Source) -> None:
        fields: dict[str, Any] = {"touches": (source.name,), "file": self.file(source)}
        if entry.shape != source.shape:
            self.add(
                "PM102",
                source.name,
                f"has shape {list(source.shape)}, the contract is for {list(entry.shape)}",
                expected=list(entry.shape),
                found=list(source.shape),
                explanation=explain_shape(entry.shape, source.shape),
                **fields,
            )
        if entry.dtype != source.dtype:
            what = f"has dtype {source.dtype}, the contract is for {entry.dtype}"
            self.add("PM103", source.name, what, expected=entry.dtype, found=source.dtype, **fields)

    def files(self) -> None:
        """Sources in other files, and sources that no rank consumes."""
        for name, reason in self.unused.items():
            if name in self.checkpoint:
                self.add("PM105", name, _UNUSED.get(reason, f"no rank consumes it: {reason}"))
        old = [file.name for file in self.document.checkpoint.files]
        new = [file.name for file in self.checkpoint.files]
        if not old or not new:
            return
        if [(f.name, f.header_digest) for f in self.document.checkpoint.files] == [
            (f.name, f.header_digest) for f in self.checkpoint.files
        ]:
            return
        if not set(old) & set(new):
            if len(old) > 1 or len(new) > 1:
                self.add("PM108", "", f"{len(new):,} files, the manifest was built from {len(old):,} of other names")
            return
        for entry in self.document.sources:
            if entry.file is None or entry.name not in self.checkpoint:
                continue
            place = self.file(self.checkpoint[entry.name])
            if place != old[entry.file]:
                what = f"in {place}, was in {old[entry.file]}"
                touches = () if entry.name in self.unused else (entry.name,)
                self.add("PM107", entry.name, what, touches=touches, expected=old[entry.file], found=place, file=place)

    def file(self, source: Source) -> str | None:
        return None if source.file is None else self.checkpoint.files[source.file].name

    def finish(self, origin: Bundle | Manifest) -> list[Draft]:
        """The drafts, with the ranks and layers that they touch."""
        uses = find_uses(origin, {name for names in self.touched.values() for name in names})
        for number, names in self.touched.items():
            found = [uses[name] for name in names if name in uses]
            fields = self.drafts[number].fields
            if len(found) == 1:
                fields["ranks"], fields["layers"] = tuple(found[0].ranks), tuple(found[0].layers)
            else:
                fields["ranks"] = tuple(sorted({rank for use in found for rank in use.ranks}))
                fields["layers"] = tuple({layer: None for use in found for layer in use.layers})
        return self.drafts


def _kind(source: SourceEntry | Source) -> dict[str, Any]:
    return {"dtype": source.dtype, "shape": list(source.shape)}
