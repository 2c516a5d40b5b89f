"""Counters over all updates of a session, in the text format that Prometheus reads, for whoever serves them."""

from __future__ import annotations

from probe_cli.reload.receipt import Receipt

__all__ = ["Counters"]

_HELP = {
    "updates_total": ("counter", "Updates, by outcome."),
    "applications_total": ("counter", "Applications that arrived as the contract requires."),
    "extras_total": ("counter", "Applications beyond the contract."),
    "declined_total": ("counter", "Loader calls that took nothing."),
    "missing_total": ("counter", "Applications that an update ended without."),
    "published_bytes_total": ("counter", "Bytes copied into live tensors."),
    "spills_total": ("counter", "Units staged in host memory for want of room."),
    "update_seconds_total": ("counter", "Seconds from the begin to the end of updates."),
    "audit_findings_total": ("counter", "Findings of the audit that were not put right."),
    "staging_peak_bytes": ("gauge", "Staging memory at the peak of the last update."),
    "update_number": ("gauge", "Number of the last update that finished."),
}


class Counters:
    """Sums of the receipts of one session."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.values: dict[str, float] = dict.fromkeys(_HELP, 0)
        self.outcomes: dict[str, int] = {"ok": 0, "failed": 0}

    def add(self, receipt: Receipt) -> None:
        """Count one update."""
        self.outcomes["ok" if receipt.ok else "failed"] += 1
        values = self.values
        values["applications_total"] += receipt.observed
        values["extras_total"] += receipt.extras
        values["declined_total"] += receipt.declined
        values["missing_total"] += sum(count for _, count in receipt.missing)
        values["published_bytes_total"] += receipt.bytes_published
        values["spills_total"] += receipt.spills
        values["update_seconds_total"] += receipt.seconds
        values["audit_findings_total"] += sum(not finding.harmless for finding in receipt.findings)
        values["staging_peak_bytes"] = receipt.staging_peak
        if receipt.ok:
            values["update_number"] = receipt.update

    def text(self, prefix: str = "probe_manifest_reload_") -> str:
        """Exposition text."""
        lines: list[str] = []
        for name, (kind, description) in _HELP.items():
            lines += [f"# HELP {prefix}{name} {description}", f"# TYPE {prefix}{name} {kind}"]
            if name == "updates_total":
                lines += [
                    f'{prefix}{name}{{rank="{self.rank}",outcome="{outcome}"}} {count}'
                    for outcome, count in self.outcomes.items()
                ]
            else:
                lines.append(f'{prefix}{name}{{rank="{self.rank}"}} {self.values[name]:g}')
        return "\n".join(lines) + "\n"
