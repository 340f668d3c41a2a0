"""The `openai` package as the client: what it measures is what its users see, at its own cost for each chunk."""

from __future__ import annotations

import time
from typing import Any

import openai

from jaxserve.bench.endpoint import EndpointOptions
from jaxserve.bench.event_stream import AnswerReader, error_message

_KNOWN = ("model", "max_tokens", "temperature", "seed", "stream_options", "response_format", "prompt", "messages")


class OpenAIClient:
    """Streams through `openai.AsyncOpenAI`."""

    def __init__(self, options: EndpointOptions) -> None:
        self._client = openai.AsyncOpenAI(
            base_url=f"{options.root}/v1", api_key=options.api_key or "none", max_retries=0, timeout=None
        )

    async def ask(self, path: str, body: dict[str, Any], reader: AnswerReader) -> str | None:
        known = {name: value for name, value in body.items() if name in _KNOWN}
        extra = {name: value for name, value in body.items() if name not in _KNOWN and name != "stream"}
        routes = self._client.chat.completions if path.endswith("/chat/completions") else self._client.completions
        create: Any = routes.create
        try:
            async for chunk in await create(**known, stream=True, extra_body=extra):
                now = time.perf_counter()
                for choice in chunk.choices:
                    text = choice.text if hasattr(choice, "text") else choice.delta.content
                    reader.note(now, shows=bool(text), listed=0, ends=bool(choice.finish_reason))
                if chunk.usage is not None:
                    reader.count(chunk.usage.model_dump())
        except openai.APIStatusError as failure:
            return f"status {failure.status_code}: {error_message(failure.body)}" if failure.body else str(failure)
        except openai.OpenAIError as failure:
            return str(failure)
        return None

    async def close(self) -> None:
        await self._client.close()
