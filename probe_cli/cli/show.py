"""`probe-manifest show`."""

from __future__ import annotations

import click

from probe_cli.cli.lazy import PlainCommand
from probe_cli.cli.options import format_option, output_option
from probe_cli.errors import UsageError
from probe_cli.manifest import Bundle, Manifest
from probe_cli.manifest.read import read_any
from probe_cli.report.console import Console
from probe_cli.report.details import coverage_lines, details_json, layer_lines
from probe_cli.report.overview import overview_json, overview_text
from probe_cli.report.selection import Selection

__all__ = ["command"]

EXAMPLES = """
probe-manifest show manifests/
probe-manifest show manifests/ --rank 3 --layer '*.layers.0.*'
probe-manifest show manifests/ --source '*.experts.17.*'
probe-manifest show manifests/ --gaps
probe-manifest show manifests/ --format json | jq '.ranks[] | {rank, bytes_read}'
"""


@click.command("show", cls=PlainCommand, examples=EXAMPLES)
@click.argument("manifest")
@click.option("--rank", type=click.IntRange(0), metavar="R", help="This rank of a bundle.")
@click.option("--layer", metavar="GLOB", help="Layers whose name matches, with what is loaded into them.")
@click.option("--source", metavar="GLOB", help="What becomes of sources whose name matches.")
@click.option("--gaps", is_flag=True, help="Tensors with elements that nothing writes.")
@click.option("--overlaps", is_flag=True, help="Tensors with elements that are written more than once.")
@format_option("text", "json")
@output_option
@click.option("-v", "--verbose", is_flag=True, help="Every pattern of names, not the first 20.")
@click.pass_obj
def command(
    console: Console,
    manifest: str,
    rank: int | None,
    layer: str | None,
    source: str | None,
    gaps: bool,
    overlaps: bool,
    output_format: str,
    output: str | None,
    verbose: bool,
) -> int:
    """Show a bundle or the MANIFEST of one rank: an overview, or the layers, sources and tensors asked for.

    GLOB is a shell pattern over whole names; * crosses dots.
    """
    console.send_to(output)
    origin = read_any(manifest, rank)
    selection = Selection(layer=layer, source=source, gaps=gaps, overlaps=overlaps)
    if output_format == "json":
        document = overview_json(origin)
        if not selection.empty:
            for entry, one in zip(document["ranks"], _manifests(origin)):
                entry["details"] = details_json(selection.pick(one))
        console.json(document)
    elif selection.empty:
        console.print("\n".join(overview_text(origin, width=console.width(), limit=None if verbose else 20)))
    else:
        _show_selected(console, origin, selection)
    return 0


def _show_selected(console: Console, origin: Bundle | Manifest, selection: Selection) -> None:
    by_coverage = selection.layer is None and selection.source is None
    sections: list[tuple[str, list[str]]] = []
    for one in _manifests(origin):
        picked = list(selection.pick(one))
        sections.append((str(one.rank), coverage_lines(picked) if by_coverage else layer_lines(one, picked)))
    if not by_coverage and not any(lines for _, lines in sections):
        asked = " and ".join(
            f"{what} {glob!r}" for what, glob in (("layer", selection.layer), ("source", selection.source)) if glob
        )
        raise UsageError(f"nothing matches {asked}", hint="patterns are of whole names, e.g. '*.layers.0.*'")
    for title, lines in sections:
        console.print(console.style(title, "bold") + ("" if lines else ": nothing"))
        if lines:
            console.print("\n".join(f"  {line}" for line in lines))


def _manifests(origin: Bundle | Manifest) -> list[Manifest]:
    return list(origin.manifests()) if isinstance(origin, Bundle) else [origin]
