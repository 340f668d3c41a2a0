import io

import pytest

from jaxserve import progress_display
from jaxserve.progress_display import BarProgress, LineProgress, amount_text, done_text, progress_on, restore_terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_on_a_terminal_and_lines_elsewhere() -> None:
    assert isinstance(progress_on(Terminal()), BarProgress)
    assert isinstance(progress_on(io.StringIO()), LineProgress)


def test_lines_tell_start_progress_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress_display.time, "monotonic", lambda: now)
    stream = io.StringIO()
    with LineProgress(stream).task("Downloading", 200_000_000, "bytes") as advance:
        advance(1_000_000)  # too soon after the last line
        now += 6.0
        advance(97_000_000)
        now += 2.5
        advance(102_000_000)
    assert stream.getvalue().splitlines() == [
        "Downloading …",
        "Downloading: 98.0 MB of 200.0 MB, 16.3 MB/s, 6 s left",
        "Downloading: done in 8.5 s",
    ]


@pytest.mark.parametrize("total", [30, None])
def test_bars_end_with_the_amount(total: int | None) -> None:
    stream = Terminal()
    with BarProgress(stream).task("Loading", total, "layers") as advance:
        for _ in range(30):
            advance(1)
    text = stream.getvalue()
    assert "Loading" in text
    assert ("30 of 30 layers" if total else "30 layers") in text


def test_bars_of_uncounted_work_show_no_amount() -> None:
    stream = Terminal()
    with BarProgress(stream).task("Waiting", None, ""):
        pass
    assert "Waiting" in stream.getvalue() and " of " not in stream.getvalue()


def test_no_end_is_announced_for_work_that_failed() -> None:
    stream = io.StringIO()
    with pytest.raises(OSError, match="gone"), LineProgress(stream).task("Loading", None, "layers"):
        raise OSError("gone")
    assert "done" not in stream.getvalue()


@pytest.mark.parametrize(
    ("amount", "unit", "text"),
    [
        (0, "bytes", "0 B"),
        (999, "bytes", "999 B"),
        (98_000_000, "bytes", "98.0 MB"),
        (2.5e12, "bytes", "2.5 TB"),
        (3, "programs", "3 programs"),
        (2.345, "programs", "2.3 programs"),
    ],
)
def test_amounts_are_for_people(amount: float, unit: str, text: str) -> None:
    assert amount_text(amount, unit) == text


def test_how_far_work_is() -> None:
    assert done_text(98e6, 200e6, "bytes") == "98.0 MB of 200.0 MB"
    assert done_text(3, 13, "programs") == "3 of 13 programs"
    assert done_text(3, None, "programs") == "3 programs"


def test_the_cursor_is_shown_again_on_a_terminal_only() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    restore_terminal(terminal)
    restore_terminal(pipe)
    assert terminal.getvalue() == "\x1b[?25h"
    assert pipe.getvalue() == ""
