"""docs/api.md names every field: a client looks there for what one does, or why it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from jaxserve.protocol.requests import (
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    ChatCompletionRequest,
    CompletionRequest,
    StreamOptions,
)
from jaxserve.protocol.responses_api_requests import UNSUPPORTED_RESPONSES, ResponsesRequest
from jaxserve.protocol.tokenize_requests import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


@pytest.mark.parametrize(
    "request_type",
    [
        ChatCompletionRequest, CompletionRequest, StreamOptions, ResponsesRequest, TokenizeTextRequest,
        TokenizeChatRequest, DetokenizeRequest,
    ],
)  # fmt: skip
def test_fields_that_take_effect(request_type: type[BaseModel]) -> None:
    assert [field for field in request_type.model_fields if f"`{field}" not in PAGE] == []


def test_fields_that_are_refused() -> None:
    refused = {*UNSUPPORTED_CHAT, *UNSUPPORTED_COMPLETION, *UNSUPPORTED_RESPONSES}
    assert [field for field in sorted(refused) if f"`{field}" not in PAGE and not field.startswith("guided_")] == []
