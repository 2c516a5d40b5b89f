"""`probe-manifest check`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from probe_cli._version import __version__
from probe_cli.checkpoint import Checkpoint
from probe_cli.cli.inputs import parse_arguments
from probe_cli.cli.lazy import PlainCommand
from probe_cli.cli.options import (
    ALL_RANKS,
    TopologyCommand,
    expert_parallel,
    format_option,
    output_option,
    topology_options,
)
from probe_cli.errors import EngineError, UsageError
from probe_cli.manifest import Bundle, Manifest
from probe_cli.manifest.check import CheckReport, check, is_manifest_path
from probe_cli.manifest.check_config import CheckConfig, find_config, load_config
from probe_cli.manifest.check_identity import Expectations
from probe_cli.manifest.check_sources import Draft
from probe_cli.manifest.findings import CODES
from probe_cli.report.console import Console
from probe_cli.report.headers import headers_progress

__all__ = ["command"]

EXAMPLES = """
probe-manifest check bundle/ checkpoint/              # does this checkpoint fulfil every rank's contract?
probe-manifest check bundle/ org/name --revision main # headers from the Hub
probe-manifest check bundle/ --wire names.json        # what a trainer will send
probe-manifest check bundle/ checkpoint/ --strict --format sarif --output check.sarif
probe-manifest check bundle/ checkpoint/ --tp 8 --ep --engine vllm --reprobe
probe-manifest check bundle/                          # the bundle by itself
"""


class _Command(TopologyCommand, PlainCommand):
    """Both: `--ep` without a number, and examples."""


@click.command("check", cls=_Command, examples=EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="MANIFEST... [CHECKPOINT]")
@click.option(
    "--wire", metavar="FILE", help="Names, dtypes and shapes that will be sent, in place of a checkpoint (- for stdin)."
)
@click.option("--revision", metavar="REV", help="The checkpoint's branch, tag or commit on the Hub.")
@click.option("--strict", is_flag=True, help="Warnings are errors.")
@click.option(
    "--select", multiple=True, metavar="CODE", help="Only these findings: codes, names or prefixes (PM1,moved-source)."
)
@click.option("--ignore", multiple=True, metavar="CODE", help="Not these findings (PM105,PM201).")
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Severities and exemptions; else [tool.probe-manifest] of the nearest pyproject.toml.",
)
@topology_options
@click.option(
    "--engine", metavar="NAME", help="The engine that the manifest must be for; with --reprobe, the one to build with."
)
@click.option("--engine-version", metavar="VERSION", help="The version of it that the manifest must be for.")
@click.option("--target", metavar="TARGET", help="The target that the manifest must be for.")
@click.option(
    "--arg",
    "--engine-arg",
    "arguments",
    multiple=True,
    metavar="KEY=VALUE",
    help="With --reprobe: an argument of the engine, in place of those that the manifest records.",
)
@click.option(
    "--allow-untested-version", is_flag=True, help="With --reprobe: try an engine version that was not tested."
)
@click.option("--reprobe", is_flag=True, help="Build again with the installed engine and compare the contracts.")
@format_option("text", "json", "sarif", "junit", "github", "markdown")
@output_option
@click.option("-q", "--quiet", is_flag=True, help="Errors only.")
@click.option("-v", "--verbose", is_flag=True, help="Every name, not patterns.")
@click.pass_obj
def command(
    console: Console,
    paths: tuple[str, ...],
    wire: str | None,
    revision: str | None,
    strict: bool,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    config_file: str | None,
    tp: int | None,
    pp: int | None,
    ep: int | str | None,
    dp: int | None,
    enable_ep: bool,
    engine: str | None,
    engine_version: str | None,
    target: str | None,
    reprobe: bool,
    arguments: tuple[str, ...],
    allow_untested_version: bool,
    output_format: str,
    output: str | None,
    quiet: bool,
    verbose: bool,
) -> int:
    """Check manifests by themselves, and whether a checkpoint fulfils their contracts.

    MANIFEST is a bundle or the manifest of one rank. CHECKPOINT is a safetensors file, a folder, or a Hub repository;
    the last argument is taken for it if it is no manifest. Ends with 0 if there is no error, 1 if there are errors,
    2 if something could not be read. docs/findings.md lists the findings.
    """
    gc.disable()  # short-lived and large: collecting takes a third of the time and frees nothing
    console.quiet = quiet
    console.send_to(output)
    manifests, checkpoint, name = _inputs(paths, wire, revision, headers_progress(console))
    if reprobe and checkpoint is None:
        raise UsageError("--reprobe needs the checkpoint: name it after the manifests")
    config = _config(config_file).with_flags(strict=strict, select=select, ignore=ignore)
    if tp is None and dp is None and (ep == ALL_RANKS or (ep is None and enable_ep)):
        raise UsageError("--ep without a number needs --tp or --dp to count the ranks")
    sizes = {"tp": tp, "pp": pp, "dp": dp, "ep": expert_parallel(tp, ep, dp, enable_ep)}
    expectations = Expectations(
        topology={group: size for group, size in sizes.items() if size is not None},
        engine=None if engine is None else engine.partition(":")[0],
        engine_version=engine_version,
        target=target,
    )
    comparison = None
    failures: list[EngineError] = []
    if reprobe:
        rebuild = _reprobe(console, engine, parse_arguments(arguments), target, allow_untested_version)
        comparison = _unless_it_fails(rebuild, failures)
    report = check(
        manifests, checkpoint, checkpoint_name=name, config=config, expectations=expectations, reprobe=comparison
    )
    if failures and not report.exit_code:
        raise failures[0]
    text = _render(report, output_format, console, quiet=quiet, verbose=verbose).rstrip("\n")
    if text:
        (console.print if output_format == "text" else console.document)(text)
    _say_unread(report, console)
    if failures:  # the findings say, as a rule, why
        raise failures[0]
    return report.exit_code


def _inputs(
    paths: tuple[str, ...], wire: str | None, revision: str | None, progress: Callable[[int, int], None]
) -> tuple[list[str], Callable[[], Checkpoint] | None, str | None]:
    manifests = list(paths)
    if wire is not None:
        if revision is not None:
            raise UsageError("--revision and --wire contradict each other: a list of names has no revision")
        if len(manifests) > 1 and Path(manifests[-1]).exists() and not is_manifest_path(manifests[-1]):
            raise UsageError(
                f"{manifests[-1]} is no manifest, and --wire says what to check against already",
                hint="give either a checkpoint or --wire",
            )
        return manifests, lambda: Checkpoint.from_wire(wire), "standard input" if wire == "-" else wire
    if len(manifests) > 1 and not is_manifest_path(manifests[-1]):
        path = manifests.pop()
        return manifests, lambda: Checkpoint.open(path, revision=revision, progress=progress), path
    if revision is not None:
        raise UsageError("--revision needs a checkpoint on the Hub: name it after the manifests")
    return manifests, None, None


def _config(path: str | None) -> CheckConfig:
    found = Path(path) if path is not None else find_config(Path.cwd())
    return CheckConfig() if found is None else load_config(found)


def _reprobe(
    console: Console, engine: str | None, arguments: dict[str, Any], target: str | None, allow_untested_version: bool
) -> Callable[[Bundle | Manifest, Checkpoint], Iterable[Draft]]:
    """A comparison of a manifest with what the installed engine makes of the checkpoint now."""

    def rebuild(origin: Bundle | Manifest, checkpoint: Checkpoint) -> Iterable[Draft]:
        from probe_cli.cli.inputs import engine_from
        from probe_cli.manifest.check_reprobe import compare_rebuilt, engine_spec
        from probe_cli.probe.runner import build_bundle

        gc.enable()
        document = origin.index if isinstance(origin, Bundle) else origin.document
        recorded = engine_spec(document.engine)
        if engine is None and document.engine.name == "python":
            raise UsageError(
                f"--reprobe: the manifest was built by code of its author's own, {recorded.engine.partition(':')[2]}, which is "
                "not run on the word of a file",
                hint=f"if it is yours: --engine {recorded.engine}",
            )
        same = engine is None or engine.partition(":")[0] == document.engine.name
        made = engine_from(
            console,
            checkpoint,
            engine=engine or recorded.engine,
            arguments=arguments or (recorded.arguments if same else {}),
            target=target or document.engine.target,
            role=recorded.role,
            allow_untested_version=allow_untested_version,
            trust_remote_code=False,
        )
        ranks = origin.ranks if isinstance(origin, Bundle) else (origin.rank.index,)
        console.note(
            f"building {len(ranks)} rank{'s' * (len(ranks) != 1)} again with {made.identity.name} {made.identity.version}"
        )
        return compare_rebuilt(origin, build_bundle(made, checkpoint, document.topology, ranks=ranks).bundle)

    return rebuild


def _unless_it_fails(
    rebuild: Callable[[Bundle | Manifest, Checkpoint], Iterable[Draft]], failures: list[EngineError]
) -> Callable[[Bundle | Manifest, Checkpoint], Iterable[Draft]]:
    """The same comparison, which puts a failure of the engine into the list: what else was found is told first."""

    def compare(origin: Bundle | Manifest, checkpoint: Checkpoint) -> Iterable[Draft]:
        try:
            return rebuild(origin, checkpoint)
        except EngineError as error:
            failures.append(error)
            return ()

    return compare


def _say_unread(report: CheckReport, console: Console) -> None:
    """Where a configuration hides what could not be read, the exit code alone would be a riddle."""
    shown = sum(CODES[finding.code].trouble for finding in report.all_findings())
    if report.unread > shown:
        console.note(f"{report.unread - shown} input(s) could not be read, and the findings that say so are turned off")


def _render(report: CheckReport, output_format: str, console: Console, *, quiet: bool, verbose: bool) -> str:
    if output_format == "json":
        from probe_cli.report.findings_json import findings_json

        return findings_json(report)
    if output_format == "sarif":
        from probe_cli.report.findings_sarif import findings_sarif

        return findings_sarif(report, __version__)
    if output_format == "junit":
        from probe_cli.report.findings_junit import findings_junit

        return findings_junit(report)
    if output_format == "github":
        from probe_cli.report.findings_github import findings_github

        return findings_github(report)
    if output_format == "markdown":
        from probe_cli.report.findings_markdown import findings_markdown

        return findings_markdown(report)
    from probe_cli.report.findings_text import findings_text

    return findings_text(report, verbose=verbose, quiet=quiet, color=console.colour())
