"""What `/help`, `/set` and the others do in a chat."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxserve.cli.chat_session import ChatSession
from jaxserve.cli.chat_settings import with_overrides

HELP = """\
/help            this text
/exit            leave (as does Ctrl-D)
/stats           numbers about the last answer: tokens, time to first token, tokens/s, drafts
/metrics         numbers about the engine since it started
/reset           start afresh: forget all questions and answers
/set             show the settings
/set NAME=VALUE  change some, as in: /set temperature=0.5;seed=1;max_tokens=100;stop=a,b
A message that starts with a slash: write two. In a terminal, Esc and then Enter makes a new line, and Ctrl-C stops \
the answer."""


@dataclass(frozen=True)
class CommandResult:
    """What to show, and whether the chat is over."""

    text: str = ""
    leave: bool = False


def is_command(line: str) -> bool:
    """Whether the line is a command and no message: a slash and a word of letters, alone or before a blank."""
    return re.match(r"/[A-Za-z]+(\s|$)", line) is not None


def message_of(line: str) -> str:
    """The message that a line stands for: `//x` says `/x`."""
    return line[1:] if line.startswith("//") else line


def metric_line(name: str, value: object) -> str:
    return f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}"


def run_command(session: ChatSession, line: str) -> CommandResult:
    """Carries out one command.

    Raises:
        ValueError: unknown command, arguments where none belong, or a setting that cannot be.
    """
    name, _, argument = line.partition(" ")
    name, argument = name.strip(), argument.strip()
    if name == "/set":
        if argument:
            session.settings = with_overrides(session.settings, argument)
        return CommandResult(session.settings.text())
    if name not in ("/help", "/exit", "/stats", "/metrics", "/reset"):
        raise ValueError(f"unknown command {name}: /help lists them, and //{name[1:]} sends it as a message")
    if argument:
        raise ValueError(f"{name} takes no argument, got {argument!r}")
    if name == "/exit":
        return CommandResult(leave=True)
    if name == "/reset":
        session.reset()
        return CommandResult("(forgot all questions and answers)")
    if name == "/stats":
        return CommandResult("no answer yet" if session.last_stats is None else session.last_stats.text())
    if name == "/metrics":
        return CommandResult("\n".join(metric_line(*item) for item in session.backend.metrics().items()))
    return CommandResult(HELP)
