"""How the fetching of a checkpoint's headers goes, on stderr."""

from __future__ import annotations

from collections.abc import Callable

from probe_cli.report.console import Console
from probe_cli.report.numbers import plural

__all__ = ["headers_progress"]


def headers_progress(console: Console) -> Callable[[int, int], None]:
    """The listener for `Checkpoint.open`: a line that counts where there is a terminal, one line at the start where
    there is none. Nothing is said of headers that are here already."""

    def listen(done: int, total: int) -> None:
        if console.live():
            console.moving("" if done == total else f"headers: {done:,} of {plural(total, 'file')}")
        elif done == 0:
            console.note(f"fetching the headers of {plural(total, 'file')}")

    return listen
