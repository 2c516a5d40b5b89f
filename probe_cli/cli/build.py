"""`probe-manifest build`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click

from probe_cli.cli.config_file import ARGUMENTS_KEY, config_option
from probe_cli.cli.inputs import (
    ENGINE_ORDER,
    checkpoint_options,
    engine_from,
    engine_options,
    open_checkpoint,
    parse_arguments,
)
from probe_cli.cli.lazy import PlainCommand
from probe_cli.cli.options import TopologyCommand, format_option, parse_ranks, topology_of, topology_options
from probe_cli.errors import UsageError
from probe_cli.manifest.bundle import check_beside_bundle, check_replaceable
from probe_cli.report.console import Console

__all__ = ["command"]

EXAMPLES = """
probe-manifest build checkpoint/ --tp 2 --ep -o manifests/
probe-manifest build checkpoint/ --engine vllm --target h200 --tp 8 --ep -o manifests/
probe-manifest build checkpoint/ --engine python:my_package.models:create --arg layers=2 -o rank.json
probe-manifest build checkpoint/ --wire names.json --tp 4 --ranks 0-1 --format json
probe-manifest build checkpoint/ --config configs/deepseek-v3.toml --strict
"""


class _Build(TopologyCommand, PlainCommand):
    pass


@click.command("build", cls=_Build, examples=EXAMPLES)
@click.argument("checkpoint", required=False)
@engine_options
@topology_options
@click.option("--ranks", metavar="0-7,12", help="Build these ranks only.")
@checkpoint_options
@click.option("--engine-order", is_flag=True, help="The same as --order engine, which is the default.")
@config_option
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    help="The bundle's directory; or a .json or .json.gz file if there is one rank. Without it nothing is written.",
)
@click.option("--jobs", "-j", type=click.IntRange(1), metavar="N", help="Ranks at a time; by default one per CPU.")
@format_option("text", "json")
@click.option(
    "--strict", is_flag=True, help="Unused sources and unfed parameters are findings (exit 1, nothing written)."
)
@click.option(
    "--value-limit",
    type=click.IntRange(0),
    default=1 << 16,
    show_default=True,
    metavar="BYTES",
    help="Sources up to this size are read for real if the loading code asks for their values.",
)
@click.option(
    "--verify/--no-verify",
    default=False,
    help="Replay again, and once in reversed order: a contract that changes is an error.",
)
@click.pass_context
def command(
    context: click.Context,
    /,
    checkpoint: str | None,
    ranks: str | None,
    wire: str | None,
    order: str,
    engine_order: bool,
    revision: str | None,
    output: str | None,
    jobs: int | None,
    output_format: str,
    strict: bool,
    value_limit: int,
    verify: bool,
    tp: int | None,
    pp: int | None,
    ep: int | str | None,
    dp: int | None,
    enable_ep: bool,
    engine: str | None,
    arguments: tuple[str, ...],
    **allowed: Any,
) -> int:
    """Dry-run the load of CHECKPOINT for every rank of a topology, and write down what each rank needs.

    CHECKPOINT is a folder, a safetensors file, or a model on the Hub. Only its headers are read: no weights, no GPU.
    Each rank is built in a process of its own; the bundle is written in one step when all of them are done.
    """
    from probe_cli.probe.runner import build_bundle
    from probe_cli.report.overview import overview_json, overview_text
    from probe_cli.report.progress import build_progress

    console: Console = context.obj
    started = time.monotonic()
    topology = topology_of(tp, pp, ep, dp, enable_ep)
    chosen = parse_ranks(ranks, topology.world_size) if ranks is not None else tuple(range(topology.world_size))
    _check_output(output, len(chosen))
    if engine_order:
        order = ENGINE_ORDER
    source = open_checkpoint(console, checkpoint, wire=wire, order=order, revision=revision)
    made = engine_from(
        console,
        source,
        engine=engine,
        arguments=parse_arguments(arguments, context.meta.get(ARGUMENTS_KEY)),
        **allowed,
    )
    with build_progress(console, len(chosen)) as listener:
        built = build_bundle(
            made,
            source,
            topology,
            ranks=chosen,
            keep_order=order != ENGINE_ORDER,
            jobs=jobs,
            value_limit=value_limit,
            verify=verify,
            listener=listener,
        )
    bundle = built.bundle
    findings = sum(map(len, bundle.index.unused.values())) + len(bundle.index.unfed)
    failed = strict and findings > 0
    if output is not None and not failed:
        if _is_file(output):
            built.results[0].manifest.write(output)
        else:
            bundle.write(output)
    seconds = time.monotonic() - started
    if output_format == "json":
        document = overview_json(bundle)
        for entry, result in zip(document["ranks"], built.results):
            entry.update(peak_rss=result.peak_rss, seconds={k: round(v, 3) for k, v in result.seconds.items()})
        document.update(output=None if failed else output, seconds=round(seconds, 3))
        console.json(document)
    else:
        console.print("\n".join(overview_text(bundle, width=console.width())))
    _say_how_it_went(console, built.results, seconds, output, failed, findings)
    return 1 if failed else 0


def _say_how_it_went(
    console: Console, results: Any, seconds: float, output: str | None, failed: bool, findings: int
) -> None:
    from probe_cli.report.numbers import bytes_text, plural, seconds_text

    peak = max(result.peak_rss for result in results)
    console.note(
        f"built {plural(len(results), 'rank')} in {seconds_text(seconds)}, {bytes_text(peak)} per worker at most"
    )
    if failed:
        console.error(f"--strict: {plural(findings, 'finding')} (unused sources, unfed parameters); nothing written")
    elif output is None:
        console.note("nothing written; -o DIRECTORY keeps the bundle")
    else:
        console.note(f"wrote {output}")


def _is_file(output: str) -> bool:
    return output.endswith((".json", ".json.gz"))


def _check_output(output: str | None, ranks: int) -> None:
    """Before anything is built: can the result be written there?"""
    if output is None:
        return
    path = Path(output)
    if _is_file(output):
        if ranks != 1:
            raise UsageError(f"-o {output}: a file holds one rank, but {ranks} are built", hint="name a directory")
        if path.is_dir():
            raise UsageError(f"-o {output}: this is a directory, and a file is to be written")
        check_beside_bundle(path)
    elif path.exists() and not path.is_dir():
        raise UsageError(
            f"-o {output}: this is a file, expected a directory", hint="a file's name ends in .json or .json.gz"
        )
    else:
        check_replaceable(path)
    parent = path.absolute()
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        raise UsageError(f"-o {output}: {parent} cannot be written")
