"""The two faces of a chat: a terminal with a prompt that can be edited, and plain lines from a pipe or file."""

from __future__ import annotations

import asyncio
import signal
import sys
import unicodedata
from typing import TextIO

from jaxserve.cli.chat_commands import is_command, message_of, run_command
from jaxserve.cli.chat_session import ChatError, ChatSession
from jaxserve.cli.errors import one_line


async def run_terminal(session: ChatSession, greeting: str) -> None:
    """A chat with a person, until /exit or Ctrl-D. Ctrl-C stops the answer, or clears what was typed."""
    # Here: a chat through a pipe does not need it.
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    prompt: PromptSession[str] = PromptSession(
        ">>> ", multiline=True, key_bindings=bindings, prompt_continuation=lambda width, number, wraps: "... "
    )
    interrupted = asyncio.Event()

    def on_interrupt() -> None:
        interrupted.set()
        if prompt.app.is_running:
            prompt.app.exit(exception=KeyboardInterrupt())

    # One handler for the whole chat, so that a second Ctrl-C, just after the answer stopped, does not end the program.
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    print(greeting)
    try:
        while True:
            try:
                line = await prompt.prompt_async(handle_sigint=False)
            except KeyboardInterrupt:
                print("(/exit or Ctrl-D leaves)")
                continue
            except EOFError:
                return
            interrupted.clear()
            if not await respond(session, line, interrupted, sys.stdout, sys.stderr):
                return
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def run_lines(session: ChatSession, source: TextIO, out: TextIO, notes: TextIO) -> None:
    """A chat with a pipe: each line is a message or a command; ends with the input.

    Ctrl-C ends it: nobody is there to ask something else.
    """
    # asyncio's own handler would only set a flag, which a blocking read does not see.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    never = asyncio.Event()
    for line in source:
        if not await respond(session, line, never, out, notes):
            return


async def respond(session: ChatSession, line: str, interrupted: asyncio.Event, out: TextIO, notes: TextIO) -> bool:
    """Carries out or answers one input. False: the chat is over."""
    line = line.strip()
    if not line:
        return True
    if is_command(line):
        try:
            result = run_command(session, line)
        except ValueError as error:
            print(f"error: {one_line(str(error))}", file=notes, flush=True)
            return True
        if result.text:
            print(result.text, file=out, flush=True)
        return not result.leave

    shown = ""

    def show(text: str) -> None:
        nonlocal shown
        text = printable(text)
        shown += text
        out.write(text)
        out.flush()

    try:
        stats = await session.answer(message_of(line), show, interrupted)
    except ChatError as error:
        _end_line(shown, out)
        print(f"error: {one_line(str(error))}", file=notes, flush=True)
        return True
    _end_line(shown or "-", out)
    if stats.finish_reason == "interrupted":
        print("(stopped)", file=notes, flush=True)
    elif stats.finish_reason == "length":
        print("(cut: max_tokens or the context was reached)", file=notes, flush=True)
    if stats.forgotten_exchanges:
        print(f"(the context was full: forgot the {stats.forgotten_exchanges} oldest)", file=notes, flush=True)
    return True


def printable(text: str) -> str:
    """The text without control characters: a model's words must not move the cursor or set the window's title."""
    return "".join(
        character if character in "\n\t" or unicodedata.category(character) != "Cc" else "�"
        for character in text.replace("\r\n", "\n")
    )


def _end_line(shown: str, out: TextIO) -> None:
    if shown and not shown.endswith("\n"):
        out.write("\n")
        out.flush()
