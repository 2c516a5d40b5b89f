"""The one output object of all commands: data on stdout, talk on stderr, colour where it is wanted."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import stat
import sys
from pathlib import Path
from typing import Any, TextIO

from probe_cli.report.plain import printable

__all__ = ["Console"]

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_WIDE = 160
_STREAM = re.compile(r"/dev/(?:std(?P<which>out|err)|fd/(?P<number>[0-9]{1,6}))")


class Console:
    """Prints results (`print`, `json`) to stdout or a file, and everything else (`note`, `error`, `hint`) to stderr."""

    def __init__(self) -> None:
        self.debug = False
        self.quiet = False
        self._file: Path | None = None
        self._buffer: io.StringIO | None = None
        self._moving = False

    # Results

    def send_to(self, path: str | Path | None) -> None:
        """Collect results for a file, written in one step by `flush`; None or "-" is stdout."""
        if path is not None and str(path) != "-":
            self._file, self._buffer = Path(path), io.StringIO()

    def print(self, text: str = "") -> None:
        """A line (or lines) of the result."""
        self.moving("")
        stream = self._buffer or sys.stdout
        stream.write(text + "\n")

    def document(self, text: str) -> None:
        """A result that programs read: UTF-8, whatever the terminal or the locale has. An escape in the place of a
        character that the locale lacks is no JSON, and XML says itself what it is encoded in."""
        if self._buffer is None and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")
        self.print(text)

    def json(self, value: Any) -> None:
        """A JSON document as the result."""
        self.document(json.dumps(value, indent=2, ensure_ascii=False))

    def flush(self) -> None:
        """Write what is pending. Raises BrokenPipeError if stdout was closed, OSError if the file cannot be written."""
        if self._file is not None and self._buffer is not None:
            path, text, self._buffer = self._file, self._buffer.getvalue(), None
            _replace_file(path, text)
        sys.stdout.flush()

    # Talk

    def talk(self, text: str) -> None:
        """A line for people, on stderr."""
        self.moving("")
        # Nobody listens: not a reason to fail.
        with contextlib.suppress(BrokenPipeError, ValueError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def note(self, text: str) -> None:
        """What is going on; silent with --quiet."""
        if not self.quiet:
            self.talk(text)

    def moving(self, text: str) -> None:
        """A line on stderr that the next output replaces, where a terminal can show it; without text, take it away."""
        if self._moving or (text and self.live()):
            self._moving = bool(text)
            with contextlib.suppress(BrokenPipeError, ValueError):
                sys.stderr.write(f"\r\x1b[2K{text}")
                sys.stderr.flush()

    def error(self, text: str) -> None:
        self.talk(self.style("error:", "red", err=True) + f" {printable(text)}")

    def hint(self, text: str) -> None:
        self.talk(self.style("hint:", "cyan", err=True) + f" {printable(text)}")

    # Looks

    def style(self, text: str, *styles: str, err: bool = False) -> str:
        """`text` in colour, if the stream shows colours."""
        if not self.colour(err=err) or not text:
            return text
        return f"\x1b[{';'.join(_STYLES[name] for name in styles)}m{text}\x1b[0m"

    def colour(self, *, err: bool = False) -> bool:
        """NO_COLOR and dumb terminals are heeded; FORCE_COLOR wins over a pipe."""
        if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
            return False
        if not err and self._buffer is not None:
            return False
        return bool(os.environ.get("FORCE_COLOR")) or _is_terminal(sys.stderr if err else sys.stdout)

    def width(self) -> int:
        """Columns for results: the terminal's; generous where there is none, since nothing wraps in a pipe."""
        columns = os.environ.get("COLUMNS", "")
        if columns.isascii() and columns.isdigit():
            return max(int(columns[:6]), 20)
        if self._buffer is None and _is_terminal(sys.stdout):
            return max(shutil.get_terminal_size().columns, 20)
        return _WIDE

    def live(self) -> bool:
        """True if stderr is a terminal that can show a moving progress bar."""
        return _is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb" and not self.quiet

    # Streams

    def prepare_streams(self) -> None:
        """Names that the terminal's encoding cannot spell are escaped, never a reason to fail; nor is a stream that was
        closed from the start: its descriptor must not become some file's."""
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for as long as we run
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")

    def abandon_streams(self) -> None:
        """Stdout's reader has gone: keep the interpreter's exit from trying, and complaining, again."""
        with contextlib.suppress(OSError, ValueError):
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, sys.stdout.fileno())
            os.close(devnull)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def _replace_file(name: Path, text: str) -> None:
    stream = _STREAM.fullmatch(str(name))
    if stream is not None:  # opened by its name it would have a position of its own, and what came before be lost
        number = stream["number"] or {"out": 1, "err": 2}[stream["which"]]
        with open(os.dup(int(number)), "w", encoding="utf-8") as out:
            out.write(text)
        return
    if name.exists() and not name.is_file():  # a device or a pipe is written to, and never replaced
        with name.open("w", encoding="utf-8") as out:
            out.write(text)
        return
    path = Path(os.path.realpath(name))  # a link stays a link
    temporary = path.with_name(f".{os.getpid()}.{os.urandom(4).hex()}.tmp")  # a name as long as can be has no room
    try:
        with temporary.open("w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        with contextlib.suppress(OSError):
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # of the file that was asked for, not of the one that stands in for it
            raise OSError(error.errno, f"cannot be written ({error.strerror})", str(name)) from None
        raise
