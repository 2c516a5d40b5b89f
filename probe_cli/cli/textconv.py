"""`probe-manifest textconv`."""

from __future__ import annotations

import click

from probe_cli.cli.lazy import PlainCommand
from probe_cli.manifest.read import read_any
from probe_cli.report.console import Console
from probe_cli.report.diff_textconv import textconv

__all__ = ["command"]

EXAMPLES = """
echo '*.json.gz diff=probe-manifest' >> .gitattributes
git config diff.probe-manifest.textconv 'probe-manifest textconv'
git config diff.probe-manifest.cachetextconv true
"""


@click.command("textconv", cls=PlainCommand, examples=EXAMPLES)
@click.argument("file")
@click.pass_obj
def command(console: Console, file: str) -> None:
    """A manifest, or the index of a bundle, as text: one fact to a line.

    Made for git: with the settings below, `git diff` and `git log -p` show what changed in a packed manifest.
    """
    console.print(textconv(read_any(file)).rstrip("\n"))
