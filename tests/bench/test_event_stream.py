"""Counting the tokens of an event stream."""

import json

import pytest

from jaxserve.bench.event_stream import AnswerReader


def event(**chunk: object) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def text(value: str, **fields: object) -> bytes:
    return event(choices=[{"index": 0, "text": value, "finish_reason": None, **fields}])


END = event(choices=[{"index": 0, "text": "", "finish_reason": "length"}])
USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 12})
DONE = b"data: [DONE]\n\n"


def test_usage_counts_tokens_however_many_a_chunk_holds() -> None:
    reader = AnswerReader()
    for now, data in enumerate([text("one two three"), text(" four"), END, USAGE, DONE]):
        reader.feed(now, data)
    assert (reader.first_time, reader.last_time) == (0, 2)  # the usage comes after the last token
    assert (reader.prompt_tokens, reader.output_tokens, reader.first_count) == (7, 12, 1)
    assert reader.complete and reader.error is None


@pytest.mark.parametrize(
    "fields", [{"token_ids": [1, 2, 3]}, {"logprobs": {"tokens": ["a", "b", "c"]}}], ids=["token_ids", "logprobs"]
)
def test_listed_tokens_are_counted_without_usage(fields: dict[str, object]) -> None:
    reader = AnswerReader()
    reader.feed(1.0, text("abc", **fields) + text("de", token_ids=[4, 5]) + DONE)
    assert reader.output_tokens == 5
    assert reader.first_count == 3


def test_a_token_without_text_counts_where_tokens_are_listed() -> None:
    reader = AnswerReader()
    reader.feed(1.0, text("", token_ids=[200]))
    assert reader.first_time == 1.0
    assert reader.output_tokens == 1


def test_the_chunk_that_opens_a_chat_answer_is_no_token() -> None:
    reader = AnswerReader()
    reader.feed(
        1.0, event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
    )
    assert reader.first_time is None
    reader.feed(2.0, event(choices=[{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}]))
    assert reader.first_time == 2.0


def test_a_chunk_that_holds_nothing_is_not_the_last_token() -> None:
    reader = AnswerReader()
    reader.feed(1.0, text("one"))
    reader.feed(2.0, text("") + USAGE + DONE)
    assert (reader.last_time, reader.events) == (1.0, 1)


def test_times_between_chunks_leave_out_what_holds_no_token() -> None:
    reader = AnswerReader()
    for now, data in (
        (1.0, text("one")),
        (1.25, text("two")),
        (1.3, text("")),
        (1.5, text("three")),
        (1.6, END + USAGE),
    ):
        reader.feed(now, data)
    assert reader.gaps_ms == [250.0, 250.0]


def test_events_may_come_in_any_pieces() -> None:
    stream = b": a comment\n\n" + text("one").replace(b"\n\n", b"\r\n\r\n") + END + USAGE + DONE
    reader = AnswerReader()
    for position in range(len(stream)):
        reader.feed(float(position), stream[position : position + 1])
    assert reader.complete and reader.output_tokens == 12 and reader.events == 2


@pytest.mark.parametrize("payload", [b'{"error": {"message": "out of memory"}}', b"{broken", b"[1]"])
def test_an_event_that_is_no_chunk_is_an_error(payload: bytes) -> None:
    reader = AnswerReader()
    reader.feed(0.0, b"data: " + payload + b"\n\n")
    assert reader.error


def test_what_was_not_counted_by_anyone_is_unknown() -> None:
    reader = AnswerReader()
    reader.feed(0.0, text("one") + DONE)
    assert reader.output_tokens is None
