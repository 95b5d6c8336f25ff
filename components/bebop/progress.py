"""Progress bars with an estimate, for a terminal and for a log.

A terminal gets rich's live bar. A pipe (Kubeflow's log, a file) gets one line every few seconds,
because a redrawn bar there would be thousands of lines.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

T = TypeVar("T")
LOG_EVERY_SECONDS = 5.0


class Progress:
    """One task's progress.

    >>> with Progress("train", total=100) as progress:
    ...     progress.advance(1, "loss 0.31")

    Args:
        description: what is being done.
        total: number of units.
    """

    def __init__(self, description: str, total: int) -> None:
        self.description, self.total, self.done, self.note = description, total, 0, ""
        self._live = sys.stderr.isatty()
        self._start = self._printed = time.monotonic()
        if self._live:
            self._rich = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("eta"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
            )
            self._task = self._rich.add_task(description, total=total, note="")

    def __enter__(self) -> Self:
        if self._live:
            self._rich.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._rich.stop()
        elif time.monotonic() - self._start > LOG_EVERY_SECONDS:
            self._print_line()

    def advance(self, units: int = 1, note: str = "") -> None:
        """Add finished units, with an optional short note (a loss, a rate)."""
        self.done += units
        self.note = note or self.note
        if self._live:
            self._rich.update(self._task, advance=units, note=self.note)
        elif time.monotonic() - self._printed >= LOG_EVERY_SECONDS:
            self._print_line()

    def _print_line(self) -> None:
        self._printed = time.monotonic()
        elapsed = self._printed - self._start
        left = elapsed / self.done * (self.total - self.done) if self.done else float("nan")
        estimate = f"{left:.0f} s left" if self.done else "no estimate yet"
        line = f"{self.description}: {self.done}/{self.total}, {elapsed:.0f} s, {estimate}"
        print(f"{line}  {self.note}".rstrip(), file=sys.stderr, flush=True)


def track(iterable: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate with a progress display; `total` is needed where `len` does not work."""
    size = total if total is not None else len(iterable)  # type: ignore[arg-type]
    with Progress(description, size) as progress:
        for item in iterable:
            yield item
            progress.advance()
