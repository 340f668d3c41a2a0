"""Progress of downloads, conversion, loading and warm-up: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichDisplay
from rich.text import Text

from jaxserve.progress import Progress

SECONDS_BETWEEN_LINES = 5.0
_SHOW_CURSOR = "\x1b[?25h"
BYTES = ("bytes", "B")  # units that are shown in MB and the like


def progress_on(stream: TextIO | None = None) -> Progress:
    """What suits the stream (default: stderr, so that stdout holds results only)."""
    target = stream or sys.stderr
    return BarProgress(target) if target.isatty() else LineProgress(target)


def restore_terminal(stream: TextIO | None = None) -> None:
    """Shows the cursor again where a bar may have been given up, such as that of an engine's process that was ended."""
    target = stream or sys.stderr
    if target.isatty():
        target.write(_SHOW_CURSOR)
        target.flush()


def amount_text(amount: float, unit: str) -> str:
    """An amount for people: "98.0 MB", "12 layers"; units of bytes are scaled by thousands."""
    if unit not in BYTES:
        return f"{amount:,.0f} {unit}" if amount >= 10 or amount == int(amount) else f"{amount:.1f} {unit}"
    for prefix in ("", "k", "M", "G"):
        if amount < 1000:
            return f"{amount:.0f} B" if not prefix else f"{amount:.1f} {prefix}B"
        amount /= 1000
    return f"{amount:.1f} TB"


def done_text(done: float, total: float | None, unit: str) -> str:
    """How far work is: "98.0 MB of 200.0 MB", "3 of 13 programs"."""
    if total is None:
        return amount_text(done, unit)
    whole = amount_text(total, unit)
    return f"{amount_text(done, unit)} of {whole}" if unit in BYTES else f"{done:,.0f} of {whole}"


def pace_text(done: float, total: float | None, seconds: float, unit: str) -> str:
    """How fast work goes, and how long it will take: ", 210.0 MB/s, 65 s left"; "" before there is anything to tell."""
    if done <= 0 or seconds <= 0:
        return ""
    pace = done / seconds
    left = "" if total is None else f", {max(0.0, total - done) / pace:,.0f} s left"
    return f", {amount_text(pace, unit)}/s{left}"


class BarProgress:
    """Bars with amount, rate and time left, drawn by rich; a finished one stays as a line."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)

    @contextmanager
    def task(self, description: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        display = RichDisplay(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            _AmountColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=self._console,
        )
        with display:
            task = display.add_task(description, total=total, unit=unit)
            yield lambda amount: display.advance(task, amount)
            if total is None:  # an open end is reached when the work ends
                display.update(task, total=display.tasks[0].completed or 1, completed=display.tasks[0].completed or 1)


class _AmountColumn(TextColumn):
    """How much is done, of how much, and how fast."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        unit = task.fields["unit"]
        if not unit:
            return Text()
        text = done_text(task.completed, task.total, unit)
        if task.speed:
            text += f", {amount_text(task.speed, unit)}/s"
        return Text(text)


class LineProgress:
    """A line when a task starts, every few seconds while it runs, and when it ends; for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    @contextmanager
    def task(self, description: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        started = last_line = time.monotonic()
        done = 0
        self._write(f"{description} …")

        def advance(amount: int) -> None:
            nonlocal done, last_line
            with self._lock:
                done += amount
                now = time.monotonic()
                due = now - last_line >= SECONDS_BETWEEN_LINES
                if due:
                    last_line = now
            if due:
                self._write(
                    f"{description}: {done_text(done, total, unit)}{pace_text(done, total, now - started, unit)}"
                )

        yield advance
        self._write(f"{description}: done in {time.monotonic() - started:.1f} s")

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)
