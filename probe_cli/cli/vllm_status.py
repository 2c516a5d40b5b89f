"""`probe-manifest vllm-status`."""

from __future__ import annotations

from pathlib import Path

import click

from probe_cli.cli.lazy import PlainCommand
from probe_cli.cli.options import format_option, output_option
from probe_cli.errors import UsageError
from probe_cli.report.console import Console
from probe_cli.report.worker_status import fetch_status, is_healthy, read_receipts, status_lines

__all__ = ["command"]

EXAMPLES = """
probe-manifest vllm-status
probe-manifest vllm-status http://serving-3:8000 --format json
probe-manifest vllm-status --receipts /var/log/receipts
"""

_DEFAULT = "http://localhost:8000"


@click.command("vllm-status", cls=PlainCommand, examples=EXAMPLES)
@click.argument("url", required=False)
@click.option("--receipts", metavar="DIR", type=click.Path(path_type=Path), help="Read receipts there; ask no server.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the server.",
)
@format_option("text", "json")
@output_option
@click.option("-v", "--verbose", is_flag=True, help="Every missing key, not the first 20.")
@click.pass_obj
def command(
    console: Console,
    url: str | None,
    receipts: Path | None,
    timeout: float,
    output_format: str,
    output: str | None,
    verbose: bool,
) -> int:
    """Ask each worker of a vLLM server about its weights: tracked or not, the state, the last receipt.

    URL is the server's, http://localhost:8000 if it is left out; it must run with VLLM_SERVER_DEV_MODE=1. Ends with 1
    if a worker is not tracked, is undefined, was given weights outside an update, or its last update failed.
    """
    if url is not None and receipts is not None:
        raise UsageError("give a URL or --receipts, not both")
    console.send_to(output)
    entries = read_receipts(receipts) if receipts is not None else fetch_status(url or _DEFAULT, timeout)
    if output_format == "json":
        console.json({"version": "1.0", "healthy": all(map(is_healthy, entries)), "workers": entries})
    else:
        for line in status_lines(entries, verbose=verbose):
            console.print(line)
    return 0 if all(map(is_healthy, entries)) else 1
