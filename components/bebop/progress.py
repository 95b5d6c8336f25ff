"""Progress bars with an estimate, for a terminal and for a log.

A terminal gets rich's live bar. A pipe (Kubeflow's log, a file) gets one line every few seconds,
because a redrawn bar there would be thousands of lines. A local runner that pipes a stage's output
names its own terminal in `BEBOP_TERMINAL`, and the bar is drawn there.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self, TextIO, TypeVar

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
TERMINAL = "BEBOP_TERMINAL"


def _open_terminal() -> TextIO | None:
    """Where a live bar can be drawn: stderr, else the runner's terminal, else nowhere."""
    if sys.stderr.isatty():
        return sys.stderr
    path = os.environ.get(TERMINAL)
    if not path:
        return None
    try:
        # Not to become this process's controlling terminal: its Ctrl-C is the runner's.
        descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY)
    except OSError:
        return None  # the runner went on without its terminal (nohup, a closed window)
    if not os.isatty(descriptor):
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "w")


def _columns(terminal: TextIO) -> int | None:
    return os.get_terminal_size(terminal.fileno()).columns or None


def _live_bar(terminal: TextIO) -> RichProgress:
    own = terminal is sys.stderr
    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(file=terminal, width=_columns(terminal)),
        # What is printed meanwhile belongs to the pipe when the bar is on another stream.
        redirect_stdout=own,
        redirect_stderr=own,
    )


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
        self._terminal = _open_terminal()
        self._start = self._printed = time.monotonic()
        self._said = -1  # units at the last line
        if self._terminal is not None:
            self._rich = _live_bar(self._terminal)
            self._task = self._rich.add_task(description, total=total, note="")

    def __enter__(self) -> Self:
        if self._terminal is not None:
            self._rich.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._terminal is not None:
            self._rich.stop()
            if self._terminal is not sys.stderr:
                self._terminal.close()
        elif time.monotonic() - self._start > LOG_EVERY_SECONDS and self._said < self.done:
            self._print_line()

    def advance(self, units: int = 1, note: str = "") -> None:
        """Add finished units, with an optional short note (a loss, a rate)."""
        self.done += units
        self.note = note or self.note
        if self._terminal is not None:
            self._rich.update(self._task, advance=units, note=self.note)
        elif time.monotonic() - self._printed >= LOG_EVERY_SECONDS:
            self._print_line()

    def _print_line(self) -> None:
        self._printed, self._said = time.monotonic(), self.done
        elapsed = self._printed - self._start
        left = elapsed / self.done * (self.total - self.done) if self.done else float("nan")
        estimate = f"{left:.0f} s left" if self.done else "no estimate yet"
        line = f"{self.description}: {self.done}/{self.total}, {elapsed:.0f} s, {estimate}"
        print(f"{line}  {self.note}".rstrip(), file=sys.stderr, flush=True)


def track(iterable: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate with a progress display; `total` is needed where `len` does not work."""
    size = total if total is not None else len(iterable)  # type: ignore[arg-type]  # len says so itself
    with Progress(description, size) as progress:
        for item in iterable:
            yield item
            progress.advance()
