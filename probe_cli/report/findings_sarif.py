"""Findings as SARIF 2.1.0, for code scanning."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from probe_cli.manifest.check import CheckReport
from probe_cli.manifest.findings import CODES, Code, Finding
from probe_cli.manifest.fold_findings import FoldedFinding, fold_findings
from probe_cli.report.findings_text import artifact
from probe_cli.report.plain import clip, printable

__all__ = ["SARIF_SCHEMA", "findings_sarif"]

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
#: Code scanning takes 25,000 results of a run and shows the first 5,000.
_MAX_RESULTS = 5000
_MAX_MESSAGE = 4000
_INDEX = {code: index for index, code in enumerate(CODES)}


def findings_sarif(report: CheckReport, version: str) -> str:
    """The report as a SARIF log; `version` is that of this program. Folded: one result per pattern of names."""
    results = _results(report.checkpoint, report.findings)
    for manifest in report.manifests:
        results += _results(manifest.path, manifest.findings)
    driver = {
        "name": "probe-manifest",
        "semanticVersion": version,
        "rules": [_rule(code) for code in CODES.values()],
    }
    run = {
        "tool": {"driver": driver},
        "invocations": [{"executionSuccessful": report.exit_code < 2, "exitCode": report.exit_code}],
        "columnKind": "unicodeCodePoints",
        "results": results[:_MAX_RESULTS],
        "properties": {"resultsLeftOut": max(0, len(results) - _MAX_RESULTS)},
    }
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rule(code: Code) -> dict[str, Any]:
    return {
        "id": code.code,
        "name": "".join(part.capitalize() for part in code.name.split("-")),
        "shortDescription": {"text": code.name.replace("-", " ")},
        "fullDescription": {"text": code.meaning},
        "help": {"text": code.remedy},
        "defaultConfiguration": {"level": code.severity if code.severity != "off" else "none"},
    }


def _results(path: str | None, findings: Iterable[Finding]) -> list[dict[str, Any]]:
    return [_result(path, finding) for finding in fold_findings(findings)]


def _result(path: str | None, finding: FoldedFinding) -> dict[str, Any]:
    message = clip("\n".join(map(printable, (finding.message, *finding.details))), _MAX_MESSAGE)
    where = artifact(path or "", finding)
    identity = "\0".join((finding.code, finding.subject, finding.what))
    location: dict[str, Any] = {
        "physicalLocation": {"artifactLocation": {"uri": _uri(where or "checkpoint")}, "region": {"startLine": 1}}
    }
    if finding.subject:
        location["logicalLocations"] = [{"fullyQualifiedName": printable(finding.subject), "kind": "resource"}]
    return {
        "ruleId": finding.code,
        "ruleIndex": _INDEX[finding.code],
        "level": finding.severity,
        "message": {"text": message},
        "locations": [location],
        "partialFingerprints": {"finding/v1": hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()},
        "properties": {"count": finding.count, "ranks": list(finding.ranks), "layers": list(finding.layers)},
    }


def _uri(path: str) -> str:
    """A path within the working directory as a relative reference, another one as a file URI, a repository as it is."""
    if "://" in path:
        return quote(os.fsencode(path), safe=":/@.-_~%")
    if not os.path.isabs(path):
        return quote(os.fsencode(path.replace(os.sep, "/")), safe="/.-_~@")
    try:
        return quote(os.fsencode(Path(path).relative_to(Path.cwd()).as_posix()), safe="/.-_~@")
    except ValueError:
        return Path(path).as_uri()
