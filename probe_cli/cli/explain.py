"""`probe-manifest explain`."""

from __future__ import annotations

import click

from probe_cli.cli.lazy import PlainCommand
from probe_cli.cli.options import format_option, output_option
from probe_cli.manifest.read import read_any
from probe_cli.report.console import Console
from probe_cli.report.explanation import explain

__all__ = ["command"]

EXAMPLES = """
probe-manifest explain manifests/ model.layers.0.self_attn.q_proj.weight
probe-manifest explain manifests/ model.layers.0.self_attn.qkv_proj.weight --rank 1
probe-manifest explain manifests/ model.layers.3.mlp.experts --format json
"""


@click.command("explain", cls=PlainCommand, examples=EXAMPLES)
@click.argument("manifest")
@click.argument("name")
@click.option("--rank", type=click.IntRange(0), metavar="R", help="This rank of a bundle alone.")
@format_option("text", "json")
@output_option
@click.option("-v", "--verbose", is_flag=True, help="Every application, however many.")
@click.pass_obj
def command(
    console: Console, manifest: str, name: str, rank: int | None, output_format: str, output: str | None, verbose: bool
) -> int:
    """Explain NAME, a source, a tensor of the model, or a layer.

    Which ranks take the source, into which tensor, with which selectors, which region of it goes where, and which layer
    is published when it has arrived; or what feeds the tensor.
    """
    console.send_to(output)
    found = explain(read_any(manifest, rank), name)
    if output_format == "json":
        console.json(found.to_json())
    else:
        console.print("\n".join(found.lines(None if verbose else 40)))
    return 0
