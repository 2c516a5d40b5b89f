"""The entry point: the lazy command group, and the one place where an exception becomes a line and an exit code."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import click

from probe_cli._version import __version__
from probe_cli.cli.failures import ClosedPipe, Terminated, describe_failure, exit_code
from probe_cli.cli.lazy import LazyGroup
from probe_cli.errors import UsageError
from probe_cli.report.console import Console

__all__ = ["cli", "main", "run"]

EXIT_CODES = """\b
Exit codes:
  0  clean
  1  findings: a check failed, an update was incomplete
  2  usage or bad input
  3  the engine failed"""


@click.group(
    cls=LazyGroup,
    context_settings={
        "auto_envvar_prefix": "PROBE_MANIFEST",
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
    epilog=EXIT_CODES,
)
@click.option("--debug", is_flag=True, help="Show tracebacks, and what an engine logged before it failed.")
@click.version_option(__version__, prog_name="probe-manifest", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Which tensors of a checkpoint, and which slices of them, does each serving rank load, and where to?

    A dry run of the model's own loading code on safetensors headers gives the answer: a manifest per rank. No GPU,
    no weights.

    Every flag can be given as an environment variable too: PROBE_MANIFEST_BUILD_TP=8 is `build --tp 8`.
    """
    console = context.obj if isinstance(context.obj, Console) else Console()
    console.debug = console.debug or debug
    context.obj = console


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors are lines on stderr by then."""
    console = Console()
    console.prepare_streams()
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        if "" in given:  # as a path it would be the current folder
            raise UsageError(
                f"argument {given.index('') + 1} is empty", hint="a shell variable in quotes that has no value gives that"
            )
        result = cli.main(
            args=given,
            prog_name="probe-manifest",
            standalone_mode=False,
            obj=console,
        )
        console.flush()
        return result if isinstance(result, int) else 0
    except BaseException as error:
        try:
            describe_failure(error, console)
            console.flush()
        except BrokenPipeError as closed:
            error = closed
        if isinstance(error, (ClosedPipe, BrokenPipeError)):
            console.abandon_streams()
        return exit_code(error)


def run() -> NoReturn:
    """The `probe-manifest` command."""
    signal.signal(signal.SIGTERM, _terminate)
    leave(main())


def leave(code: int) -> NoReturn:
    """End the process without taking apart, object by object, what a command has built: half a second after a large diff. What asked to
    be run at exit is run; a thread that is still at work is waited for."""
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.current_thread()):
        sys.exit(code)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # closed or full: the interpreter knows what to say
        sys.exit(code)
    atexit._run_exitfuncs()
    os._exit(code)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated(number)
