"""Calls of tools as parts of responses and of chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxserve.protocol.responses import (
    CalledFunction,
    CalledFunctionDelta,
    CalledTool,
    CalledToolDelta,
    ChatCompletionMessage,
    ChatFinishReason,
    TextFinishReason,
)
from jaxserve.protocol.tools import FoundCall, ToolUse


def chat_message(
    text: str, reason: TextFinishReason, use: ToolUse | None
) -> tuple[ChatCompletionMessage, ChatFinishReason]:
    """The assistant's turn, and why it ended."""
    if use is None:
        return ChatCompletionMessage(role="assistant", content=text, refusal=None), reason
    finder = use.find_calls()
    found = finder.push(text, is_last=True)
    if not found.calls:
        return ChatCompletionMessage(role="assistant", content=found.content, refusal=None), reason
    calls = [
        CalledTool(id=call.id, type="function", function=CalledFunction(name=call.name, arguments=call.arguments))
        for call in found.calls
    ]
    message = ChatCompletionMessage(role="assistant", content=found.content or None, refusal=None, tool_calls=calls)
    return message, finder.finish_reason(reason)


def call_deltas(calls: Iterable[FoundCall]) -> Iterator[CalledToolDelta]:
    """Two parts for each call: who is called, and with what."""
    for call in calls:
        opening = CalledFunctionDelta(name=call.name, arguments="")
        yield CalledToolDelta(index=call.index, id=call.id, type="function", function=opening)
        yield CalledToolDelta(index=call.index, function=CalledFunctionDelta(arguments=call.arguments))
