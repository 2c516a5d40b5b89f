"""Many like findings as few: names folded into patterns, ranks and layers joined."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from probe_cli.manifest.findings import CODES, Finding, Severity
from probe_cli.manifest.patterns import fold, format_numbers, merge_words

__all__ = ["FoldedFinding", "describe_ranks", "fold_findings"]


class FoldedFinding(msgspec.Struct, frozen=True):
    """Findings that say the same of subjects that one pattern stands for."""

    code: str
    severity: Severity
    subject: str
    what: str
    count: int
    ranks: tuple[int, ...]
    #: Patterns of the layers whose contract it touches.
    layers: tuple[str, ...]
    explanation: str | None
    #: Patterns of the names under which the subjects were found instead.
    found: tuple[str, ...]
    hint: str | None
    file: str | None

    @property
    def name(self) -> str:
        return CODES[self.code].name

    @property
    def message(self) -> str:
        """One line: pattern, number and what is wrong."""
        if self.count == 1:
            text = self.what
        else:
            text = f"{self.count:,} missing" if self.what == "missing" else f"{self.what} ({self.count:,} of them)"
        return f"{self.subject}: {text}" if self.subject else text

    @property
    def details(self) -> list[str]:
        """Lines that say more: who needs it, what is there instead, what to do."""
        lines: list[str] = []
        if self.layers or self.ranks:
            by = f"needed by {_some(self.layers)}" if self.layers else ""
            lines.append(" on ".join(part for part in (by, describe_ranks(self.ranks)) if part))
        if self.explanation:
            lines.append(self.explanation)
        if self.found:
            lines.append(f"found as {_some(self.found)}")
        if self.hint:
            lines.append(self.hint)
        return lines


def fold_findings(findings: Iterable[Finding]) -> list[FoldedFinding]:
    """Errors first, then by code; within a code in the order in which the kinds first appear."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        key = (finding.code, finding.severity, finding.what, finding.explanation, finding.hint)
        groups.setdefault(key, []).append(finding)
    folded: list[FoldedFinding] = []
    for group in groups.values():
        folded += _fold_group(group)
    return sorted(folded, key=lambda f: (f.severity != "error", f.code))


def describe_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-7`; empty without ranks."""
    numbers = sorted(ranks)
    if not numbers:
        return ""
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {format_numbers(numbers)}"


def _fold_group(group: list[Finding]) -> Iterable[FoldedFinding]:
    if len(group) == 1:
        yield _join(group[0].subject, group)
        return
    by_subject: dict[str, list[Finding]] = {}
    for finding in group:
        by_subject.setdefault(finding.subject, []).append(finding)
    for text, patterns in merge_words(fold(by_subject)):
        names = [name for pattern in patterns for name in pattern.names()]
        yield _join(text, [finding for name in names for finding in by_subject[name]])


def _join(subject: str, findings: list[Finding]) -> FoldedFinding:
    first = findings[0]
    found = [finding.found for finding in findings if isinstance(finding.found, str)] if first.code == "PM101" else []
    files = {finding.file for finding in findings}
    return FoldedFinding(
        code=first.code,
        severity=first.severity,
        subject=subject,
        what=first.what,
        count=len(findings),
        ranks=tuple(sorted({rank for finding in findings for rank in finding.ranks})),
        # A layer takes many sources: each is folded once.
        layers=_folded({layer or "(the model itself)": None for finding in findings for layer in finding.layers}),
        explanation=first.explanation,
        found=_folded(found),
        hint=first.hint,
        file=files.pop() if len(files) == 1 else None,
    )


def _folded(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(text for text, _ in merge_words(fold(names)))


def _some(patterns: tuple[str, ...], limit: int = 4) -> str:
    shown = ", ".join(patterns[:limit])
    return shown if len(patterns) <= limit else f"{shown} and {len(patterns) - limit:,} more"
