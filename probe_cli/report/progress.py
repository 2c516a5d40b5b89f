"""How a build goes, on stderr: a live bar where there is a terminal, a line per rank where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from probe_cli.report.console import Console
from probe_cli.report.numbers import bytes_text, seconds_text
from probe_cli.topology import Rank

if TYPE_CHECKING:
    from probe_cli.probe.build import RankResult

__all__ = ["LiveProgress", "PlainProgress", "build_progress"]


def build_progress(console: Console, ranks: int) -> PlainProgress | LiveProgress:
    """The listener for a build; a context manager."""
    return LiveProgress(ranks) if console.live() else PlainProgress(console, ranks)


def _done_text(rank: Rank, result: RankResult) -> str:
    seconds = seconds_text(sum(result.seconds.values()))
    return f"{rank}: {result.manifest.summary.applications:,} applications, {seconds}, {bytes_text(result.peak_rss)}"


class PlainProgress:
    """One line per rank that is done."""

    def __init__(self, console: Console, ranks: int) -> None:
        self._console = console
        self._total = ranks
        self._done = 0

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing to take down."""

    def started(self, rank: Rank) -> None:
        """Not worth a line."""

    def progressed(self, rank: Rank, done: int, total: int) -> None:
        """Not worth a line."""

    def finished(self, rank: Rank, result: RankResult) -> None:
        self._done += 1
        self._console.note(f"[{self._done}/{self._total}] {_done_text(rank, result)}")


class LiveProgress:
    """A bar per running rank and one for all of them. Redrawn from here alone: a redrawing thread and fork() do not go
    together."""

    def __init__(self, ranks: int) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=RichConsole(stderr=True),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._all = self._progress.add_task("ranks", total=ranks)
        self._bars: dict[int, Any] = {}

    def __enter__(self) -> LiveProgress:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def started(self, rank: Rank) -> None:
        self._bars[rank.index] = self._progress.add_task(str(rank), total=None)
        self._progress.refresh()

    def progressed(self, rank: Rank, done: int, total: int) -> None:
        self._progress.update(self._bars[rank.index], completed=done, total=total)
        self._progress.refresh()

    def finished(self, rank: Rank, result: RankResult) -> None:
        self._progress.remove_task(self._bars.pop(rank.index))
        self._progress.advance(self._all)
        self._progress.console.print(_done_text(rank, result), highlight=False, markup=False)
        self._progress.refresh()
