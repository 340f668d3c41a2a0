"""A request's outputs at the pace of whoever reads them: what waits is joined, and nothing is lost."""

from __future__ import annotations

import asyncio

import pytest

from jaxserve.engine.request import RequestOutput, TokenLogprobs
from jaxserve.engine.stream import MAX_JOINED_TOKENS, GenerationStream

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def new_stream(num_choices: int = 1) -> GenerationStream:
    return GenerationStream("request-0", num_choices, lambda request_id, index: None)


async def test_a_reader_that_keeps_up_gets_every_step() -> None:
    stream = new_stream()
    for token in range(3):
        stream.deliver(RequestOutput("request-0", 0, (token,)))
        assert (await anext(stream)).token_ids == (token,)
    stream.deliver(RequestOutput("request-0", 0, (), finish_reason="abort"))
    assert [output.finish_reason async for output in stream] == ["abort"]


async def test_what_a_slow_reader_left_waiting_comes_joined() -> None:
    stream = new_stream(2)
    for token in range(200):
        for index in range(2):
            last = token == 199
            logprobs = (TokenLogprobs(token, -float(token), ()),)
            stream.deliver(
                RequestOutput(
                    "request-0", index, (token,), "length" if last else None, logprobs=logprobs, time=float(token)
                )
            )
    outputs = [output async for output in stream]
    assert len(outputs) == 4  # of each choice its first output, and the rest
    for index in range(2):
        first, rest = (output for output in outputs if output.index == index)
        assert (first.token_ids, first.time, first.finish_reason) == ((0,), 0.0, None)
        assert rest.token_ids == tuple(range(1, 200))
        assert [entry.logprob for entry in rest.logprobs or ()] == [-float(token) for token in range(1, 200)]
        assert (rest.time, rest.finish_reason) == (199.0, "length")


async def test_a_long_backlog_comes_in_pieces_that_take_turns() -> None:
    stream = new_stream(2)
    count = 3 * MAX_JOINED_TOKENS
    for token in range(count):
        for index in range(2):
            is_last = token == count - 1
            stop = {"finish_reason": "stop", "stop_token_id": token} if is_last else {}
            stream.deliver(RequestOutput("request-0", index, (token,), **stop))  # type: ignore[arg-type]
    outputs = [output async for output in stream]
    assert [output.index for output in outputs] == [0, 1] * 4
    assert max(len(output.token_ids) for output in outputs) == MAX_JOINED_TOKENS
    for index in range(2):
        mine = [output for output in outputs if output.index == index]
        assert [token for output in mine for token in output.token_ids] == list(range(count))
        assert [output.finish_reason for output in mine] == [None, None, None, "stop"]
        assert [output.stop_token_id for output in mine] == [None, None, None, count - 1]


async def test_how_a_choice_ended_is_the_last_output_s() -> None:
    stream = new_stream()
    stream.deliver(RequestOutput("request-0", 0, (1,), num_cached_tokens=8))
    stream.deliver(RequestOutput("request-0", 0, (2,), num_cached_tokens=8))
    stream.deliver(RequestOutput("request-0", 0, (3,), "stop", stop_token_id=3))
    first, rest = [output async for output in stream]
    assert first.logprobs is rest.logprobs is None
    assert (first.num_cached_tokens, rest.token_ids, rest.stop_token_id) == (8, (2, 3), 3)


async def test_closing_wakes_the_reader_and_drops_what_comes() -> None:
    aborted: list[tuple[str, int | None]] = []
    stream = GenerationStream("request-7", 1, lambda request_id, index: aborted.append((request_id, index)))
    reader = asyncio.create_task(anext(stream, None))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await stream.aclose()
    assert await reader is None
    stream.deliver(RequestOutput("request-7", 0, (1,)))
    assert [output async for output in stream] == []
    await stream.aclose()
    assert aborted == [("request-7", None)]
