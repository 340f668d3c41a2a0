"""From prompts to an answer under way: what of a request goes to the engine, and what its outputs are written with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jaxserve.constraint import Constraint
from jaxserve.engine.request import EngineStoppedError, QueueFullError, RequestError
from jaxserve.protocol.assembly import Answer, Echo, UsageMode, new_id
from jaxserve.protocol.choice_text import ChoiceText
from jaxserve.protocol.engine_protocol import Engine, TokenStream
from jaxserve.protocol.errors import ApiError, BadRequestError, from_engine_error
from jaxserve.protocol.generation import TextGeneration
from jaxserve.protocol.logprobs import LogprobWriter
from jaxserve.protocol.observer import NoObserver, RequestObserver
from jaxserve.protocol.prompts import EncodedPrompt
from jaxserve.protocol.requests import GenerationRequest
from jaxserve.protocol.tools import ToolUse
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.tokenizer import Tokenizer

MAX_LOGPROBS_HELD = 4_000_000  # log probabilities that one response may hold before any of it is sent


class AnswerStarter:
    """Begins the answers of one model."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, model_name: str) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._model_name = model_name

    def start(
        self,
        kind: Literal["chatcmpl", "cmpl", "resp"],
        request: GenerationRequest,
        prompts: Sequence[EncodedPrompt],
        observer: RequestObserver | None,
        *,
        lazy: bool,
        has_echoes: bool = False,
        constraint: Constraint | None = None,
        tool_use: ToolUse | None = None,
    ) -> Answer:
        """Queues the prompts; what becomes of them makes up the answer.

        Args:
            kind: what the answer's id begins with.
            lazy: as `OpenAIService` has it.

        Raises:
            ApiError: a prompt is refused, and nothing was queued.
        """
        self._check_logprobs(request, prompts, held=kind == "resp" or not request.stream)
        generations = self._submit(request, prompts, observer or NoObserver(), constraint)
        return Answer(
            model=self._model_name,
            generations=generations,
            choices_per_prompt=request.n,
            id=new_id(kind),
            echoes=[Echo(prompt.echo, prompt.token_ids) for prompt in prompts] if has_echoes else (),
            logprobs=self._writer(request.num_top_logprobs, lazy),
            prompt_logprobs=self._writer(request.prompt_logprobs, lazy),
            tool_use=tool_use,
            usage=_usage(request),
            is_sent=lazy,
        )

    def _writer(self, num_top: int | None, lazy: bool) -> LogprobWriter | None:
        return None if num_top is None else LogprobWriter(self._tokenizer, num_top, is_lazy=lazy)

    def _submit(
        self,
        request: GenerationRequest,
        prompts: Sequence[EncodedPrompt],
        observer: RequestObserver,
        constraint: Constraint | None,
    ) -> list[TextGeneration]:
        """Queues every prompt, or none: the request fails as a whole."""
        streams: list[TokenStream] = []
        generations: list[TextGeneration] = []
        try:
            for prompt in prompts:
                sampling = self._sampling(request, prompt, constraint)
                streams.append(
                    self._engine.submit(
                        prompt.token_ids, sampling, cache_salt=request.cache_salt, priority=request.priority
                    )
                )
                generations.append(
                    TextGeneration(
                        streams[-1],
                        self._choices(request, prompt, len(generations) * request.num_drawn),
                        prompt_tokens=len(prompt.token_ids),
                        observer=observer,
                        awaits_prompt_logprobs=request.num_prompt_logprobs is not None,
                    )
                )
        except BaseException as error:
            for stream in streams:
                stream.abort()
            if isinstance(error, (RequestError, QueueFullError, EngineStoppedError)):
                raise _named(from_engine_error(error), prompts[len(streams)].param) from error
            raise
        return generations

    def _sampling(
        self, request: GenerationRequest, prompt: EncodedPrompt, constraint: Constraint | None
    ) -> SamplingParams:
        room = max(1, self._engine.max_model_len - len(prompt.token_ids))
        if request.min_tokens > room:
            raise BadRequestError(
                f"`min_tokens` is {request.min_tokens}; `{prompt.param}` leaves room for {room}", param="min_tokens"
            )
        limit = request.output_limit
        # The engine generates one token at least; where only the prompt is scored, that token is no part of the answer.
        max_tokens = None if limit is None else min(max(limit, 1), room)
        return request.sampling(max_tokens=max_tokens, constraint=constraint)

    def _choices(self, request: GenerationRequest, prompt: EncodedPrompt, first_index: int) -> list[ChoiceText]:
        return [
            ChoiceText(
                first_index + choice,
                self._tokenizer,
                prompt.detokenizer.copy(),
                stops=request.stop,
                skip_special_tokens=request.skip_special_tokens,
                min_tokens=request.min_tokens,
                max_tokens=request.output_limit,
                text_length=len(prompt.echo),
            )
            for choice in range(request.num_drawn)
        ]

    def _check_logprobs(self, request: GenerationRequest, prompts: Sequence[EncodedPrompt], *, held: bool) -> None:
        """Refuses what could only be held in memory as a whole, and is too much for that.

        Args:
            held: the answer's own are kept to its end, as a stream of chunks need not do.
        """
        num_held = 0
        limit = request.output_limit
        for prompt in prompts:
            room = max(1, self._engine.max_model_len - len(prompt.token_ids))
            new_tokens = room if limit is None else min(limit, room)
            if request.num_prompt_logprobs is not None:
                num_held += request.n * len(prompt.token_ids) * (request.num_prompt_logprobs + 1)
            if request.num_top_logprobs is not None and held:
                num_held += request.num_drawn * new_tokens * (request.num_top_logprobs + 1)
        if num_held > MAX_LOGPROBS_HELD:
            param = "prompt_logprobs" if request.num_top_logprobs is None else "logprobs"
            raise BadRequestError(
                f"this may give {num_held} log probabilities in one response; the limit is {MAX_LOGPROBS_HELD}: ask for "
                "fewer choices, tokens or alternatives",
                param=param,
            )


def _usage(request: GenerationRequest) -> UsageMode:
    if request.continuous_usage():
        return "always"
    return "last" if request.include_usage() else "none"


def _named(error: ApiError, param: str) -> ApiError:
    """The same refusal, naming the field that the client wrote the prompt in."""
    if isinstance(error, BadRequestError) and error.param in (None, "prompt"):
        return BadRequestError(error.message, param=param, code=error.code)
    return error
