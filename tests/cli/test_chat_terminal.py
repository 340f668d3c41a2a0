"""A chat in a real (pseudo) terminal."""

import os
import sys
from collections.abc import Iterator

import pexpect
import pytest

# The child is replaced by a new program at once, so that it does not matter which threads the fork left behind.
pytestmark = [
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of forkpty:DeprecationWarning"),
]

# Keys as terminals send them.
CTRL_C, CTRL_D, ESC_ENTER = "\x03", "\x04", "\x1b\r"


@pytest.fixture
def terminal() -> Iterator[pexpect.spawn]:
    env = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    child = pexpect.spawn(
        sys.executable, ["-m", "tests.cli.fake_backend"], env=env, encoding="utf-8", timeout=20, dimensions=(50, 120)
    )
    child.expect_exact("Hello from the fake.")
    child.expect_exact(">>>")
    yield child
    child.close(force=True)


def exit_code(child: pexpect.spawn) -> int | None:
    child.expect(pexpect.EOF)
    child.wait()
    return child.exitstatus


def test_an_answer_then_exit(terminal: pexpect.spawn) -> None:
    terminal.send("good day\r")
    terminal.expect_exact("You said: good day")
    terminal.expect_exact(">>>")
    terminal.send("/exit\r")
    assert exit_code(terminal) == 0


def test_escape_enter_makes_a_new_line(terminal: pexpect.spawn) -> None:
    terminal.send(f"first{ESC_ENTER}second\r")
    terminal.expect_exact("You said: first\r\nsecond")
    terminal.send(CTRL_D)
    assert exit_code(terminal) == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: pexpect.spawn) -> None:
    terminal.send("forever\r")
    terminal.expect_exact("more more more")
    terminal.send(CTRL_C)
    terminal.expect_exact("(stopped)")
    terminal.expect_exact(">>>")
    terminal.send("still there\r")
    terminal.expect_exact("You said: still there")
    terminal.send(CTRL_D)
    assert exit_code(terminal) == 0


def test_ctrl_c_at_the_prompt_drops_what_was_typed(terminal: pexpect.spawn) -> None:
    terminal.send("half a question")
    terminal.expect_exact("half a question")
    terminal.send(CTRL_C)
    terminal.expect_exact("(/exit or Ctrl-D leaves)")
    terminal.expect_exact(">>>")
    terminal.send("whole\r")
    terminal.expect_exact("You said: whole")
    terminal.send(CTRL_D)
    assert exit_code(terminal) == 0


def test_an_error_is_shown_and_the_chat_goes_on(terminal: pexpect.spawn) -> None:
    terminal.send("/set temperature=hot\r")
    terminal.expect_exact("error: temperature='hot' is no number")
    terminal.send("/set\r")
    terminal.expect_exact("temperature=0.7;top_p=0.95")
    terminal.send(CTRL_D)
    assert exit_code(terminal) == 0
