"""Text of one prompt's choices while the engine makes it, and of several prompts side by side."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from jaxserve.engine.request import RequestOutput, TokenLogprobs
from jaxserve.protocol.choice_text import ChoiceText, TextDelta
from jaxserve.protocol.course import CourseTimer
from jaxserve.protocol.engine_protocol import TokenStream
from jaxserve.protocol.errors import ApiError, BadRequestError, InternalServerError, from_error_output
from jaxserve.protocol.observer import Outcome, RequestObserver

logger = logging.getLogger(__name__)


class TextGeneration:
    """A submitted prompt. Iterate `deltas` once, and call `aclose` whatever happens: it ends what still runs.

    Attributes:
        prompt_tokens, completion_tokens, cached_tokens: so far; final once `deltas` has ended.
        choices: what becomes of each, by the engine's index.
        prompt_logprobs: of each prompt token, if they were asked for; there from the first delta on.
    """

    def __init__(
        self,
        stream: TokenStream,
        choices: Sequence[ChoiceText],
        *,
        prompt_tokens: int,
        observer: RequestObserver,
        awaits_prompt_logprobs: bool = False,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.choices = choices
        self.prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
        self._awaits_prompt = awaits_prompt_logprobs
        self._held: list[RequestOutput] = []
        self._stream = stream
        self._timer = CourseTimer(observer)
        self._request_id = observer.request_id
        self._failed = False
        self._closed = False

    @property
    def completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    async def deltas(self) -> AsyncGenerator[TextDelta]:
        """One delta for each output of the engine, until every choice has finished.

        Raises:
            InternalServerError: the engine failed this request; UnavailableError: and trying again makes sense.
            BadRequestError: its grammar became too complex on the way.
        """
        try:
            async for received in self._stream:
                for output in self._ready(received):
                    choice = self.choices[output.index]
                    if choice.finish_reason is not None:  # tokens launched before its stop string was seen
                        continue
                    self._check(output)
                    delta = self._push(choice, output)
                    yield delta
                    if delta.finish_reason is not None and all(choice.finish_reason for choice in self.choices):
                        return
            error = InternalServerError("the engine ended this answer before it was complete", code="engine_error")
            raise self._fault(error, "its outputs ended before its choices")
        except Exception:
            self._failed = True
            raise
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Ends whatever still runs in the engine. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        unfinished: Outcome = "error" if self._failed else "abort"
        outcomes: list[Outcome] = [choice.finish_reason or unfinished for choice in self.choices]
        self._timer.finish(
            outcomes,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
        )
        await self._stream.aclose()

    def _ready(self, output: RequestOutput) -> Sequence[RequestOutput]:
        """The outputs that may be told; none before that with the prompt's log probabilities, which begin an echo."""
        if not self._awaits_prompt:
            return (output,)
        self._check(output)
        self._held.append(output)
        if output.prompt_logprobs is None:
            return ()
        self.prompt_logprobs = output.prompt_logprobs
        self._awaits_prompt = False
        held, self._held = self._held, []
        return held

    def _push(self, choice: ChoiceText, output: RequestOutput) -> TextDelta:
        if output.index == 0:  # the others find what it has computed, which nobody had before
            self.cached_tokens = output.num_cached_tokens
        self._timer.take(output)
        delta = choice.push(output)
        if delta.finish_reason is not None and output.finish_reason is None:
            self._stream.abort(output.index)
        return delta

    def _check(self, output: RequestOutput) -> None:
        if output.finish_reason == "error":
            error = from_error_output(output)
            raise error if isinstance(error, BadRequestError) else self._fault(error, output.error)
        if output.finish_reason == "abort":
            error = InternalServerError("this request was aborted before its answer was complete", code="aborted")
            raise self._fault(error, "aborted, and not by its client")

    def _fault(self, error: ApiError, detail: str | None) -> ApiError:
        """The error, with the id that its client finds it under in the log; what happened is told there alone."""
        request_id = self._request_id
        logger.error("request %s failed; in the engine %s: %s", request_id or "-", self._stream.request_id, detail)
        if request_id is None:
            return error
        message = f"{error.message}; the server's log says more under request id {request_id}"
        return type(error)(message, param=error.param, code=error.code)


async def merged_deltas(generations: Sequence[TextGeneration]) -> AsyncGenerator[TextDelta]:
    """Deltas of several prompts in the order of their arrival. The first failure ends them all."""
    if len(generations) == 1:
        async with aclosing(generations[0].deltas()) as deltas:
            async for delta in deltas:
                yield delta
        return
    queue: asyncio.Queue[TextDelta | BaseException | None] = asyncio.Queue(maxsize=len(generations))
    tasks = [asyncio.create_task(_pump(generation, queue)) for generation in generations]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(generation: TextGeneration, queue: asyncio.Queue[TextDelta | BaseException | None]) -> None:
    try:
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                await queue.put(delta)
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
    finally:
        await generation.aclose()
