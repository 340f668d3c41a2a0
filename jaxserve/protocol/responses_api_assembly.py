"""Answers of the responses route from text deltas, whole or as events."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from jaxserve.protocol.assembly import Answer, gather, new_id
from jaxserve.protocol.generation import merged_deltas
from jaxserve.protocol.responses import TextFinishReason, TokenLogprob
from jaxserve.protocol.responses_api_objects import (
    ContentPartEvent,
    IncompleteDetails,
    InputTokensDetails,
    OutputItemEvent,
    OutputMessage,
    OutputText,
    ResponseEvent,
    ResponseObject,
    ResponseStateEvent,
    ResponseStatus,
    ResponseUsage,
    TextDeltaEvent,
    TextDoneEvent,
)
from jaxserve.protocol.responses_api_requests import ResponsesRequest

_STATUS: dict[TextFinishReason, ResponseStatus] = {"stop": "completed", "length": "incomplete"}
_PLACE: dict[str, int] = {"output_index": 0, "content_index": 0}


async def response(answer: Answer, request: ResponsesRequest) -> ResponseObject:
    """The whole answer."""
    choice = (await gather(answer))[0]
    logprobs: list[TokenLogprob] = []
    if answer.logprobs is not None:
        logprobs = (await asyncio.to_thread(answer.logprobs.chat, choice.logprobs)).content
    status = _STATUS[choice.finish_reason]
    part = OutputText(text=choice.text, logprobs=logprobs)
    return _response(answer, request, status, [OutputMessage(id=new_id("msg"), status=status, content=[part])])


async def response_events(answer: Answer, request: ResponsesRequest) -> AsyncGenerator[ResponseEvent]:
    """The answer as it grows. Nothing is yielded before the first token, as for chat completions."""
    item_id = new_id("msg")
    numbers = itertools.count()

    def part_event(event: type[ContentPartEvent | TextDeltaEvent | TextDoneEvent], kind: str, **fields: Any) -> Any:
        return event(sequence_number=next(numbers), type=f"response.{kind}", item_id=item_id, **_PLACE, **fields)

    def item_event(kind: str, item: OutputMessage) -> ResponseEvent:
        return OutputItemEvent(sequence_number=next(numbers), type=f"response.{kind}", output_index=0, item=item)

    def state_event(kind: str, status: ResponseStatus, output: list[OutputMessage]) -> ResponseEvent:
        state = _response(answer, request, status, output)
        return ResponseStateEvent(sequence_number=next(numbers), type=f"response.{kind}", response=state)

    texts: list[str] = []
    logprobs: list[TokenLogprob] = []
    status: ResponseStatus = "in_progress"
    opened = False
    async with aclosing(merged_deltas(answer.generations)) as deltas:
        async for delta in deltas:
            if not opened:
                opened = True
                yield state_event("created", "in_progress", [])
                yield state_event("in_progress", "in_progress", [])
                yield item_event("output_item.added", OutputMessage(id=item_id, status="in_progress", content=[]))
                yield part_event(ContentPartEvent, "content_part.added", part=OutputText(text=""))
            told = answer.logprobs.chat(delta.logprobs).content if answer.logprobs and delta.logprobs else []
            if delta.text or told:
                texts.append(delta.text)
                logprobs += told
                yield part_event(TextDeltaEvent, "output_text.delta", delta=delta.text, logprobs=told)
            if delta.finish_reason is not None:
                status = _STATUS[delta.finish_reason]
    part = OutputText(text="".join(texts), logprobs=logprobs)
    message = OutputMessage(id=item_id, status=status, content=[part])
    yield part_event(TextDoneEvent, "output_text.done", text=part.text, logprobs=logprobs)
    yield part_event(ContentPartEvent, "content_part.done", part=part)
    yield item_event("output_item.done", message)
    yield state_event(status, status, [message])


def _response(
    answer: Answer, request: ResponsesRequest, status: ResponseStatus, output: list[OutputMessage]
) -> ResponseObject:
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
        temperature=request.temperature,
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
