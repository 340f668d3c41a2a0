"""One request's outputs on their way from the engine to whoever reads them, at the reader's pace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from jaxserve.engine.request import RequestOutput, TokenLogprobs

MAX_JOINED_TOKENS = 256  # of one output: making text of them holds other streams up for a millisecond or so


class GenerationStream(AsyncIterator[RequestOutput]):
    """Outputs of one request as they come, all choices interleaved; ends when every choice has finished.

    A reader that is slower than the engine gets several steps' tokens of a choice in one output, so that what waits here
    never is more than the tokens themselves, and reading catches up in one go. A choice's first output stays by itself:
    its time is the time to first token.

    Args:
        abort: ends the request (index None) or one choice of it.
    """

    def __init__(self, request_id: str, num_choices: int, abort: Callable[[str, int | None], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._unfinished = num_choices
        self._started: set[int] = set()
        self._pending: dict[tuple[int, bool], RequestOutput | _JoinedOutput] = {}  # by choice, and whether it had begun
        self._waiter: asyncio.Future[None] | None = None  # of the reader, while there is nothing to read
        self._loop = asyncio.get_running_loop()

    def abort(self, index: int | None = None) -> None:
        """Ends the request, or one choice: its last output has finish_reason "abort", unless it finished before."""
        self._abort(self.request_id, index)

    async def aclose(self) -> None:
        """Aborts whatever still runs; what was not read is dropped."""
        if self._unfinished:
            self._unfinished = 0
            self._pending.clear()
            self._wake()
            self.abort()

    def deliver(self, output: RequestOutput) -> None:
        """Called by the client on the stream's event loop."""
        if not self._unfinished:
            return
        key = (output.index, output.index in self._started)
        self._started.add(output.index)
        pending = self._pending.get(key)
        if pending is None:
            self._pending[key] = output
        elif isinstance(pending, _JoinedOutput):
            pending.add(output)
        else:
            self._pending[key] = _JoinedOutput(pending, output)
        self._wake()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    async def __anext__(self) -> RequestOutput:
        while self._unfinished:
            if not self._pending:
                self._waiter = self._loop.create_future()
                await self._waiter
                continue
            output = self._take()
            if output.finish_reason is not None:
                self._unfinished -= 1
            return output
        raise StopAsyncIteration

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> RequestOutput:
        key = next(iter(self._pending))
        pending = self._pending.pop(key)
        if not isinstance(pending, _JoinedOutput):
            return pending
        output, is_all = pending.take()
        if not is_all:
            self._pending[key] = pending  # behind those of the other choices
        return output


class _JoinedOutput:
    """Several outputs of one choice as one, kept in lists that grow: adding costs the same however much waits."""

    def __init__(self, first: RequestOutput, second: RequestOutput) -> None:
        self._last = second
        self._prompt_logprobs = first.prompt_logprobs
        self._token_ids = [*first.token_ids, *second.token_ids]
        self._logprobs: list[TokenLogprobs] = [*(first.logprobs or ()), *(second.logprobs or ())]

    def add(self, output: RequestOutput) -> None:
        self._last = output
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs or ()

    def take(self) -> tuple[RequestOutput, bool]:
        """The next tokens, at most `MAX_JOINED_TOKENS`, and whether that was all; the last of them say how it ended."""
        is_all = len(self._token_ids) <= MAX_JOINED_TOKENS
        output = self._last._replace(
            token_ids=tuple(self._token_ids[:MAX_JOINED_TOKENS]),
            logprobs=tuple(self._logprobs[:MAX_JOINED_TOKENS]) or None,
            prompt_logprobs=self._prompt_logprobs,
        )
        if not is_all:
            output = output._replace(finish_reason=None, stop_token_id=None, error=None)
            self._prompt_logprobs = None
            del self._token_ids[:MAX_JOINED_TOKENS], self._logprobs[:MAX_JOINED_TOKENS]
        return output, is_all
