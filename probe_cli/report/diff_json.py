"""A diff for machines: every change, complete enough to be applied as a patch."""

from __future__ import annotations

import msgspec

from probe_cli.manifest.diff import DiffReport, DiffSide
from probe_cli.manifest.diff_change import Change
from probe_cli.report.json_lines import object_members
from probe_cli.report.plain import printable

__all__ = ["DIFF_FORMAT", "DIFF_VERSION", "diff_json"]

DIFF_FORMAT = "probe-manifest/diff"
DIFF_VERSION = "1.0"


def diff_json(report: DiffReport) -> str:
    """The diff as JSON, a change to a line. `docs/diff.md` lists its fields."""
    head = {
        "format": DIFF_FORMAT,
        "version": DIFF_VERSION,
        "old": _side(report.old),
        "new": _side(report.new),
        "worst": report.worst,
        "counts": report.counts(),
    }
    return "{\n" + object_members(head, "changes", map(_change, report.changes), "  ") + "\n}\n"


def _side(side: DiffSide) -> DiffSide:
    return msgspec.structs.replace(side, path=printable(side.path))


def _change(change: Change) -> dict[str, object]:
    fields: dict[str, object] = msgspec.structs.asdict(change)
    head = {"kind": change.kind, "class": change.change_class, "section": change.section, "reason": change.reason}
    return {**head, **{name: value for name, value in fields.items() if value is not None}}
