"""Rules between a request's fields, which types alone do not express. Each raises a BadRequestError that names one."""

from __future__ import annotations

import json
from typing import Any

from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.messages import check_message
from jaxserve.protocol.output_format import check_output_format
from jaxserve.protocol.requests import (
    MAX_TOTAL_CHOICES,
    ChatCompletionRequest,
    ChatPromptFields,
    CompletionRequest,
    GenerationRequest,
)
from jaxserve.protocol.tools import check_tools
from jaxserve.sampling_params import MAX_LOGIT_BIAS
from jaxserve.text.chat_template import RESERVED_VARIABLES

MAX_TEMPLATE_VARIABLES_SIZE = 64_000  # characters of JSON


def check_chat_rules(request: ChatCompletionRequest) -> None:
    check_generation(request)
    check_chat_prompt(request)
    check_tools(request.tools, request.tool_choice)
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise BadRequestError(
            f"`max_tokens` ({request.max_tokens}) and `max_completion_tokens` ({request.max_completion_tokens}) name "
            "the same limit: send one of them",
            param="max_completion_tokens",
        )
    if request.top_logprobs and not request.logprobs:
        raise BadRequestError("`top_logprobs` goes with `logprobs: true` only", param="top_logprobs")


def check_completion_rules(request: CompletionRequest) -> None:
    check_generation(request)
    if request.num_drawn < request.n:
        raise BadRequestError(f"`best_of` ({request.best_of}) must be at least `n` ({request.n})", param="best_of")
    if request.num_drawn > request.n and request.stream:
        raise BadRequestError(
            "`best_of` above `n` cannot be streamed: which choices are the best is known at their end", param="best_of"
        )
    total = len(request.prompts()) * request.num_drawn
    if total > MAX_TOTAL_CHOICES:
        param = "n" if request.best_of is None else "best_of"
        raise BadRequestError(f"prompts times `{param}` is {total}; the limit is {MAX_TOTAL_CHOICES}", param=param)
    if request.max_tokens == 0:
        if not request.echo or request.num_prompt_logprobs is None:
            raise BadRequestError(
                "`max_tokens` must be at least 1; 0 is for scoring a prompt, with `echo: true` and `logprobs`",
                param="max_tokens",
            )
        if request.num_drawn > 1:
            raise BadRequestError("`max_tokens: 0` generates nothing, so `n` must be 1", param="n")


def check_generation(request: GenerationRequest) -> None:
    check_output_format(request.response_format, request.structured_outputs)
    if request.stream_options is not None and not request.stream:
        raise BadRequestError("`stream_options` goes with `stream: true` only", param="stream_options")
    if request.continuous_usage() and not request.include_usage():
        param = "stream_options.continuous_usage_stats"
        raise BadRequestError(f"`{param}` goes with `include_usage: true` only", param=param)
    if request.prompt_logprobs is not None and request.stream:
        raise BadRequestError("`prompt_logprobs` cannot be streamed", param="prompt_logprobs")
    if request.output_limit is not None and request.min_tokens > request.output_limit:
        raise BadRequestError(
            f"`min_tokens` ({request.min_tokens}) is more than the answer may have ({request.output_limit})",
            param="min_tokens",
        )


def check_chat_prompt(request: ChatPromptFields) -> None:
    for position, message in enumerate(request.messages):
        check_message(message, f"messages[{position}]")
    reserved = sorted(RESERVED_VARIABLES & set(request.chat_template_kwargs))
    if reserved:
        raise BadRequestError(
            f"`chat_template_kwargs` cannot set {reserved[0]!r}", param=f"chat_template_kwargs.{reserved[0]}"
        )
    size = len(json.dumps(request.chat_template_kwargs)) if request.chat_template_kwargs else 0
    if size > MAX_TEMPLATE_VARIABLES_SIZE:
        raise BadRequestError(
            f"`chat_template_kwargs` has {size} characters; the limit is {MAX_TEMPLATE_VARIABLES_SIZE}",
            param="chat_template_kwargs",
        )
    if not request.continue_final_message:
        return
    if request.add_generation_prompt:
        raise BadRequestError(
            "`continue_final_message` and `add_generation_prompt` exclude each other", param="continue_final_message"
        )
    last = request.messages[-1]
    if last.role != "assistant" or last.tool_calls:
        raise BadRequestError(
            "`continue_final_message` needs a last message of role 'assistant' without tool calls",
            param="continue_final_message",
        )


def check_logit_bias(fields: dict[str, Any]) -> None:
    """By hand, since keys are strings that hold integers."""
    biases = fields.get("logit_bias")
    if not isinstance(biases, dict):
        return  # absent, or refused for its type later
    if len(biases) > MAX_LOGIT_BIAS:
        raise BadRequestError(
            f"`logit_bias` has {len(biases)} entries; the limit is {MAX_LOGIT_BIAS}", param="logit_bias"
        )
    for key, bias in biases.items():
        shown = repr(key) if len(key) <= 40 else f"{key[:40]!r}..."
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
            raise BadRequestError(
                f"`logit_bias` has the key {shown}; keys are token ids, such as '50'", param="logit_bias"
            )
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise BadRequestError(f"`logit_bias` of token {key} must be a number in -100..100", param="logit_bias")
