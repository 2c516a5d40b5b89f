"""Options that several commands share, each defined once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from probe_cli.errors import UsageError
from probe_cli.topology import Topology

__all__ = [
    "ALL_RANKS",
    "ExpertParallel",
    "TopologyCommand",
    "expert_parallel",
    "format_option",
    "output_option",
    "parse_ranks",
    "topology_of",
    "topology_options",
]

F = TypeVar("F", bound=Callable[..., Any])

#: `--ep` without a number: as many as there are tensor and data parallel ranks in a stage.
ALL_RANKS = "all"


class ExpertParallel(click.ParamType):  # type: ignore[type-arg]
    """A size, or "all"."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """An int, or ALL_RANKS; a configuration file may say true or false."""
        if value is True or str(value).lower() in (ALL_RANKS, "true"):
            return ALL_RANKS
        if value is False or str(value).lower() == "false":
            return 1
        try:
            size = int(value)
        except (TypeError, ValueError):
            self.fail(f"{value!r} is neither a number nor {ALL_RANKS!r}", param, ctx)
        if size < 1:
            self.fail(f"{size} is not in the range x>=1.", param, ctx)
        return size


def topology_options(function: F) -> F:
    """--tp, --pp, --ep and --dp with the engines' own spellings, vLLM's and SGLang's."""
    for option in (
        click.option(
            "--dp",
            "-dp",
            "--data-parallel-size",
            "--dp-size",
            "dp",
            type=click.IntRange(1),
            metavar="N",
            help="Data parallel size.",
        ),
        click.option(
            "--enable-expert-parallel",
            "enable_ep",
            is_flag=True,
            help="Experts over all tensor and data parallel ranks; the same as --ep without a number.",
        ),
        click.option(
            "--ep",
            "-ep",
            "--expert-parallel-size",
            "--ep-size",
            "ep",
            type=ExpertParallel(),
            metavar="[N]",
            help="Expert parallel size; without a number, all tensor and data parallel ranks.",
        ),
        click.option(
            "--pp",
            "-pp",
            "--pipeline-parallel-size",
            "--pp-size",
            "pp",
            type=click.IntRange(1),
            metavar="N",
            help="Pipeline parallel size.",
        ),
        click.option(
            "--tp",
            "-tp",
            "--tensor-parallel-size",
            "--tp-size",
            "tp",
            type=click.IntRange(1),
            metavar="N",
            help="Tensor parallel size.",
        ),
    ):
        function = option(function)
    return function


def topology_of(
    tp: int | None, pp: int | None, ep: int | str | None, dp: int | None, enable_ep: bool = False
) -> Topology:
    """The topology that the options name. Raises UsageError if the sizes do not fit together."""
    sizes = {"tp": tp or 1, "pp": pp or 1, "dp": dp or 1}
    return Topology(ep=expert_parallel(tp, ep, dp, enable_ep) or 1, **sizes)


def expert_parallel(tp: int | None, ep: int | str | None, dp: int | None, enable_ep: bool) -> int | None:
    """The size of expert parallel groups that the options name, None if they name none. Raises UsageError if they
    contradict each other."""
    if enable_ep and ep == 1:
        raise UsageError("--enable-expert-parallel and --ep 1 contradict each other")
    if ep == ALL_RANKS or (ep is None and enable_ep):
        return (tp or 1) * (dp or 1)
    return None if ep is None else int(ep)


class TopologyCommand(click.Command):
    """Lets `--ep` stand without its number: a following word that is no number is not taken for it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        fixed: list[str] = []
        for position, argument in enumerate(args):
            if argument == "--":
                fixed += args[position:]
                break
            following = args[position + 1] if position + 1 < len(args) else ""
            if argument in ("--ep", "-ep", "--expert-parallel-size", "--ep-size") and not (
                _is_number(following) or following == ALL_RANKS
            ):
                argument = f"--ep={ALL_RANKS}"
            fixed.append(argument)
        return super().parse_args(ctx, fixed)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()  # "²" is a digit, and no number


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """`0-7,12` as ranks, ascending, each once. Raises UsageError if malformed, or if a rank is not there."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not _is_number(first) or (dash and not _is_number(last)):
            raise UsageError(
                f"--ranks {text}: {part.strip()!r} is neither a rank nor a range", hint="e.g. --ranks 0-7,12"
            )
        low, high = int(first), int(last or first)
        if low > high:
            raise UsageError(f"--ranks {text}: {part.strip()} runs backwards")
        if high >= world_size:
            raise UsageError(f"--ranks {text}: there is no rank {high} among {world_size} ranks")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def format_option(*formats: str, default: str = "text") -> Callable[[F], F]:
    """--format with these choices."""
    return click.option(
        "--format",
        "output_format",
        type=click.Choice(formats),
        default=default,
        show_default=True,
        help="How the result is written.",
    )


def output_option(function: F) -> F:
    """--output FILE for the result, stdout by default."""
    return click.option(
        "--output",
        "output",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        callback=_named,
        help="Write the result to a file.",
    )(function)


def _named(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A variable of a script that is not set would else be the working directory."""
    if value == "":
        raise click.BadParameter("no name of a file")
    return value
