"""A diff as Markdown, fit for a pull request comment: bounded in length, details folded away."""

from __future__ import annotations

from probe_cli.manifest.diff import DiffReport
from probe_cli.manifest.diff_rules import CLASSES
from probe_cli.manifest.fold_changes import FoldedChange, fold_changes
from probe_cli.manifest.fold_findings import describe_ranks
from probe_cli.report.diff_text import diff_verdict, target
from probe_cli.report.plain import clip, markdown_code, markdown_text

__all__ = ["diff_markdown"]

#: GitHub takes comments of 65,536 characters.
_MAX = 60_000
_OPEN_ROWS = 10
_HEAD = ["| change | what | detail | ranks |", "|---|---|---|---|"]


def diff_markdown(report: DiffReport, limit: int = _MAX) -> str:
    """A section per class; the first rows of what breaks stand open, all else is folded away, and what does not fit is
    counted."""
    parts = [f"### probe-manifest diff: {diff_verdict(report)}", ""]
    parts += [f"{markdown_code(clip(report.old.path, 200))} → {markdown_code(clip(report.new.path, 200))}", ""]
    folded = fold_changes(report.told())
    room = limit - sum(map(len, parts)) - 1000
    for name in CLASSES:
        own = [change for change in folded if change.change_class == name]
        if not own:
            continue
        rows: list[str] = []
        for change in own:
            row = _row(change)
            if len(row) + 1 > room:
                break
            room -= len(row) + 1
            rows.append(row)
        opened = rows[:_OPEN_ROWS] if name == "breaking" else []
        hidden = rows[len(opened) :]
        if opened:
            parts += [f"**{name}**", "", *_HEAD, *opened, ""]
        if hidden:
            title = f"{len(hidden):,} more {name}" if opened else f"{len(hidden):,} {name}"
            parts += [f"<details><summary>{title}</summary>", "", *_HEAD, *hidden, "", "</details>", ""]
        if len(rows) < len(own):
            parts += [f"... and {len(own) - len(rows):,} more {name} that do not fit here.", ""]
    reasons = {change.kind: change.reason for change in folded if change.change_class == "breaking"}
    if reasons:
        parts += ["<details><summary>why breaking</summary>", ""]
        parts += [f"- `{kind}`: {reason}" for kind, reason in reasons.items()]
        parts += ["", "</details>", ""]
    return "\n".join(parts)


def _row(change: FoldedChange) -> str:
    count = f" ({change.count:,})" if change.count > 1 else ""
    what = markdown_code(clip(change.subject + target(change), 400))
    return f"| {change.kind} | {what}{count} | {markdown_text(clip(change.detail, 300))} | {describe_ranks(change.ranks)} |"
