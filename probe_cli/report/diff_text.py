"""A diff for people: classed, folded, with the reason where it matters."""

from __future__ import annotations

from collections.abc import Iterator

from probe_cli.manifest.diff import DiffReport, DiffSide
from probe_cli.manifest.fold_changes import FoldedChange, change_detail, fold_changes
from probe_cli.manifest.fold_findings import describe_ranks
from probe_cli.report.plain import printable

__all__ = ["change_line", "diff_text", "diff_verdict", "target"]

_COLORS = {"breaking": "\033[31;1m", "compatible": "\033[33m", "cosmetic": "\033[2m"}
_LIMIT = 60


def diff_text(report: DiffReport, *, verbose: bool = False, color: bool = False) -> str:
    """The whole diff; every change on a line of its own if `verbose`."""
    lines = [f"old {_side(report.old)}", f"new {_side(report.new)}"]
    lines += _every(report) if verbose else _folded(report)
    lines.append(diff_verdict(report))
    painted = [_paint(printable(line), color) for line in lines]
    return "\n".join(painted) + "\n"


def diff_verdict(report: DiffReport) -> str:
    """The last line: how many changes of each class."""
    counts = report.counts()
    others = f" ({report.left_out:,} other{'s' * (report.left_out != 1)} not asked for)" if report.left_out else ""
    if not any(counts.values()):
        return f"no such difference{others}" if others else "no difference"
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) + others


def change_line(change: FoldedChange) -> str:
    """One folded change, without its class."""
    count = f" ({change.count:,})" if change.count > 1 else ""
    ranks = f" [{describe_ranks(change.ranks)}]" if change.ranks else ""
    detail = f": {change.detail}" if change.detail else ""
    return f"{change.kind} {change.subject}{count}{target(change)}{detail}{ranks}"


def target(change: FoldedChange, limit: int = 3) -> str:
    """Where an application writes."""
    more = f" and {len(change.into) - limit} more" if len(change.into) > limit else ""
    return f" -> {', '.join(change.into[:limit])}{more}" if change.into else ""


def _folded(report: DiffReport) -> Iterator[str]:
    folded = fold_changes(report.told())
    for change in folded[:_LIMIT]:
        yield f"{change.change_class} {change_line(change)}"
    if len(folded) > _LIMIT:
        rest = folded[_LIMIT:]
        yield f"... and {sum(max(c.count, 1) for c in rest):,} more changes in {len(rest):,} patterns (-v lists all)"


def _every(report: DiffReport) -> Iterator[str]:
    for change in report.changes:
        if change.echo:
            continue
        rank = f" [rank {change.rank}]" if change.rank is not None else ""
        detail = change_detail(change)
        into = f" -> {change.into}" if change.into is not None else ""
        yield f"{change.change_class} {change.kind} {change.subject}{into}{f': {detail}' if detail else ''}{rank}"


def _side(side: DiffSide) -> str:
    ranks = f", {describe_ranks(side.ranks)}" if side.ranks else ""
    return f"{side.path}: {side.kind}{ranks}, {side.digest[:19]}"


def _paint(line: str, color: bool) -> str:
    style = line.partition(" ")[0]
    return f"{_COLORS[style]}{style}\033[0m{line[len(style) :]}" if color and style in _COLORS else line
