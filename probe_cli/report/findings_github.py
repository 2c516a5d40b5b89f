"""Findings as GitHub workflow commands: annotations on the run and the pull request."""

from __future__ import annotations

import hashlib

from probe_cli.manifest.check import CheckReport
from probe_cli.manifest.fold_findings import FoldedFinding, fold_findings
from probe_cli.report.findings_text import artifact, findings_text
from probe_cli.report.plain import clip, github_data, github_property, printable

__all__ = ["findings_github"]

#: GitHub shows ten annotations of a kind per step, and cuts long messages.
_MAX_EACH = 10
_MAX_MESSAGE = 4000


def findings_github(report: CheckReport) -> str:
    """The plain text of the report, and up to ten annotations each for errors and warnings."""
    lines: list[str] = []
    sections = [("", report.findings), *((manifest.path, manifest.findings) for manifest in report.manifests)]
    folded = [(path, finding) for path, findings in sections for finding in fold_findings(findings)]
    for severity in ("error", "warning"):
        own = [(path, finding) for path, finding in folded if finding.severity == severity]
        shown = own if len(own) <= _MAX_EACH else own[: _MAX_EACH - 1]
        lines += [_annotation(path, finding) for path, finding in shown]
        if len(own) > len(shown):
            rest = sum(finding.count for _, finding in own[len(shown) :])
            lines.append(f"::{severity} title=probe-manifest::{rest:,} more {severity}s; the log lists them")
    return "\n".join([*_harmless(findings_text(report)), *lines]) + "\n"


def _harmless(text: str) -> list[str]:
    """The lines of a text, none of which the runner takes for a command, whatever the names in them are.

    The runner looks past leading spaces for `::command::`, and anywhere in a line for `##[command]` (actions/runner,
    src/Runner.Common/ActionCommand.cs); between `stop-commands` and its token it looks for the token alone.
    """
    lines = text.splitlines()
    if not any(line.lstrip().startswith("::") or "##[" in line for line in lines):
        return lines
    # No name can hold the digest of the text that it is in.
    token = hashlib.sha256(text.encode()).hexdigest()[:32]
    return [f"::stop-commands::{token}", *lines, f"::{token}::"]


def _annotation(path: str, finding: FoldedFinding) -> str:
    where = artifact(path, finding)
    file = f"file={github_property(where)}," if where else ""
    title = github_property(f"{finding.code} {finding.name}")
    message = clip("\n".join(map(printable, (finding.message, *finding.details))), _MAX_MESSAGE)
    return f"::{finding.severity} {file}title={title}::{github_data(message)}"
