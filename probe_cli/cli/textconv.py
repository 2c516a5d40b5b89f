"""`probe-manifest textconv`."""

from __future__ import annotations

from pathlib import Path

import click

from probe_cli.cli.lazy import PlainCommand
from probe_cli.errors import ManifestError
from probe_cli.manifest.files import read_text
from probe_cli.manifest.read import read_any
from probe_cli.report.console import Console
from probe_cli.report.diff_textconv import textconv, textconv_other

__all__ = ["command"]

EXAMPLES = """
echo 'manifests/** diff=probe-manifest' >> .gitattributes
git config diff.probe-manifest.textconv 'probe-manifest textconv'
git config diff.probe-manifest.cachetextconv true
"""


@click.command("textconv", cls=PlainCommand, examples=EXAMPLES)
@click.argument("file")
@click.pass_obj
def command(console: Console, file: str) -> None:
    """A manifest, or the index of a bundle, as text: one fact to a line.

    Made for git: with the settings below, `git diff` and `git log -p` show what changed in a manifest, packed or not.
    A file that is no manifest, or a damaged one, is shown as it is, with the reason: git would end at a failure, and show
    nothing of all the other files.
    """
    try:
        text = textconv(read_any(file))
    except ManifestError as error:
        path = Path(file)
        if not path.is_file():
            raise
        try:
            content = read_text(path)
        except ManifestError:
            content = path.read_bytes()
        text = textconv_other(str(error).removeprefix(f"{file}: "), content)
    console.print(text.rstrip("\n"))
