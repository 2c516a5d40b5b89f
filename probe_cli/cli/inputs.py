"""From options to the things they name: a checkpoint, an engine. Shared by the commands that build."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from probe_cli.checkpoint import Checkpoint
from probe_cli.errors import UsageError
from probe_cli.report.console import Console
from probe_cli.report.headers import headers_progress

if TYPE_CHECKING:
    from probe_cli.engines.base import Engine

__all__ = ["ENGINE_ORDER", "checkpoint_options", "engine_from", "engine_options", "open_checkpoint", "parse_arguments"]

F = TypeVar("F", bound=Callable[..., Any])

#: `--order engine`: as the engine itself reads the files.
ENGINE_ORDER = "engine"


def checkpoint_options(function: F) -> F:
    """--wire, --order and --revision."""
    for option in (
        click.option("--revision", metavar="REV", help="Branch, tag or commit of a checkpoint on the Hub."),
        click.option(
            "--order",
            type=click.Choice([ENGINE_ORDER, "file", "name", "layer"]),
            default=ENGINE_ORDER,
            show_default=True,
            help="Order in which the sources are loaded.",
        ),
        click.option(
            "--wire",
            metavar="FILE",
            help="Names, dtypes and shapes that a trainer will send, in order (- for stdin); CHECKPOINT then gives "
            "config.json only.",
        ),
    ):
        function = option(function)
    return function


def engine_options(function: F) -> F:
    """--engine, --arg, --target, --role and what an engine may be allowed."""
    for option in (
        click.option(
            "--trust-remote-code",
            is_flag=True,
            help="Let the engine run code that comes with the checkpoint. Off: nothing remote ever runs.",
        ),
        click.option(
            "--allow-untested-version",
            is_flag=True,
            help="Try an engine version that this release was not tested with.",
        ),
        click.option(
            "--role",
            default="main",
            show_default=True,
            help="Which model of the checkpoint: main, or draft (MTP, EAGLE).",
        ),
        click.option(
            "--target", default="auto", show_default=True, help="The device to load for, e.g. h200, sm90, cpu."
        ),
        click.option(
            "--arg",
            "--engine-arg",
            "arguments",
            multiple=True,
            metavar="KEY=VALUE",
            help="An argument of the engine; JSON values are read as such. May be repeated.",
        ),
        click.option(
            "--engine",
            metavar="NAME[:REF]",
            help="embedded, vllm, or python:package.module:factory (runs that code). "
            "By default embedded, where it knows the model.",
        ),
    ):
        function = option(function)
    return function


def open_checkpoint(
    console: Console, path: str | None, *, wire: str | None, order: str, revision: str | None
) -> Checkpoint:
    """The checkpoint that the options name, in the order they ask for."""
    if wire is not None:
        checkpoint = Checkpoint.from_wire(wire, config=_config(console, path, revision))
    elif path is None:
        raise UsageError(
            "no checkpoint: name a folder, a file or a model on the Hub", hint="or a list of names: --wire"
        )
    else:
        checkpoint = Checkpoint.open(path, revision=revision, progress=headers_progress(console))
    return checkpoint if order in (ENGINE_ORDER, "file") else checkpoint.reordered(order)


def _config(console: Console, path: str | None, revision: str | None) -> Mapping[str, Any] | Path | None:
    if path is None:
        return None
    where = Path(path)
    if where.is_dir():
        return where / "config.json"
    if where.suffix == ".json":
        return where
    return Checkpoint.open(path, revision=revision, progress=headers_progress(console)).config


def parse_arguments(pairs: Sequence[str], defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`key=value` pairs; values are JSON where they are JSON, text otherwise. Later ones win, and over `defaults`."""
    found = dict(defaults or {})
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip().lstrip("-").replace("-", "_")
        if not equals or not key:
            raise UsageError(f"--arg {pair}: expected KEY=VALUE", hint="e.g. --arg quantization=fp8")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def engine_from(
    console: Console,
    checkpoint: Checkpoint,
    *,
    engine: str | None,
    arguments: Mapping[str, Any],
    target: str,
    role: str,
    allow_untested_version: bool,
    trust_remote_code: bool,
) -> Engine:
    """The engine that the options name, or the one for this checkpoint."""
    from probe_cli.engines.base import EngineOptions
    from probe_cli.engines.registry import create_engine, default_engine_name
    from probe_cli.probe.capture import captured_output

    if engine is None:
        engine = default_engine_name(checkpoint)
        console.note(f"engine: {engine} (choose another with --engine)")
    if engine.startswith("python:"):
        console.note(f"running your own code: {engine.partition(':')[2]}")
    options = EngineOptions(
        target=target,
        role=role,
        arguments=arguments,
        allow_untested_version=allow_untested_version,
        trust_remote_code=trust_remote_code,
    )
    with captured_output(f"engine {engine}"):
        return create_engine(engine, options)
