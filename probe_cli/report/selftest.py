"""Selftests as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from probe_cli.report.plain import clip, printable
from probe_cli.report.table import table

if TYPE_CHECKING:
    from probe_cli.probe.selftest import SelfTest, Trial

__all__ = ["detection_rate", "selftest_json", "selftest_lines"]

_BY = {
    "missing": "a key was missing",
    "extra": "a key came too often",
    "header": "a header differed",
    "raised": "load_weights raised",
}
_MAX_UNDETECTED = 20


def detection_rate(results: Iterable[SelfTest]) -> float:
    """Detected trials as a part of all, 0 to 1."""
    trials = [trial for result in results for trial in result.trials]
    return sum(1 for trial in trials if trial.detected_by) / len(trials)


def selftest_lines(results: Sequence[SelfTest], width: int) -> list[str]:
    """A row per kind of alteration, and every trial that nobody noticed."""
    by_kind: dict[str, list[Trial]] = {}
    for result in results:
        for trial in result.trials:
            by_kind.setdefault(trial.kind, []).append(trial)
    rows = []
    for kind, trials in by_kind.items():
        found = Counter(trial.detected_by for trial in trials if trial.detected_by)
        how = ", ".join(f"{_BY[by]} {count:,}x" for by, count in found.most_common())
        rows.append([kind, f"{len(trials):,}", f"{found.total():,}", how])
    lines = table(["altered", "trials", "detected", "how"], rows, right="lrr", width=width)
    ranks = f"{len(results)} rank{'s' * (len(results) != 1)}"
    total = sum(len(result.trials) for result in results)
    lines += ["", f"detection rate {100 * detection_rate(results):.4g} % of {total:,} trials on {ranks}"]
    missed = [(result.rank, trial) for result in results for trial in result.undetected]
    for rank, trial in missed[:_MAX_UNDETECTED]:
        lines.append(printable(f"  not detected on rank {rank}: {clip(trial.altered, 300)} (layer {trial.layer})"))
    if len(missed) > _MAX_UNDETECTED:
        lines.append(f"  ... and {len(missed) - _MAX_UNDETECTED:,} more (--format json lists all)")
    return lines


def selftest_json(results: Sequence[SelfTest]) -> dict[str, Any]:
    """Every trial."""
    trials = [trial for result in results for trial in result.trials]
    return {
        "trials": len(trials),
        "detected": sum(1 for trial in trials if trial.detected_by),
        "detection_rate": detection_rate(results),
        "ranks": [msgspec.to_builtins(result) for result in results],
    }
