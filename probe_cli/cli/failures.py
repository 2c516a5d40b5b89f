"""From an exception to a line on stderr, a hint, and an exit code."""

from __future__ import annotations

import traceback

import click

from probe_cli.errors import ProbeManifestError, described
from probe_cli.report.console import Console

__all__ = ["ClosedPipe", "Terminated", "describe_failure", "exit_code"]

#: What a shell reports for a process that this signal ended: 128 + SIGINT, 128 + SIGPIPE.
_INTERRUPTED, _CLOSED_PIPE = 130, 141


class ClosedPipe(BaseException):
    """Whoever read our output has gone. No OSError, since click ends those with exit code 1, which means findings."""


class Terminated(BaseException):
    """SIGTERM arrived. Not an Exception, so that nothing on the way takes it for a failure of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def exit_code(error: BaseException) -> int:
    """The exit code of a command that ended with `error`."""
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, ProbeManifestError):
        return error.exit_code
    if isinstance(error, click.ClickException):
        return error.exit_code if error.exit_code > 1 else 2
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return _INTERRUPTED
    if isinstance(error, Terminated):
        return 128 + error.number
    if isinstance(error, (ClosedPipe, BrokenPipeError)):
        return _CLOSED_PIPE
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 3
    return 2 if isinstance(error, (OSError, UnicodeError)) else 3


def describe_failure(error: BaseException, console: Console) -> None:
    """Say on stderr what went wrong: one line, and what to do about it. Quiet where there is nobody to tell."""
    if isinstance(error, (click.exceptions.Exit, ClosedPipe, BrokenPipeError, SystemExit)):
        return
    if console.debug and not isinstance(error, (click.ClickException, click.Abort, KeyboardInterrupt, Terminated)):
        console.talk("".join(traceback.format_exception(error)).rstrip())
        log = getattr(error, "log", None)
        if log:
            console.talk(str(log).rstrip())
    if isinstance(error, ProbeManifestError):
        console.error(str(error))
        if error.hint:
            console.hint(error.hint)
    elif isinstance(error, click.exceptions.NoArgsIsHelpError):
        console.talk(error.format_message())
    elif isinstance(error, click.UsageError):
        console.error(error.format_message())
        if error.ctx is not None:
            console.hint(f"{error.ctx.command_path} --help")
    elif isinstance(error, click.ClickException):
        console.error(error.format_message())
    elif isinstance(error, (KeyboardInterrupt, click.Abort)):
        console.error("interrupted")
    elif isinstance(error, Terminated):
        console.error("terminated")
    elif isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        console.error(f"{where}{error.strerror or error}")
    elif isinstance(error, MemoryError):
        console.error("out of memory")
        console.hint("fewer ranks at once (--jobs 1) need less")
    else:
        console.error(f"unexpected {described(error)}")
        if not console.debug:
            console.hint("probe-manifest --debug COMMAND ... shows where; please report it")
