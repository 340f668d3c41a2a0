"""Requests of chat completions and completions, with one rule for every field a client may send.

A field has its documented effect, or is refused with a 400 that names it:

* fields of the models below take effect; those of `AccountFields` are accepted and change nothing, as the API has it;
* fields that OpenAI or vLLM know and this server does not support are refused, unless their value asks for nothing
  (`UNSUPPORTED_*` lists those values, such as `"tools": []` or `"suffix": ""`);
* any other field is refused as unknown;
* null is the same as absent, everywhere.

Types are strict: "5", 1.5 and true are no integers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SkipValidation

from jaxserve.constraint import Constraint
from jaxserve.protocol.messages import ChatMessage
from jaxserve.protocol.output_format import ResponseFormat, StructuredOutputs
from jaxserve.protocol.tools import MAX_TOOLS, Tool, ToolChoice
from jaxserve.protocol.validation import StrictModel
from jaxserve.sampling_params import MAX_CHOICES, MAX_LOGPROBS, SEED_MAX, SEED_MIN, SamplingParams

MAX_MESSAGES = 10_000
MAX_PROMPTS = 1024
MAX_TOTAL_CHOICES = 1024  # prompts x choices of one request
MAX_PROMPT_TOKEN_IDS = 1 << 20
MAX_METADATA = 16  # entries; this and the next three as OpenAI has them
MAX_METADATA_KEY = 64  # characters
MAX_METADATA_VALUE = 512
MAX_SAFETY_IDENTIFIER = 128
MAX_STOP_STRINGS = 4
MAX_STOP_STRING_LENGTH = 1000  # characters
MAX_STOP_TOKEN_IDS = 128
MAX_TEMPLATE_VARIABLES = 64
MAX_CACHE_SALT_LENGTH = 256  # characters
MAX_PRIORITY = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of `max_tokens` on the completions route

# Field -> values that ask for nothing, so that sending them is no error.
UNSUPPORTED_COMMON: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = UNSUPPORTED_COMMON | {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = UNSUPPORTED_COMMON | {"suffix": ("",)}
UNSUPPORTED_STREAM_OPTIONS: dict[str, tuple[Any, ...]] = {"include_obfuscation": (False,)}


MetadataKey = Annotated[str, Field(max_length=MAX_METADATA_KEY)]
MetadataValue = Annotated[str, Field(max_length=MAX_METADATA_VALUE)]


class AccountFields(StrictModel):
    """Fields about the client's account or OpenAI's storage: checked as OpenAI has them, without effect here."""

    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=MAX_METADATA)
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    safety_identifier: str | None = Field(None, max_length=MAX_SAFETY_IDENTIFIER)
    service_tier: Literal["auto", "default", "fast", "flex", "priority", "scale", "ultrafast"] | None = None
    store: bool | None = None
    user: str | None = None


class StreamOptions(StrictModel):
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


class SamplingFields(AccountFields):
    """How tokens are drawn, and when an answer ends: the same on every route.

    Ranges are `SamplingParams`'; they are repeated here so that errors name the field.

    Attributes:
        cache_salt: prompts share what was computed only with those of the same salt.
        priority: a smaller one goes first, where the engine schedules by priority.
    """

    model: str | None = None
    temperature: float = Field(1.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, ge=0.0, le=1.0)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100.0)
    logit_bias: dict[str, float] = Field({})  # keys are token ids, as JSON has no other keys than strings
    seed: int | None = Field(None, ge=SEED_MIN, le=SEED_MAX)
    stop: Annotated[list[StopString], BeforeValidator(_list_of_stops)] = Field([], max_length=MAX_STOP_STRINGS)
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_STOP_TOKEN_IDS)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_LENGTH)
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)


class GenerationRequest(SamplingFields):
    """What chat completions and completions take beside that.

    Attributes:
        response_format, structured_outputs: what the answer must look like; one of them.
    """

    max_tokens: int | None = Field(None, ge=0)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def num_drawn(self) -> int:
        """Choices generated for each prompt, of which `n` are returned."""
        return self.n

    @property
    def output_limit(self) -> int | None:
        """Tokens of a choice at most; None: as many as there is room for; 0: the prompt is scored only."""
        return self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """Alternatives beside each token's log probability; None: nothing is told of any."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens, wherever they are told."""
        return self.prompt_logprobs

    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling(self, *, max_tokens: int | None, constraint: Constraint | None = None) -> SamplingParams:
        """What the engine is asked for.

        Args:
            max_tokens: tokens of a choice, at least 1; None: as many as there is room for.
            constraint: what every choice must follow.
        """
        ranks = self.num_drawn > self.n  # by their log probabilities
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            n=self.num_drawn,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((int(token), bias) for token, bias in self.logit_bias.items()),
            min_tokens=self.min_tokens,
            logprobs=0 if ranks and self.num_top_logprobs is None else self.num_top_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            constraint=constraint,
        )


class ChatPromptFields(StrictModel):
    """What the prompt of a conversation is made of, wherever a conversation may be sent.

    Attributes:
        add_generation_prompt: the prompt opens the assistant's turn; None: it does, unless a message is continued.
        continue_final_message: the prompt ends with the last message's text, and the answer goes on from there.
        chat_template_kwargs: further variables for the model's template.
        tools: what the model may call.
    """

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field({}, max_length=MAX_TEMPLATE_VARIABLES)
    tools: list[Tool] = Field([], max_length=MAX_TOOLS)

    @property
    def opens_answer(self) -> bool:
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


class ChatCompletionRequest(GenerationRequest, ChatPromptFields):
    """Body of POST /v1/chat/completions. `max_completion_tokens` is the newer name of `max_tokens`.

    Attributes:
        tool_choice: None: "auto".
        parallel_tool_calls: whether one answer may hold several calls.
    """

    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


Prompt = str | list[str] | list[int] | list[list[int]]


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions.

    Attributes:
        echo: choices start with their prompt; with `logprobs`, so do the log probabilities.
        best_of: choices drawn, of which the `n` with the highest mean log probability are returned.
        max_tokens: 0, with echo and log probabilities, scores the prompt and generates nothing.
        add_special_tokens: text prompts get what the tokenizer adds by itself (usually BOS, or nothing).
    """

    prompt: SkipValidation[Prompt]  # parsing has checked it, for a union would try all its forms on every token
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    add_special_tokens: bool = True

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts one by one, whichever of the four forms they came in."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]  # a list that starts with an int is one of ints
        return self.prompt  # type: ignore[return-value]

    @property
    def num_drawn(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def output_limit(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        wanted = [count for count in (self.prompt_logprobs, self.logprobs if self.echo else None) if count is not None]
        return max(wanted, default=None)
