"""The items of a response as its answer grows, and the events that tell of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve.protocol.assembly import new_id
from jaxserve.protocol.logprobs import LogprobWriter, PlacedLogprobs
from jaxserve.protocol.responses import TokenLogprob
from jaxserve.protocol.responses_api_objects import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    ContentPartEvent,
    OutputFunctionCall,
    OutputItem,
    OutputItemEvent,
    OutputMessage,
    OutputText,
    ResponseEvent,
    ResponseStatus,
    TextDeltaEvent,
    TextDoneEvent,
)
from jaxserve.protocol.tools import CallFinder, FoundCall, FoundCalls, ToolUse

_PIECE = re.compile(r"[^}\])>]*[}\])>]|[^}\])>]+")  # calls end with one of these: what comes before one, and after it


class OutputItems:
    """Messages and calls in the order in which the model writes them: the same however the text is cut into pieces.

    Without tools there is one message, which opens with the first piece of text, even an empty one.

    Attributes:
        items: those that are complete.
        numbers: of events, for all that tell of this answer.
    """

    def __init__(self, use: ToolUse | None, writer: LogprobWriter | None = None) -> None:
        self.items: list[OutputItem] = []
        self.numbers = itertools.count()
        self._finder: CallFinder | None = use.find_calls() if use else None
        self._message: str | None = None  # the id of the open one
        self._texts: list[str] = []
        self._writer = writer
        self._logprobs: list[PlacedLogprobs] = []

    def push(self, text: str, logprobs: Sequence[PlacedLogprobs]) -> Iterator[ResponseEvent]:
        """Takes the next piece of text. Log probabilities go with answers without tools only."""
        if self._finder is None:
            yield from self._open()
            yield from self._text(text, logprobs)
            return
        finder = self._finder
        yield from self._found(finder.push(piece, is_last=False) for piece in _PIECE.findall(text))

    def finish(self, status: ResponseStatus) -> Iterator[ResponseEvent]:
        """The text has ended; its last message has this status."""
        if self._finder is not None:
            yield from self._found([self._finder.push("", is_last=True)])
        if not self.items or self._message is not None:
            yield from self._open()
            yield from self._close(status)

    def _found(self, found: Iterator[FoundCalls] | list[FoundCalls]) -> Iterator[ResponseEvent]:
        texts: list[str] = []
        for part in found:
            texts.append(part.content)
            if part.calls:
                yield from self._text("".join(texts), [])
                texts.clear()
                yield from self._close("completed")
                for call in part.calls:
                    yield from self._call(call)
        yield from self._text("".join(texts), [])

    def _text(self, text: str, logprobs: Sequence[PlacedLogprobs]) -> Iterator[ResponseEvent]:
        if text or logprobs:
            yield from self._open()
            self._texts.append(text)
            self._logprobs += logprobs
            told = self._written(logprobs)
            yield self._part_event(TextDeltaEvent, "output_text.delta", delta=text, logprobs=told)

    def _written(self, logprobs: Sequence[PlacedLogprobs]) -> Sequence[TokenLogprob]:
        return self._writer.content(logprobs) if self._writer else []

    def _open(self) -> Iterator[ResponseEvent]:
        if self._message is None:
            self._message = new_id("msg")
            item = OutputMessage(id=self._message, status="in_progress", content=[])
            yield self._item_event("added", item)
            yield self._part_event(ContentPartEvent, "content_part.added", part=OutputText(text=""))

    def _close(self, status: ResponseStatus) -> Iterator[ResponseEvent]:
        if self._message is None:
            return
        part = OutputText(text="".join(self._texts), logprobs=self._written(self._logprobs))
        yield self._part_event(TextDoneEvent, "output_text.done", text=part.text, logprobs=part.logprobs)
        yield self._part_event(ContentPartEvent, "content_part.done", part=part)
        yield from self._done(OutputMessage(id=self._message, status=status, content=[part]))
        self._message, self._texts, self._logprobs = None, [], []

    def _call(self, call: FoundCall) -> Iterator[ResponseEvent]:
        item = OutputFunctionCall(id=new_id("fc"), status="in_progress", call_id=call.id, name=call.name, arguments="")
        place: dict[str, Any] = {"item_id": item.id, "output_index": len(self.items)}
        yield self._item_event("added", item)
        yield ArgumentsDeltaEvent(
            sequence_number=next(self.numbers),
            type="response.function_call_arguments.delta",
            **place,
            delta=call.arguments,
        )
        yield ArgumentsDoneEvent(
            sequence_number=next(self.numbers),
            type="response.function_call_arguments.done",
            **place,
            name=call.name,
            arguments=call.arguments,
        )
        yield from self._done(item.model_copy(update={"status": "completed", "arguments": call.arguments}))

    def _done(self, item: OutputItem) -> Iterator[ResponseEvent]:
        yield self._item_event("done", item)
        self.items.append(item)

    def _item_event(self, kind: str, item: OutputItem) -> ResponseEvent:
        return OutputItemEvent(
            sequence_number=next(self.numbers),
            type=f"response.output_item.{kind}",
            output_index=len(self.items),
            item=item,
        )

    def _part_event(
        self, event: type[ContentPartEvent | TextDeltaEvent | TextDoneEvent], kind: str, **fields: Any
    ) -> ResponseEvent:
        place = {"item_id": self._message, "output_index": len(self.items), "content_index": 0}
        return event(sequence_number=next(self.numbers), type=f"response.{kind}", **place, **fields)
