"""`--config FILE`: a TOML file with the flags of a build, by their long names, and a table of engine arguments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from probe_cli.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["ARGUMENTS_KEY", "config_option"]

ARGUMENTS_KEY = "arguments"
_MAX_BYTES = 1 << 20


def config_option(function: Any) -> Any:
    """--config for a command; flags and environment variables win over the file."""
    return click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_load,
        help="A TOML file with these options (configs/ has examples).",
    )(function)


def _load(context: click.Context, parameter: click.Parameter, value: Path | None) -> None:
    if value is None:
        return
    names = _option_names(context.command)
    defaults: dict[str, Any] = dict(context.default_map or {})
    for key, entry in _read(value).items():
        if key == ARGUMENTS_KEY:
            if not isinstance(entry, dict):
                raise InputError(f"{value}: {ARGUMENTS_KEY} is {entry!r}, expected a table of key = value")
            context.meta[ARGUMENTS_KEY] = entry
            continue
        name = names.get(key.replace("_", "-"))
        if name is None:
            raise InputError(
                f"{value}: {key!r} is no option of {context.info_name}",
                hint=f"known are {', '.join(sorted(set(names)))} and the table [{ARGUMENTS_KEY}]",
            )
        if isinstance(entry, (dict, list)):
            raise InputError(f"{value}: {key} is a {type(entry).__name__}, expected a single value")
        defaults[name] = entry
    context.default_map = defaults


def _option_names(command: click.Command) -> dict[str, str]:
    names: dict[str, str] = {}
    for parameter in command.params:
        if parameter.name is None or parameter.name in ("config", "help", "arguments"):
            continue
        for spelling in (*parameter.opts, parameter.name):
            names[spelling.lstrip("-").lower().replace("_", "-")] = parameter.name
    return names


def _read(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MAX_BYTES:
        raise InputError(f"{path}: larger than {_MAX_BYTES:,} bytes, expected a small TOML file")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid TOML: {error}") from None
