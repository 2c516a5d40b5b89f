"""Findings for machines: complete, one object each."""

from __future__ import annotations

from typing import Any

import msgspec

from probe_cli.manifest.check import CheckedManifest, CheckReport
from probe_cli.manifest.findings import Finding
from probe_cli.report.json_lines import object_members
from probe_cli.report.plain import printable

__all__ = ["REPORT_FORMAT", "REPORT_VERSION", "findings_json"]

REPORT_FORMAT = "probe-manifest/check"
REPORT_VERSION = "1.0"


def findings_json(report: CheckReport) -> str:
    """The report as JSON, a finding to a line. `docs/findings.md` lists its fields."""
    head = {
        "format": REPORT_FORMAT,
        "version": REPORT_VERSION,
        "ok": report.exit_code == 0,
        "exit_code": report.exit_code,
        "errors": report.count("error"),
        "warnings": report.count("warning"),
        "suppressed": report.suppressed,
        "unread": report.unread,
        "checkpoint": {
            "name": None if report.checkpoint is None else printable(report.checkpoint),
            "digest": report.checkpoint_digest,
            "sources": report.checkpoint_sources,
        },
    }
    manifests = ",\n    ".join(map(_manifest, report.manifests))
    members = object_members(head, "findings", map(_finding, report.findings), "  ")
    return f'{{\n{members},\n  "manifests": [\n    {manifests}\n  ]\n}}\n'


def _manifest(manifest: CheckedManifest) -> str:
    head = {
        "path": printable(manifest.path),
        "digest": manifest.digest,
        "engine": manifest.engine,
        "topology": manifest.topology,
        "ranks": manifest.ranks,
        "sources": manifest.sources,
    }
    return "{\n" + object_members(head, "findings", map(_finding, manifest.findings), "      ") + "\n    }"


def _finding(finding: Finding) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.structs.asdict(finding)
    if finding.file is not None:
        fields["file"] = printable(finding.file)
    return {"name": finding.name, "message": finding.message, **fields}
