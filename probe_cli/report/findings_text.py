"""Findings for people: folded, one line each with what it touches below; every name with `verbose`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from probe_cli.manifest.bundle import INDEX_FILE
from probe_cli.manifest.check import CheckedManifest, CheckReport
from probe_cli.manifest.findings import Finding
from probe_cli.manifest.fold_findings import FoldedFinding, describe_ranks, fold_findings
from probe_cli.report.plain import printable

__all__ = ["artifact", "findings_text", "verdict"]

_COLORS = {"error": "\033[31;1m", "warning": "\033[33m", "ok": "\033[32m"}
_LIMIT = 40


def findings_text(report: CheckReport, *, verbose: bool = False, quiet: bool = False, color: bool = False) -> str:
    """The whole report, each manifest's findings below its heading. `quiet` leaves errors only."""

    def told(findings: Iterable[Finding]) -> list[str]:
        wanted = [finding for finding in findings if not quiet or finding.severity == "error"]
        return list(_full(wanted, color) if verbose else _folded(fold_findings(wanted), color))

    several = len(report.manifests) > 1
    lines: list[str] = []
    general = told(report.findings)
    if several:
        lines, general = general, []
    for manifest in report.manifests:
        own = told(manifest.findings)
        if not quiet or (several and own):
            lines.append(printable(_heading(manifest)))
        lines += [*general, *own]
    if not quiet:
        lines.append(_paint(printable(verdict(report)), "ok" if report.exit_code == 0 else "error", color))
    return "\n".join(lines) + "\n" if lines else ""


def verdict(report: CheckReport) -> str:
    """The last line: how many errors and warnings, against what."""
    errors, warnings = report.count("error"), report.count("warning")
    against = f" against {report.checkpoint}" if report.checkpoint else ""
    if report.checkpoint_sources:
        against += f" ({report.checkpoint_sources:,} sources)"
    parts = [f"{errors:,} error{'s' * (errors != 1)}"] if errors or report.unread else ["ok"]
    if report.unread:
        parts.append(f"{report.unread:,} input{'s' * (report.unread != 1)} could not be read")
    if warnings:
        parts.append(f"{warnings:,} warning{'s' * (warnings != 1)}")
    if report.suppressed:
        parts.append(f"{report.suppressed:,} ignored")
    return f"{', '.join(parts)}{against}"


def artifact(path: str, finding: FoldedFinding) -> str:
    """The file that a finding is shown at: annotations belong to files, so a bundle stands for its index."""
    if finding.code == "PM202" and finding.file:
        return finding.file
    return os.path.join(path, INDEX_FILE) if path and os.path.isdir(path) else path


def _heading(manifest: CheckedManifest) -> str:
    if not manifest.digest:
        return manifest.path
    return (
        f"{manifest.path}: {describe_ranks(manifest.ranks)} ({manifest.topology}), {manifest.engine}, "
        f"{manifest.sources:,} sources, {manifest.digest[:19]}"
    )


def _folded(findings: Iterable[FoldedFinding], color: bool) -> Iterator[str]:
    findings = list(findings)
    for finding in findings[:_LIMIT]:
        yield _line(finding, color)
        for line in finding.details:
            yield f"    {printable(line)}"
    if len(findings) > _LIMIT:
        rest = findings[_LIMIT:]
        yield f"... and {sum(f.count for f in rest):,} more findings in {len(rest):,} patterns (-v lists all)"


def _full(findings: Iterable[Finding], color: bool) -> Iterator[str]:
    for finding in sorted(findings, key=lambda f: (f.severity != "error", f.code)):
        yield _line(finding, color)
        by = ", ".join(layer or "(the model itself)" for layer in finding.layers)
        touches = " on ".join(part for part in (f"needed by {by}" if by else "", describe_ranks(finding.ranks)) if part)
        if touches:
            yield f"    {printable(touches)}"
        if isinstance(finding.found, str) and finding.code == "PM101":
            yield f"    found as {printable(finding.found)}"
        if finding.hint:
            yield f"    {printable(finding.hint)}"


def _line(finding: FoldedFinding | Finding, color: bool) -> str:
    severity = _paint(finding.severity, finding.severity, color)
    return f"{severity} {finding.code} {finding.name}: {printable(finding.message)}"


def _paint(text: str, style: str, color: bool) -> str:
    return f"{_COLORS[style]}{text}\033[0m" if color and style in _COLORS else text
