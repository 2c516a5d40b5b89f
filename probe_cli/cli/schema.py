"""`probe-manifest schema`."""

from __future__ import annotations

from importlib.resources import files

import click

from probe_cli.cli.lazy import PlainCommand
from probe_cli.cli.options import output_option
from probe_cli.report.console import Console

__all__ = ["command"]

EXAMPLES = """
probe-manifest schema > manifest.schema.json
probe-manifest schema --output manifest.schema.json
"""


@click.command("schema", cls=PlainCommand, examples=EXAMPLES)
@output_option
@click.pass_obj
def command(console: Console, output: str | None) -> None:
    """Print the JSON Schema of manifest and bundle files.

    The schema is of this release's major version; the format itself is described in docs/manifest.md.
    """
    console.send_to(output)
    text = files("probe_cli.manifest").joinpath("schema.json").read_text(encoding="utf-8")
    console.print(text.rstrip("\n"))
