"""Chunks that only bring text are written without a model in between, and read the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.protocol.parsing import parse_chat_request, parse_completion_request
from jaxserve.protocol.responses import Completion, CompletionChoice
from jaxserve.protocol.text_chunks import TextChunks, WrittenChunk
from tests.fakes import FakeEngine, fake_service, say

ODD = 'a "quoted" \\ back\u2028slash\n\t\x00\x1f\x7f \u00e9 \U0001f600 </script>'
USER = {"role": "user", "content": "hi"}


def a_chunk(index: int, text: str) -> Completion:
    choices = [CompletionChoice(index=index, text=text, logprobs=None, finish_reason=None)]
    return Completion(
        id="cmpl-1", object="text_completion", created=1, model='a "model"', choices=choices, system_fingerprint=None
    )


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 3))
def test_any_text_is_written_as_a_model_writes_it(text: str, index: int) -> None:
    chunks = TextChunks(a_chunk)
    chunks.chunk(index, "once before")
    assert chunks.chunk(index, text).json == a_chunk(index, text).to_json()


@pytest.mark.anyio
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"logprobs": True, "top_logprobs": 1},
        {"stop": ["</s"]},
    ],
)
async def test_a_chat_s_stream_is_the_same(fields: dict[str, Any]) -> None:
    service = fake_service(FakeEngine(say(ODD, "the other")))
    request = parse_chat_request({"messages": [USER], "stream": True, **fields})
    objects = [chunk.to_json() async for chunk in await service.chat_completion_stream(request)]
    sent = [chunk async for chunk in await service.chat_completion_stream(request, lazy=True)]
    assert in_order(objects) == in_order([json_of(chunk) for chunk in sent])
    always = "continuous_usage_stats" in fields.get("stream_options", {})
    assert any(isinstance(chunk, WrittenChunk) for chunk in sent) == (not always and "logprobs" not in fields)
    service.close()


@pytest.mark.anyio
@pytest.mark.parametrize("fields", [{}, {"prompt": ["one", "two"]}, {"echo": True}, {"logprobs": 1}])
async def test_a_completion_s_stream_is_the_same(fields: dict[str, Any]) -> None:
    service = fake_service(FakeEngine(say(ODD)))
    request = parse_completion_request({"prompt": "hi", "stream": True, "max_tokens": 200, **fields})
    objects = [chunk.to_json() async for chunk in await service.completion_stream(request)]
    sent = [json_of(chunk) async for chunk in await service.completion_stream(request, lazy=True)]
    assert in_order(objects) == in_order(sent)
    service.close()


def json_of(chunk: Any) -> str:
    return chunk.json if isinstance(chunk, WrittenChunk) else chunk.to_json()


def in_order(chunks: list[str]) -> list[Any]:
    """What was said, without the answer's own name and time; choices side by side may take turns differently."""
    parsed = [{**json.loads(chunk), "id": "", "created": 0} for chunk in chunks]
    return sorted(parsed, key=lambda chunk: chunk["choices"][0]["index"] if chunk["choices"] else 1000)
