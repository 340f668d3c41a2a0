"""Answers of the responses route from text deltas, whole or as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from jaxserve.protocol.assembly import Answer, gather
from jaxserve.protocol.generation import merged_deltas
from jaxserve.protocol.responses import TextFinishReason
from jaxserve.protocol.responses_api_items import OutputItems
from jaxserve.protocol.responses_api_objects import (
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    ResponseEvent,
    ResponseObject,
    ResponseStateEvent,
    ResponseStatus,
    ResponseUsage,
    TextSettings,
)
from jaxserve.protocol.responses_api_requests import ResponsesRequest
from jaxserve.protocol.responses_api_tools import told_tools

_STATUS: dict[TextFinishReason, ResponseStatus] = {"stop": "completed", "length": "incomplete"}


async def response(answer: Answer, request: ResponsesRequest) -> ResponseObject:
    """The whole answer."""
    choice = (await gather(answer))[0]
    status = _STATUS[choice.finish_reason]

    def items() -> list[OutputItem]:
        output = OutputItems(answer.tool_use, answer.logprobs)
        for _ in (*output.push(choice.text, choice.logprobs), *output.finish(status)):
            pass  # only streams tell of what has led to the items
        return output.items

    return _response(answer, request, status, await asyncio.to_thread(items))


async def response_events(answer: Answer, request: ResponsesRequest) -> AsyncGenerator[ResponseEvent]:
    """The answer as it grows. Nothing is yielded before the first token, as for chat completions."""
    output = OutputItems(answer.tool_use, answer.logprobs)

    def state_event(kind: str, status: ResponseStatus) -> ResponseEvent:
        state = _response(answer, request, status, list(output.items))
        return ResponseStateEvent(sequence_number=next(output.numbers), type=f"response.{kind}", response=state)

    status: ResponseStatus = "in_progress"
    opened = False
    async with aclosing(merged_deltas(answer.generations)) as deltas:
        async for delta in deltas:
            if not opened:
                opened = True
                yield state_event("created", "in_progress")
                yield state_event("in_progress", "in_progress")
            for event in output.push(delta.text, delta.logprobs):
                yield event
            if delta.finish_reason is not None:
                status = _STATUS[delta.finish_reason]
    for event in output.finish(status):
        yield event
    yield state_event(status, status)


def _response(
    answer: Answer, request: ResponsesRequest, status: ResponseStatus, output: list[OutputItem]
) -> ResponseObject:
    asked = request.text.format
    return ResponseObject(
        id=answer.id,
        created_at=answer.created,
        status=status,
        incomplete_details=IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=answer.model,
        output=output,
        parallel_tool_calls=request.parallel_tool_calls,
        temperature=request.temperature,
        text=TextSettings(format={"type": "text"} if asked is None else asked.told()),
        tool_choice=request.tool_choice or "auto",
        tools=told_tools(request.tools),
        top_logprobs=request.top_logprobs or 0,
        top_p=request.top_p,
        usage=None if status == "in_progress" else _usage(answer),
        user=request.user,
    )


def _usage(answer: Answer) -> ResponseUsage:
    usage = answer.total_usage()
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
    )
