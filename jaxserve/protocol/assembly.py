"""Responses and stream chunks from text deltas. Chunks of one index, joined, are the text of the whole response."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from jaxserve.protocol.generation import TextGeneration, merged_deltas
from jaxserve.protocol.logprobs import LogprobWriter, PlacedLogprobs
from jaxserve.protocol.responses import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatFinishReason,
    ChatLogprobs,
    ChoiceDelta,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    TextFinishReason,
    Usage,
)
from jaxserve.protocol.text_chunks import TextChunks, WrittenChunk
from jaxserve.protocol.tool_assembly import call_deltas, chat_message
from jaxserve.protocol.tools import ToolUse

WrittenT = TypeVar("WrittenT")
UsageMode = Literal["none", "last", "always"]


@dataclass(frozen=True)
class Echo:
    """A prompt that its choices start with."""

    text: str
    token_ids: Sequence[int]


@dataclass(frozen=True)
class Answer:
    """What a response is made of, streamed or not.

    Attributes:
        generations: one for each prompt, with at least `choices_per_prompt` choices each; of more, the best are kept,
            which only a response that is not streamed can do.
        choices_per_prompt: prompt p has the choices p * choices_per_prompt and following.
        echoes: one for each prompt, where that was asked for.
        logprobs: writes the tokens' log probabilities, if they were asked for.
        prompt_logprobs: writes those of the prompts, beside the choices; not streamed.
        tool_use: how calls of tools are found in the choices; None: their text is told as it is. Chat only.
        usage: none; "last": one chunk at the end; "always": in every chunk as well. Streams only.
        is_sent: it is made for its JSON alone, so chunks that only bring text may be written at once.
    """

    model: str
    generations: Sequence[TextGeneration]
    choices_per_prompt: int
    id: str
    echoes: Sequence[Echo] = ()
    logprobs: LogprobWriter | None = None
    prompt_logprobs: LogprobWriter | None = None
    tool_use: ToolUse | None = None
    usage: UsageMode = "none"
    is_sent: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def total_usage(self) -> Usage:
        """Over all prompts and choices, so far."""
        return Usage.of(
            sum(generation.prompt_tokens for generation in self.generations),
            sum(generation.completion_tokens for generation in self.generations),
            sum(generation.cached_tokens for generation in self.generations),
        )

    async def aclose(self) -> None:
        """Ends whatever still runs in the engine."""
        for generation in self.generations:
            await generation.aclose()


@dataclass
class GatheredChoice:
    """One choice, growing until it is whole."""

    text: str = ""
    finish_reason: TextFinishReason = "stop"
    logprobs: list[PlacedLogprobs] = field(default_factory=list)


def new_id(kind: Literal["chatcmpl", "cmpl", "resp", "msg", "fc"]) -> str:
    return f"{kind}{'_' if kind in ('resp', 'msg', 'fc') else '-'}{uuid.uuid4().hex}"


async def gather(answer: Answer) -> list[GatheredChoice]:
    """The choices of every prompt, whole, by index; without echoes."""
    pieces: list[list[str]] = [[] for generation in answer.generations for _ in generation.choices]
    choices = [GatheredChoice() for _ in pieces]
    try:
        async for delta in merged_deltas(answer.generations):
            pieces[delta.index].append(delta.text)
            choices[delta.index].logprobs += delta.logprobs
            if delta.finish_reason is not None:
                choices[delta.index].finish_reason = delta.finish_reason
    finally:
        await answer.aclose()
    for choice, texts in zip(choices, pieces, strict=True):
        choice.text = "".join(texts)
    return _best(answer, choices)


def _best(answer: Answer, choices: list[GatheredChoice]) -> list[GatheredChoice]:
    """For each prompt the choices that it keeps: of more, those with the highest mean log probability, best first."""
    kept: list[GatheredChoice] = []
    for generation in answer.generations:
        drawn, choices = choices[: len(generation.choices)], choices[len(generation.choices) :]
        ranks = list(range(len(drawn)))
        if len(drawn) > answer.choices_per_prompt:
            means = [choice.total_logprob / max(1, choice.num_tokens) for choice in generation.choices]
            ranks.sort(key=lambda index: -means[index])
        kept += [drawn[index] for index in ranks[: answer.choices_per_prompt]]
    return kept


async def chat_completion(answer: Answer) -> ChatCompletion:
    gathered = await gather(answer)
    logprobs = await _written(answer.logprobs and answer.logprobs.chat, [choice.logprobs for choice in gathered])
    choices: list[ChatChoice] = []
    for index, choice in enumerate(gathered):
        message, reason = chat_message(choice.text, choice.finish_reason, answer.tool_use)
        choices.append(ChatChoice(index=index, message=message, logprobs=logprobs[index], finish_reason=reason))
    prompt_logprobs = {} if answer.prompt_logprobs is None else {"prompt_logprobs": (await _prompts(answer))[0]}
    return ChatCompletion(
        id=answer.id,
        object="chat.completion",
        created=answer.created,
        model=answer.model,
        choices=choices,
        usage=answer.total_usage(),
        system_fingerprint=None,
        **prompt_logprobs,
    )


async def completion(answer: Answer) -> Completion:
    gathered = await gather(answer)
    echoed = [await _echoed(answer, prompt) for prompt in range(len(answer.generations))]
    prompts = [index // answer.choices_per_prompt for index in range(len(gathered))]
    tokens = [(*echoed[prompt], *choice.logprobs) for prompt, choice in zip(prompts, gathered, strict=True)]
    logprobs = await _written(answer.logprobs and answer.logprobs.completion, tokens)
    prompt_logprobs = None if answer.prompt_logprobs is None else await _prompts(answer)
    choices = [
        CompletionChoice(
            index=index,
            text=_echo_text(answer, prompt) + choice.text,
            logprobs=logprobs[index],
            finish_reason=choice.finish_reason,
            **({} if prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs[prompt]}),
        )
        for index, (prompt, choice) in enumerate(zip(prompts, gathered, strict=True))
    ]
    return _completion(answer, choices, usage=answer.total_usage())


async def chat_completion_chunks(answer: Answer) -> AsyncGenerator[ChatCompletionChunk | WrittenChunk]:
    """For each index: its role, its text, its finish reason; then the usage, if it was asked for.

    Nothing is yielded before the engine's first token, so that a failure until then is still an HTTP error.
    """
    opened = False
    use = answer.tool_use
    finders = [use.find_calls() for _ in range(answer.choices_per_prompt)] if use else []
    plain = _plain(answer, lambda index, text: _chat_chunk(answer, index, ChoiceDelta(content=text)))
    async with aclosing(merged_deltas(answer.generations)) as deltas:
        async for delta in deltas:
            if not opened:
                opened = True
                for index in range(answer.choices_per_prompt):
                    yield _chat_chunk(answer, index, ChoiceDelta(role="assistant", content=""))
            logprobs = answer.logprobs.chat(delta.logprobs) if answer.logprobs and delta.logprobs else None
            text, calls, reason = delta.text, (), delta.finish_reason
            if finders:
                finder = finders[delta.index]
                found = finder.push(delta.text, is_last=delta.finish_reason is not None)
                text, calls = found.content, found.calls
                reason = None if delta.finish_reason is None else finder.finish_reason(delta.finish_reason)
            if plain is not None and text and not logprobs:
                yield plain.chunk(delta.index, text)
            elif text or logprobs:
                yield _chat_chunk(answer, delta.index, ChoiceDelta(content=text), logprobs=logprobs)
            for part in call_deltas(calls):
                yield _chat_chunk(answer, delta.index, ChoiceDelta(tool_calls=[part]))
            if reason is not None:
                yield _chat_chunk(answer, delta.index, ChoiceDelta(), reason)
    if answer.usage != "none":
        yield _new_chat_chunk(answer, [], usage=answer.total_usage())


async def completion_chunks(answer: Answer) -> AsyncGenerator[Completion | WrittenChunk]:
    """For each index: its text, its finish reason; then the usage, if it was asked for."""
    opened: set[int] = set()
    echoed: dict[int, Sequence[PlacedLogprobs]] = {}
    writer = answer.logprobs
    plain = _plain(answer, lambda index, text: _completion_chunk(answer, index, text))
    async with aclosing(merged_deltas(answer.generations)) as deltas:
        async for delta in deltas:
            text, tokens = delta.text, delta.logprobs
            if answer.echoes and delta.index not in opened:
                opened.add(delta.index)
                prompt = delta.index // answer.choices_per_prompt
                if prompt not in echoed:
                    echoed[prompt] = await _echoed(answer, prompt)
                text, tokens = _echo_text(answer, prompt) + text, (*echoed[prompt], *tokens)
            logprobs = writer.completion(tokens) if writer and tokens else None
            if plain is not None and text and not logprobs:
                yield plain.chunk(delta.index, text)
            elif text or logprobs:
                yield _completion_chunk(answer, delta.index, text, logprobs=logprobs)
            if delta.finish_reason is not None:
                yield _completion_chunk(answer, delta.index, "", delta.finish_reason)
    if answer.usage != "none":
        yield _completion(answer, [], usage=answer.total_usage())


def _plain(answer: Answer, make: Callable[[int, str], ChatCompletionChunk | Completion]) -> TextChunks | None:
    """What writes chunks that only bring text; None: there are none that do, or they are wanted as objects.

    Echoes may be long, and so are written as such chunks are.
    """
    return TextChunks(make) if answer.is_sent and answer.usage != "always" and not answer.echoes else None


async def _written(
    write: Callable[[Sequence[PlacedLogprobs]], WrittenT] | None, tokens: Sequence[Sequence[PlacedLogprobs]]
) -> list[WrittenT | None]:
    """The choices' log probabilities, written in a thread: those of long answers take their time."""
    if write is None:
        return [None] * len(tokens)
    return await asyncio.to_thread(lambda: [write(of_choice) for of_choice in tokens])


def _echo_text(answer: Answer, prompt: int) -> str:
    """What a prompt's choices start with."""
    return answer.echoes[prompt].text if answer.echoes else ""


async def _echoed(answer: Answer, prompt: int) -> Sequence[PlacedLogprobs]:
    """The log probabilities that a prompt's choices start with, known once the engine has begun to answer."""
    logprobs = answer.generations[prompt].prompt_logprobs
    if not answer.echoes or answer.logprobs is None or logprobs is None:
        return ()
    echo = answer.echoes[prompt]
    return await asyncio.to_thread(answer.logprobs.place_prompt, echo.token_ids, logprobs, echo.text)


async def _prompts(answer: Answer) -> list[PromptLogprobs | None]:
    """The prompts' own log probabilities, if they were asked for."""
    logprobs = [generation.prompt_logprobs or () for generation in answer.generations]
    writer = answer.prompt_logprobs
    if writer is None:
        return [None] * len(logprobs)
    return await asyncio.to_thread(lambda: [writer.prompt(of_prompt) for of_prompt in logprobs])


def _chat_chunk(
    answer: Answer,
    index: int,
    delta: ChoiceDelta,
    finish_reason: ChatFinishReason | None = None,
    logprobs: ChatLogprobs | None = None,
) -> ChatCompletionChunk:
    choices = [ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)]
    if answer.usage == "none":
        return _new_chat_chunk(answer, choices)
    return _new_chat_chunk(answer, choices, usage=answer.total_usage() if answer.usage == "always" else None)


def _new_chat_chunk(answer: Answer, choices: list[ChunkChoice], **usage: Usage | None) -> ChatCompletionChunk:
    return ChatCompletionChunk(
        id=answer.id,
        object="chat.completion.chunk",
        created=answer.created,
        model=answer.model,
        choices=choices,
        system_fingerprint=None,
        **usage,
    )


def _completion_chunk(
    answer: Answer,
    index: int,
    text: str,
    finish_reason: TextFinishReason | None = None,
    logprobs: CompletionLogprobs | None = None,
) -> Completion:
    choices = [CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason)]
    if answer.usage == "none":
        return _completion(answer, choices)
    return _completion(answer, choices, usage=answer.total_usage() if answer.usage == "always" else None)


def _completion(answer: Answer, choices: list[CompletionChoice], **usage: Usage | None) -> Completion:
    return Completion(
        id=answer.id,
        object="text_completion",
        created=answer.created,
        model=answer.model,
        choices=choices,
        system_fingerprint=None,
        **usage,
    )
