"""A chat through a pipe."""

import asyncio
import io
import subprocess
import sys

from jaxserve.cli.chat_screen import printable, run_lines
from jaxserve.cli.chat_session import ChatSession
from jaxserve.cli.chat_settings import ChatSettings
from tests.cli.fake_backend import FakeBackend


def chat(text: str, backend: FakeBackend | None = None) -> tuple[str, str]:
    """(what went to stdout, what went to stderr)"""
    out, notes = io.StringIO(), io.StringIO()
    session = ChatSession(backend or FakeBackend(), ChatSettings())
    asyncio.run(run_lines(session, io.StringIO(text), out, notes))
    return out.getvalue(), notes.getvalue()


def test_each_line_is_answered() -> None:
    assert chat("one\n\n  \ntwo") == ("You said: one \nYou said: two \n", "")


def test_commands_work_and_exit_ends_it() -> None:
    out, notes = chat("/set temperature=0;stop=a,b\nhi\n/stats\n/metrics\n/exit\nnever asked\n")
    assert "temperature=0.0" in out
    assert "stop=a,b" in out
    assert "answer: 3 tokens (stop)" in out
    assert "num_pages: 7" in out
    assert "never asked" not in out
    assert notes == ""


def test_help_names_every_command() -> None:
    out, _ = chat("/help\n")
    assert all(name in out for name in ("/help", "/exit", "/stats", "/metrics", "/reset", "/set"))


def test_errors_go_to_stderr_and_the_chat_goes_on() -> None:
    out, notes = chat("/nonsense\n/set top_p=7\n/reset now\nrefuse\nhi\n")
    assert out == "You said: hi \n"
    assert [line.partition(":")[0] for line in notes.splitlines()] == ["error"] * 4
    assert "unknown command /nonsense" in notes
    assert "top_p=7.0 must lie in 0..1" in notes


def test_messages_may_start_with_a_slash() -> None:
    backend = FakeBackend()
    chat("/etc/passwd is a file\n//help\n", backend)
    assert [prompt[-1]["content"] for prompt in backend.prompts] == ["/etc/passwd is a file", "/help"]


def test_control_characters_of_the_model_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b]0;title\x07b\r\nc\td\x9b1m é🌶") == "a�]0;title�b\nc\td�1m é🌶"


def test_a_real_pipe_gets_plain_text_and_exit_code_zero() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cli.fake_backend"], input=b"h\xc3\xa9llo\n\xff\n", capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == "You said: héllo \nYou said: � \n"
    assert done.stderr == b""
