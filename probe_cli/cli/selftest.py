"""`probe-manifest selftest`."""

from __future__ import annotations

from typing import Any

import click

from probe_cli.cli.inputs import checkpoint_options, engine_from, engine_options, open_checkpoint, parse_arguments
from probe_cli.cli.lazy import PlainCommand
from probe_cli.cli.options import format_option, output_option
from probe_cli.manifest import Bundle, Manifest
from probe_cli.manifest.check_reprobe import engine_spec
from probe_cli.manifest.read import read_any
from probe_cli.report.console import Console
from probe_cli.report.selftest import detection_rate, selftest_json, selftest_lines

__all__ = ["command"]

EXAMPLES = """
probe-manifest selftest manifests/ --checkpoint checkpoint/
probe-manifest selftest manifests/ --checkpoint checkpoint/ --engine vllm --rank 3 --samples 50
"""


@click.command("selftest", cls=PlainCommand, examples=EXAMPLES)
@click.argument("manifest")
@click.option("--checkpoint", metavar="CHECKPOINT", help="What the manifest was built from.")
@engine_options
@checkpoint_options
@click.option("--rank", type=click.IntRange(0), metavar="R", help="This rank of a bundle alone.")
@click.option(
    "--samples", type=click.IntRange(1), default=20, show_default=True, metavar="N", help="Applications per rank."
)
@click.option("--jobs", "-j", type=click.IntRange(1), metavar="N", help="Ranks at a time; by default one per CPU.")
@format_option("text", "json")
@output_option
@click.pass_obj
def command(
    console: Console,
    /,
    manifest: str,
    checkpoint: str | None,
    wire: str | None,
    order: str,
    revision: str | None,
    rank: int | None,
    samples: int,
    jobs: int | None,
    output_format: str,
    output: str | None,
    engine: str | None,
    arguments: tuple[str, ...],
    target: str,
    role: str,
    **allowed: Any,
) -> int:
    """Prove that the manifest detects altered streams of weights.

    Sampled applications are dropped, doubled, stood in for by a neighbour, renamed, reshaped and swapped, one at a
    time; each altered stream is replayed through the engine's own load_weights. Ends with 1 unless every alteration is
    detected.
    """
    from probe_cli.probe.runner import selftest_ranks

    console.send_to(output)
    origin = read_any(manifest, rank)
    manifests: list[Manifest] = list(origin.manifests()) if isinstance(origin, Bundle) else [origin]
    identity = manifests[0].engine
    recorded = engine_spec(identity)
    source = open_checkpoint(console, checkpoint, wire=wire, order=order, revision=revision)
    made = engine_from(
        console,
        source,
        engine=engine or (None if identity.name in ("python", "live") else identity.name),
        # Of your own code the manifest records what was called, beside the arguments of the call.
        arguments=parse_arguments(arguments, {} if identity.name == "python" else recorded.arguments),
        target=identity.target if target == "auto" else target,
        role=recorded.role if role == "main" else role,
        **allowed,
    )
    results = selftest_ranks(made, source, manifests, samples=samples, jobs=jobs)
    if output_format == "json":
        console.json(selftest_json(results))
    else:
        console.print("\n".join(selftest_lines(results, console.width())))
    return 0 if detection_rate(results) == 1.0 else 1
