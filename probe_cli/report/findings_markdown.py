"""Findings as Markdown, for a job summary or a pull request comment: bounded in length, details folded away."""

from __future__ import annotations

from probe_cli.manifest.check import CheckReport
from probe_cli.manifest.fold_findings import FoldedFinding, describe_ranks, fold_findings
from probe_cli.report.findings_text import verdict
from probe_cli.report.plain import clip, markdown_code, markdown_text

__all__ = ["MAX_MARKDOWN", "findings_markdown"]

#: GitHub takes comments of 65,536 characters.
MAX_MARKDOWN = 60_000
_OPEN_ROWS = 15


def findings_markdown(report: CheckReport, limit: int = MAX_MARKDOWN) -> str:
    """One table per manifest; what is beyond the first rows stands in a folded section, and what is beyond the limit
    is counted."""
    sign = {0: "passed", 1: "failed", 2: "could not be completed"}[report.exit_code]
    parts = [f"### probe-manifest check {sign}", "", markdown_text(verdict(report)), ""]
    sections = [("", report.findings), *((manifest.path, manifest.findings) for manifest in report.manifests)]
    room = limit - sum(map(len, parts)) - 400
    for path, findings in sections:
        folded = fold_findings(findings)
        if not folded:
            continue
        head = [f"**{markdown_code(path)}**", ""] if path else []
        head += ["| | code | what | ranks |", "|---|---|---|---|"]
        rows: list[str] = []
        room -= sum(map(len, head))
        for finding in folded:
            row = _row(finding)
            if len(row) + 1 > room:
                break
            room -= len(row) + 1
            rows.append(row)
        parts += [*head, *rows[:_OPEN_ROWS], ""]
        if len(rows) > _OPEN_ROWS:
            more = len(rows) - _OPEN_ROWS
            parts += [
                f"<details><summary>{more:,} more patterns</summary>",
                "",
                *head[-2:],
                *rows[_OPEN_ROWS:],
                "",
                "</details>",
                "",
            ]
        if len(rows) < len(folded):
            parts += [f"... and {sum(f.count for f in folded[len(rows) :]):,} more findings that do not fit here.", ""]
    return "\n".join(parts)


def _row(finding: FoldedFinding) -> str:
    detail = "; ".join(line for line in finding.details if not line.startswith(("rank", "needed")))
    what = markdown_code(clip(finding.subject, 400)) if finding.subject else ""
    text = finding.message.removeprefix(finding.subject).removeprefix(": ")
    text = markdown_text(clip(text, 400))
    if detail:
        text += "<br>" + markdown_text(clip(detail, 400))
    return f"| {finding.severity} | {finding.code} {finding.name} | {what} {text} | {describe_ranks(finding.ranks)} |"
