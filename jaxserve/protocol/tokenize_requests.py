"""Requests of /tokenize and /detokenize, with the bodies that vLLM has for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.parsing import check_token_ids, clean_messages
from jaxserve.protocol.request_rules import check_chat_prompt
from jaxserve.protocol.requests import MAX_PROMPT_TOKEN_IDS, ChatPromptFields
from jaxserve.protocol.tools import check_tools, clean_tool_fields
from jaxserve.protocol.validation import StrictModel, supported, validate

UNSUPPORTED_TOKENIZE_CHAT: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),  # a template writes its own
    "chat_template": (),
    "mm_processor_kwargs": ({},),
}


class TokenizeTextRequest(StrictModel):
    """Body of POST /tokenize for a text, encoded as the completions route does."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatPromptFields):
    """Body of POST /tokenize for a conversation, encoded as the chat route does."""

    model: str | None = None
    return_token_strs: bool = False


class DetokenizeRequest(StrictModel):
    """Body of POST /detokenize."""

    tokens: list[int] = Field(max_length=MAX_PROMPT_TOKEN_IDS)
    model: str | None = None


def parse_tokenize_request(body: Mapping[str, Any]) -> TokenizeTextRequest | TokenizeChatRequest:
    """Validates the body: it has `prompt` or `messages`.

    Raises:
        BadRequestError: names the first field at fault.
    """
    if body.get("messages") is None:
        return validate(TokenizeTextRequest, supported(body, TokenizeTextRequest.model_fields, {}, ""))
    if body.get("prompt") is not None:
        raise BadRequestError("`prompt` and `messages` exclude each other", param="prompt")
    fields = supported(body, TokenizeChatRequest.model_fields, UNSUPPORTED_TOKENIZE_CHAT, "")
    clean_messages(fields)
    clean_tool_fields(fields)
    request = validate(TokenizeChatRequest, fields)
    check_chat_prompt(request)
    check_tools(request.tools, None)
    return request


def parse_detokenize_request(body: Mapping[str, Any]) -> DetokenizeRequest:
    """Validates the body.

    Raises:
        BadRequestError: names the first field at fault.
    """
    fields = supported(body, DetokenizeRequest.model_fields, {}, "")
    tokens = fields.get("tokens")
    if isinstance(tokens, list) and tokens:  # an empty list is an empty text
        check_token_ids(tokens, "tokens")
    return validate(DetokenizeRequest, fields)
