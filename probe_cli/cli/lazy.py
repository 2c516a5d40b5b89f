"""A command group that knows its commands by name and imports one only when it is run."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click

from probe_cli.cli.failures import ClosedPipe
from probe_cli.collecting import rare_collection

__all__ = ["COMMANDS", "LazyGroup", "PlainCommand"]

#: Command -> (module under `probe_cli.cli`, its line in `--help`), in the order of `--help`.
COMMANDS: dict[str, tuple[str, str]] = {
    "build": ("build", "Dry-run the load of a checkpoint; write the manifests of all ranks."),
    "show": ("show", "Show what a manifest or bundle says."),
    "explain": ("explain", "Which ranks take a source, where to; or what feeds a parameter."),
    "check": ("check", "Does a checkpoint, or a list of names, fulfil the contracts?"),
    "diff": ("diff", "What changed between two manifests, bundles or checkpoints?"),
    "selftest": ("selftest", "Prove that a manifest detects altered streams of weights."),
    "reload-check": ("reload_check", "Reload a model through its manifest; compare with a cold load."),
    "doctor": ("doctor", "Which engines, versions and targets can be used here?"),
    "vllm-status": ("vllm_status", "The last receipt of each worker of a serving process."),
    "schema": ("schema", "Print the JSON Schema of manifest files."),
    "textconv": ("textconv", "A manifest as text, for `git diff`."),
}


class PlainCommand(click.Command):
    """A command with examples below its help; see `examples` in the commands' files."""

    def __init__(self, *args: Any, examples: str = "", **kwargs: Any) -> None:
        if examples:
            kwargs["epilog"] = "\b\nExamples:\n" + "\n".join("  " + line for line in examples.strip().splitlines())
        super().__init__(*args, **kwargs)
        for option in self.params:
            # click derives a variable from the parameter's name in Python, which is not always the flag's.
            if isinstance(option, click.Option) and option.envvar is None:
                flags = [flag[2:] for flag in option.opts if flag.startswith("--")]
                option.envvar = [f"PROBE_MANIFEST_{self.name}_{flag}".replace("-", "_").upper() for flag in flags]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Examples as they are: click would indent and rewrap them."""
        if self.epilog:
            formatter.write_paragraph()
            formatter.write(self.epilog.removeprefix("\b\n") + "\n")


class LazyGroup(click.Group):
    """See the module docstring."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            # From the start: importing torch alone makes hundreds of thousands of objects.
            with rare_collection():
                return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ClosedPipe from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module = importlib.import_module(f"probe_cli.cli.{entry[0]}")
        command = module.command
        if not isinstance(command, click.Command):
            raise TypeError(f"{module.__name__}.command is no click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            meant = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command {name!r}{meant}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the table alone, so that `--help` imports no command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            formatter.write_paragraph()
            formatter.write(self.epilog.removeprefix("\b\n") + "\n")
