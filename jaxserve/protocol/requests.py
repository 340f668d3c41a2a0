"""Requests of chat completions and completions, with one rule for every field a client may send.

A field has its documented effect, or is refused with a 400 that names it:

* fields of the models below take effect; those of `_Ignored` are accepted and change nothing, as the API has it;
* fields that OpenAI or vLLM know and this server does not support are refused, unless their value asks for nothing
  (`UNSUPPORTED_*` lists those values, such as `"tools": []` or `"presence_penalty": 0`);
* any other field is refused as unknown;
* null is the same as absent, everywhere.

Types are strict: "5", 1.5 and true are no integers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from jaxserve.protocol.errors import BadRequestError
from jaxserve.sampling_params import MAX_CHOICES, SEED_MAX, SEED_MIN, SamplingParams

MAX_MESSAGES = 10_000
MAX_PROMPTS = 1024
MAX_TOTAL_CHOICES = 1024  # prompts x n of one request
MAX_PROMPT_TOKEN_IDS = 1 << 20
MAX_STOP_STRINGS = 4
MAX_STOP_STRING_LENGTH = 1000  # characters
MAX_STOP_TOKEN_IDS = 128
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of `max_tokens` on the completions route

# Field -> values that ask for nothing, so that sending them is no error.
UNSUPPORTED_COMMON: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "use_beam_search": (False,),
}
UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = UNSUPPORTED_COMMON | {
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = UNSUPPORTED_COMMON | {"logprobs": (), "suffix": ("",)}
UNSUPPORTED_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning_content": ("",),
    "refusal": ("",),
    "tool_calls": ([],),
}
UNSUPPORTED_STREAM_OPTIONS: dict[str, tuple[Any, ...]] = {"include_obfuscation": (False,)}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Ignored(_Strict):
    """Fields about the client's account or OpenAI's storage: checked for their type, without effect here."""

    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None


class StreamOptions(_Strict):
    """What an event stream carries beside text.

    Attributes:
        include_usage: one more chunk before [DONE], with `choices: []` and the usage of the whole request.
        continuous_usage_stats: every chunk carries the usage so far (needs include_usage).
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


def _list_of_stops(value: object) -> object:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_LENGTH)]
TokenId = Annotated[int, Field(ge=0)]


class _Generation(_Ignored):
    """What both routes take. Ranges are `SamplingParams`'; they are repeated here so that errors name the field."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, ge=0.0, le=1.0)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    seed: int | None = Field(None, ge=SEED_MIN, le=SEED_MAX)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), BeforeValidator(_list_of_stops)] = []
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None

    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def continuous_usage(self) -> bool:
        return self.include_usage() and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling(self, *, max_tokens: int | None) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            n=self.n,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


class TextPart(_Strict):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """One turn. `developer` is rendered as `system`, which is what chat templates know it by."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None
    tool_call_id: str | None = None


class ChatCompletionRequest(_Generation):
    """Body of POST /v1/chat/completions. `max_completion_tokens` is the newer name of `max_tokens`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    add_generation_prompt: bool = True

    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


Prompt = str | list[str] | list[int] | list[list[int]]


class CompletionRequest(_Generation):
    """Body of POST /v1/completions. `best_of` may only repeat `n`: every choice drawn is returned."""

    prompt: Prompt
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts one by one, whichever of the four forms they came in."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]  # a list that starts with an int is one of ints
        return self.prompt  # type: ignore[return-value]

    def output_limit(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


def check_chat_rules(request: ChatCompletionRequest) -> None:
    """Rules between fields, which types alone do not express."""
    check_stream_options(request)
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise BadRequestError(
            f"`max_tokens` ({request.max_tokens}) and `max_completion_tokens` ({request.max_completion_tokens}) name "
            "the same limit: send one of them",
            param="max_completion_tokens",
        )
    for position, message in enumerate(request.messages):
        if message.role == "tool" and message.tool_call_id is None:
            raise BadRequestError(
                f"`messages[{position}].tool_call_id` is missing: a tool message says which call it answers",
                param=f"messages[{position}].tool_call_id",
                code="missing_required_parameter",
            )
        if message.role != "tool" and message.tool_call_id is not None:
            raise BadRequestError(
                f"`messages[{position}].tool_call_id` belongs to tool messages, not to role {message.role!r}",
                param=f"messages[{position}].tool_call_id",
            )


def check_completion_rules(request: CompletionRequest) -> None:
    """Rules between fields, which types alone do not express."""
    check_stream_options(request)
    if request.best_of is not None and request.best_of != request.n:
        raise BadRequestError(
            f"`best_of` ({request.best_of}) must equal `n` ({request.n}): choices are not ranked here", param="best_of"
        )
    total = len(request.prompts()) * request.n
    if total > MAX_TOTAL_CHOICES:
        raise BadRequestError(f"prompts times `n` is {total}; the limit is {MAX_TOTAL_CHOICES}", param="n")


def check_stream_options(request: _Generation) -> None:
    if request.stream_options is not None and not request.stream:
        raise BadRequestError("`stream_options` goes with `stream: true` only", param="stream_options")
