"""`--config FILE`: the flags of a build from a TOML file. Flags and environment variables win over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

__all__ = ["ARGUMENTS_KEY", "config_option"]

#: Where a context keeps the file's engine arguments, which `--arg` adds to.
ARGUMENTS_KEY = "probe_cli.arguments"


def config_option(function: Any) -> Any:
    """--config for a command."""
    return click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_load,
        help="A TOML file with these options; flags win over it.",
    )(function)


def _load(context: click.Context, parameter: click.Parameter, value: Path | None) -> None:
    if value is None:
        return
    from probe_cli.config import read_config

    settings = msgspec.structs.asdict(read_config(value))
    topology = msgspec.structs.asdict(settings.pop("topology"))
    context.meta[ARGUMENTS_KEY] = settings.pop("arguments")
    given = {name: entry for name, entry in {**settings, **topology}.items() if entry is not None}
    context.default_map = {**(context.default_map or {}), **given}
