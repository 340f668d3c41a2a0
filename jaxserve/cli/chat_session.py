"""A chat without a screen: history that fits the context, answers that can be stopped, numbers about the last one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxserve.cli.chat_settings import ChatSettings
from jaxserve.engine.draft_stats import SpeculativeStats
from jaxserve.wording import plural

Message = dict[str, str]  # role and content, as chat templates take them

SHARE_OF_CONTEXT_FOR_ANSWER = 4  # a quarter is kept free when max_tokens does not say how much is needed


class ChatError(Exception):
    """The question cannot be answered; the chat goes on without it. The message is for people."""


@dataclass(frozen=True)
class AnswerPiece:
    """Some more of an answer.

    Attributes:
        text: new text; may be empty.
        prompt_tokens, generated_tokens: so far, where the piece tells.
        finish_reason: "stop" or "length" with the last piece.
    """

    text: str
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    finish_reason: str | None = None


class ChatBackend(Protocol):
    """What answers: a model with its chat template."""

    @property
    def max_model_len(self) -> int: ...

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Length of the prompt that the messages make; may stop counting past max_model_len.

        Raises ChatError if the chat template refuses the messages.
        """
        ...

    def stream(self, messages: Sequence[Message], settings: ChatSettings) -> AsyncGenerator[AnswerPiece, None]:
        """Closing the generator ends the generation. Raises ChatError."""
        ...

    def metrics(self) -> Mapping[str, object]:
        """Numbers of the engine by name."""
        ...

    def drafted(self) -> SpeculativeStats | None:
        """What was drafted since the start; None: nothing ever is."""
        ...


@dataclass(frozen=True)
class Exchange:
    """A question that was answered."""

    question: str
    answer: str


@dataclass(frozen=True)
class AnswerStats:
    """Numbers about an answer. Times in seconds.

    Attributes:
        time_to_first_token: from the question to the first piece of text; None if none came.
        decode_time: from the first piece to the last.
        drafted: for this answer; None: nothing ever is.
    """

    prompt_tokens: int
    generated_tokens: int
    time_to_first_token: float | None
    decode_time: float
    finish_reason: str
    forgotten_exchanges: int
    drafted: SpeculativeStats | None = None

    def text(self) -> str:
        lines = [
            f"prompt: {self.prompt_tokens} {plural('token', self.prompt_tokens)}",
            f"answer: {self.generated_tokens} {plural('token', self.generated_tokens)} ({self.finish_reason})",
        ]
        if self.time_to_first_token is not None:
            lines.append(f"time to first token: {self.time_to_first_token * 1000:.0f} ms")
        if self.generated_tokens > 1 and self.decode_time > 0:
            rate = (self.generated_tokens - 1) / self.decode_time
            lines.append(f"decode: {rate:.1f} tokens/s ({1000 / rate:.1f} ms per token)")
        if self.drafted is not None:
            lines += filter(None, (self.drafted.kept, self.drafted.kept_by_position))
        return "\n".join(lines)


class ChatSession:
    """The state of one conversation."""

    def __init__(self, backend: ChatBackend, settings: ChatSettings, system_prompt: str | None = None) -> None:
        self.backend = backend
        self.settings = settings
        self.system_prompt = system_prompt
        self.exchanges: tuple[Exchange, ...] = ()
        self.last_stats: AnswerStats | None = None

    def reset(self) -> None:
        """Forgets all questions and answers; settings and system prompt stay."""
        self.exchanges = ()
        self.last_stats = None

    def messages(self, exchanges: Sequence[Exchange], question: str) -> list[Message]:
        messages = [{"role": "system", "content": self.system_prompt}] if self.system_prompt is not None else []
        for exchange in exchanges:
            messages.append({"role": "user", "content": exchange.question})
            messages.append({"role": "assistant", "content": exchange.answer})
        return [*messages, {"role": "user", "content": question}]

    def fitting_exchanges(self, question: str) -> tuple[tuple[Exchange, ...], int]:
        """The newest exchanges that leave room for question and answer, and the tokens of the prompt they make.

        Raises:
            ChatError: not even the question alone fits.
        """
        context = self.backend.max_model_len
        wanted = self.settings.max_tokens or max(1, context // SHARE_OF_CONTEXT_FOR_ANSWER)
        kept = self.exchanges
        while True:
            length = self.backend.count_tokens(self.messages(kept, question))
            if length + wanted <= context:
                return kept, length
            if not kept:
                break
            kept = kept[1:]
        if length >= context:
            raise ChatError(f"the message is too long: with it alone, the prompt fills the context of {context} tokens")
        return kept, length

    async def answer(self, question: str, show: Callable[[str], None], interrupted: asyncio.Event) -> AnswerStats:
        """Asks, and shows the answer piece by piece until it ends or `interrupted` is set.

        A stopped answer is remembered as far as it came; a question without an answer is not.

        Raises:
            ChatError: refused, or failed on the way.
        """
        kept, prompt_tokens = self.fitting_exchanges(question)
        forgotten = len(self.exchanges) - len(kept)
        text, generated_tokens, finish_reason = "", 0, "interrupted"
        started = time.monotonic()
        first = last = None
        before = self.backend.drafted()
        stream = self.backend.stream(self.messages(kept, question), self.settings)
        try:
            async for piece in _until(interrupted, stream):
                if piece.text:
                    last = time.monotonic()
                    first = last if first is None else first
                    text += piece.text
                    show(piece.text)
                prompt_tokens = prompt_tokens if piece.prompt_tokens is None else piece.prompt_tokens
                generated_tokens = generated_tokens if piece.generated_tokens is None else piece.generated_tokens
                finish_reason = finish_reason if piece.finish_reason is None else piece.finish_reason
        finally:
            await stream.aclose()
        self.exchanges = (*kept, Exchange(question, text)) if text else kept
        drafted = self.backend.drafted()
        self.last_stats = AnswerStats(
            prompt_tokens=prompt_tokens,
            generated_tokens=generated_tokens,
            time_to_first_token=None if first is None else first - started,
            decode_time=0.0 if first is None or last is None else last - first,
            finish_reason=finish_reason,
            forgotten_exchanges=forgotten,
            drafted=None if drafted is None or before is None else drafted.since(before),
        )
        return self.last_stats


async def _until(interrupted: asyncio.Event, stream: AsyncGenerator[AnswerPiece, None]) -> AsyncIterator[AnswerPiece]:
    """The stream's items, ending early when `interrupted` is set, even while the next item is awaited."""
    stop = asyncio.ensure_future(interrupted.wait())
    try:
        while True:
            following = asyncio.ensure_future(anext(stream, None))
            await asyncio.wait({following, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                following.cancel()
                await asyncio.wait({following})
                return
            piece = following.result()
            if piece is None:
                return
            yield piece
    finally:
        stop.cancel()
