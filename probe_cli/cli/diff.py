"""`probe-manifest diff`."""

from __future__ import annotations

import gc

import click

from probe_cli.checkpoint import Checkpoint
from probe_cli.cli.lazy import PlainCommand
from probe_cli.cli.options import format_option, output_option
from probe_cli.errors import UsageError
from probe_cli.manifest import Bundle, Manifest
from probe_cli.manifest.check import is_manifest_path
from probe_cli.manifest.diff import DiffReport, diff
from probe_cli.manifest.diff_rules import SECTIONS
from probe_cli.manifest.read import read_any
from probe_cli.report.console import Console
from probe_cli.report.headers import headers_progress

__all__ = ["command"]

EXAMPLES = """
probe-manifest diff old/ new/                         # two bundles, all ranks
probe-manifest diff old/ new/ --rank 3 --only regions
probe-manifest diff old/ new/ --breaking              # ends with 1 only if a serving process would break
probe-manifest diff org/name@v1 org/name@v2           # two checkpoints, by their headers
probe-manifest diff old/ new/ --format markdown --output comment.md
"""


@click.command("diff", cls=PlainCommand, examples=EXAMPLES)
@click.argument("old")
@click.argument("new")
@click.option("--rank", type=click.IntRange(0), metavar="R", help="Only this rank.")
@click.option("--all-ranks", is_flag=True, help="All ranks; the default for bundles.")
@click.option("--only", multiple=True, type=click.Choice(SECTIONS), help="Only these changes; may be repeated.")
@click.option("--breaking", is_flag=True, help="Only breaking changes; ends with 1 if there are any.")
@click.option("--exit-code", is_flag=True, help="End with 1 if there is any change, as git diff does.")
@format_option("text", "json", "markdown")
@output_option
@click.option("-v", "--verbose", is_flag=True, help="Every change, not patterns.")
@click.pass_obj
def command(
    console: Console,
    old: str,
    new: str,
    rank: int | None,
    all_ranks: bool,
    only: tuple[str, ...],
    breaking: bool,
    exit_code: bool,
    output_format: str,
    output: str | None,
    verbose: bool,
) -> int:
    """What changed between two bundles, two manifests or two checkpoints.

    Every change is breaking (a serving process with the old manifest would fail or load wrongly), compatible (an old
    sender still fulfils it) or cosmetic. Ends with 0 unless --breaking or --exit-code is given; docs/diff.md lists the
    kinds of change and the reasons.
    """
    gc.disable()  # short-lived and large: collecting takes a third of the time and frees nothing
    console.send_to(output)
    if rank is not None and all_ranks:
        raise UsageError("--rank and --all-ranks contradict each other")
    report = diff(_open(console, old), _open(console, new), rank=rank, names=(old, new))
    if only:
        report = report.only(section for section in SECTIONS if section in only)
    broken = report.counts()["breaking"] > 0
    changed = bool(report.changes)
    if breaking:
        report = report.of_class("breaking")
    text = _render(report, output_format, console, verbose=verbose).rstrip("\n")
    (console.print if output_format == "text" else console.document)(text)
    return int((breaking and broken) or (exit_code and not breaking and changed))


def _open(console: Console, path: str) -> Bundle | Manifest | Checkpoint:
    return read_any(path) if is_manifest_path(path) else Checkpoint.open(path, progress=headers_progress(console))


def _render(report: DiffReport, output_format: str, console: Console, *, verbose: bool) -> str:
    if output_format == "json":
        from probe_cli.report.diff_json import diff_json

        return diff_json(report)
    if output_format == "markdown":
        from probe_cli.report.diff_markdown import diff_markdown

        return diff_markdown(report)
    from probe_cli.report.diff_text import diff_text

    return diff_text(report, verbose=verbose, color=console.colour())
