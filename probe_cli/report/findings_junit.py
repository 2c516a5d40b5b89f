"""Findings as JUnit XML: a suite per manifest, a test case per code, failed where there are errors."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

from probe_cli.manifest.check import CheckReport
from probe_cli.manifest.findings import CODES, Finding
from probe_cli.manifest.fold_findings import FoldedFinding, fold_findings
from probe_cli.report.plain import clip, printable, xml_text

__all__ = ["findings_junit"]

_MAX_TEXT = 100_000


def findings_junit(report: CheckReport) -> str:
    """The report as JUnit XML. Every code is a test case, so a run without findings shows what was looked for."""
    suites = [_suite(report.checkpoint or "checkpoint", report.findings)]
    suites += [_suite(manifest.path, manifest.findings) for manifest in report.manifests]
    tests, failures, errors = (sum(numbers) for numbers in zip(*(numbers for _, numbers in suites)))
    counts = f'tests="{tests}" failures="{failures}" errors="{errors}"'
    body = "\n".join(text for text, _ in suites)
    head = '<?xml version="1.0" encoding="UTF-8"?>\n<testsuites name="probe-manifest check"'
    return f"{head} {counts}>\n{body}\n</testsuites>\n"


def _suite(name: str, findings: Iterable[Finding]) -> tuple[str, tuple[int, int, int]]:
    folded: dict[str, list[FoldedFinding]] = {}
    for finding in fold_findings(findings):
        folded.setdefault(finding.code, []).append(finding)
    cases: list[str] = []
    failures = errors = 0
    for code in CODES.values():
        own = folded.get(code.code, [])
        failed = any(finding.severity == "error" for finding in own)
        failures += failed and not code.trouble
        errors += failed and code.trouble
        cases.append(_case(code.code, own, failed))
    counts = f'tests="{len(cases)}" failures="{failures}" errors="{errors}" skipped="0"'
    text = "\n".join([f"  <testsuite name={_attribute(name)} {counts}>", *cases, "  </testsuite>"])
    return text, (len(cases), failures, errors)


def _case(code: str, findings: list[FoldedFinding], failed: bool) -> str:
    start = f'    <testcase classname="probe-manifest.check" name="{code} {CODES[code].name}" time="0"'
    if not findings:
        return f"{start}/>"
    lines = [line for finding in findings for line in (finding.message, *(f"    {d}" for d in finding.details))]
    text = escape(xml_text(clip("\n".join(map(printable, lines)), _MAX_TEXT)))
    if not failed:
        return f"{start}>\n      <system-out>{text}</system-out>\n    </testcase>"
    tag = "error" if CODES[code].trouble else "failure"
    count = sum(finding.count for finding in findings)
    message = findings[0].message if len(findings) == 1 else f"{count:,} findings, first: {findings[0].message}"
    attributes = f'message={_attribute(clip(message, 1000))} type="{CODES[code].name}"'
    return f"{start}>\n      <{tag} {attributes}>{text}</{tag}>\n    </testcase>"


def _attribute(text: str) -> str:
    return quoteattr(xml_text(printable(text)))
