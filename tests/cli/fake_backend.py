"""A chat backend without a model, and a program that chats with it, for tests that need a real terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence

from jaxserve.cli.chat import talk
from jaxserve.cli.chat_session import AnswerPiece, ChatError, ChatSession, Message
from jaxserve.cli.chat_settings import ChatSettings
from jaxserve.engine.draft_stats import SpeculativeStats


class FakeBackend:
    """Repeats what it is told, a word at a time; a word counts as a token.

    "forever" is answered until someone stops it, "empty" with no text, "refuse" with an error.
    """

    def __init__(self, max_model_len: int = 100) -> None:
        self.max_model_len = max_model_len
        self.prompts: list[list[Message]] = []
        self.settings: list[ChatSettings] = []
        self.closed_streams = 0

    def count_tokens(self, messages: Sequence[Message]) -> int:
        return sum(len(message["content"].split()) for message in messages)

    async def stream(self, messages: Sequence[Message], settings: ChatSettings) -> AsyncGenerator[AnswerPiece, None]:
        self.prompts.append(list(messages))
        self.settings.append(settings)
        question = messages[-1]["content"]
        prompt_tokens = self.count_tokens(messages)
        try:
            if question == "refuse":
                raise ChatError("the template refuses this")
            words = [] if question == "empty" else ["You", "said:", *question.split(" ")]
            generated = 0
            for word in words:
                generated += 1
                yield AnswerPiece(f"{word} ", prompt_tokens, generated)
                await asyncio.sleep(0)
            while question == "forever":
                generated += 1
                yield AnswerPiece("more ", prompt_tokens, generated)
                await asyncio.sleep(0.01)
            if question == "hang":
                await asyncio.Event().wait()
            yield AnswerPiece("", prompt_tokens, generated, "stop")
        finally:
            self.closed_streams += 1

    def metrics(self) -> Mapping[str, object]:
        return {"num_running": 0, "num_pages": 7}

    def drafted(self) -> SpeculativeStats | None:
        return None


if __name__ == "__main__":
    asyncio.run(talk(ChatSession(FakeBackend(), ChatSettings()), "Hello from the fake."))
    sys.exit(0)
