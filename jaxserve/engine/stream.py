"""One request's outputs on their way from the engine to whoever reads them, at the reader's pace."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable

from jaxserve.engine.request import RequestOutput, TokenLogprobs


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
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def abort(self, index: int | None = None) -> None:
        """Ends the request, or one choice: its last output has finish_reason "abort", unless it finished before."""
        self._abort(self.request_id, index)

    async def aclose(self) -> None:
        """Aborts whatever still runs; what was not read is dropped."""
        if self._unfinished:
            self._unfinished = 0
            self._pending.clear()
            self._arrived.set()
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
        self._arrived.set()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    async def __anext__(self) -> RequestOutput:
        while self._unfinished:
            if not self._pending:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            output = self._pending.pop(next(iter(self._pending)))
            if isinstance(output, _JoinedOutput):
                output = output.join()
            if output.finish_reason is not None:
                self._unfinished -= 1
            return output
        raise StopAsyncIteration


class _JoinedOutput:
    """Several outputs of one choice as one, kept in lists that grow: adding costs the same however much waits."""

    def __init__(self, first: RequestOutput, second: RequestOutput) -> None:
        self._first = first
        self._last = second
        self._token_ids = [*first.token_ids, *second.token_ids]
        self._logprobs: list[TokenLogprobs] = [*(first.logprobs or ()), *(second.logprobs or ())]

    def add(self, output: RequestOutput) -> None:
        self._last = output
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs or ()

    def join(self) -> RequestOutput:
        """All of it; how it ended, and when, are the last output's."""
        return dataclasses.replace(
            self._last,
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs) or None,
            prompt_logprobs=self._first.prompt_logprobs,
            num_cached_tokens=max(self._first.num_cached_tokens, self._last.num_cached_tokens),
        )
