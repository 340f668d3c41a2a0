"""A chat's backend over the same service that the HTTP server uses."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from jaxserve.cli.chat_session import AnswerPiece, ChatError, Message
from jaxserve.cli.chat_settings import ChatSettings
from jaxserve.engine.draft_stats import SpeculativeStats
from jaxserve.protocol.errors import ApiError, BadRequestError
from jaxserve.protocol.parsing import parse_chat_request
from jaxserve.protocol.requests import ChatCompletionRequest
from jaxserve.protocol.service import OpenAIService


class ServiceBackend:
    """Answers through an `OpenAIService`, in this process."""

    def __init__(self, service: OpenAIService) -> None:
        self._service = service

    @property
    def max_model_len(self) -> int:
        return self._service.engine.max_model_len

    def count_tokens(self, messages: Sequence[Message]) -> int:
        try:
            return self._service.count_prompt_tokens(_request(messages))
        except BadRequestError as error:
            if error.code == "context_length_exceeded":  # refused before it was counted
                return self.max_model_len + 1
            raise ChatError(error.message) from error

    async def stream(self, messages: Sequence[Message], settings: ChatSettings) -> AsyncGenerator[AnswerPiece, None]:
        try:
            chunks = await self._service.chat_completion_stream(_request(messages, settings))
            try:
                async for chunk in chunks:
                    choice = chunk.choices[0] if chunk.choices else None
                    yield AnswerPiece(
                        text=(choice.delta.content or "") if choice else "",
                        prompt_tokens=chunk.usage.prompt_tokens if chunk.usage else None,
                        generated_tokens=chunk.usage.completion_tokens if chunk.usage else None,
                        finish_reason=choice.finish_reason if choice else None,
                    )
            finally:
                await chunks.aclose()
        except ApiError as error:
            if self._service.engine.failure is not None:  # no further question can be answered
                raise
            raise ChatError(error.message) from error

    def metrics(self) -> Mapping[str, object]:
        stats = dataclasses.asdict(self._service.engine.stats())  # pyright: ignore[reportArgumentType]
        for table in ("step_times", "host_times"):  # for dashboards
            del stats[table]
        return stats

    def drafted(self) -> SpeculativeStats | None:
        return self._service.engine.stats().speculative


def _request(messages: Sequence[Message], settings: ChatSettings | None = None) -> ChatCompletionRequest:
    """Passes the same checks as a client's request. Raises BadRequestError."""
    fields: dict[str, Any] = {} if settings is None else dataclasses.asdict(settings) | {"stop": list(settings.stop)}
    stream_options = {"include_usage": True, "continuous_usage_stats": True}
    return parse_chat_request({"messages": list(messages), "stream": True, "stream_options": stream_options, **fields})
