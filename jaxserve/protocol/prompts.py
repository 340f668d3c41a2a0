"""From messages or text to the token ids of a prompt. Slow for long ones, so the service does it in a thread pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.requests import ChatCompletionRequest, ChatMessage
from jaxserve.text.chat_template import ChatTemplate, ChatTemplateError
from jaxserve.text.tokenizer import Tokenizer


class PromptBuilder:
    """Renders and encodes prompts for one model. Every method may be called from several threads.

    Message content cannot create control tokens unless `allow_special_tokens_in_content` says so: text that spells one
    is encoded as the plain text it is. The completions route encodes as Hugging Face does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        max_model_len: int,
        allow_special_tokens_in_content: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._allow_special_tokens = allow_special_tokens_in_content
        self._max_model_len = max_model_len
        longest = max((len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)), default=1)
        self._max_prompt_bytes = max_model_len * max(longest, 1)

    def chat(self, request: ChatCompletionRequest) -> list[int]:
        """Token ids of a conversation.

        Raises:
            BadRequestError: there is no template, it refuses the messages, or they can never fit.
        """
        if self._template is None:
            raise BadRequestError(
                "this model has no chat template: send a plain prompt to /v1/completions", code="no_chat_template"
            )
        texts = (text for message in request.messages for text in _texts(message))
        self._check_length(texts, "messages")
        messages = [_for_template(message) for message in request.messages]
        try:
            return self._template.encode(
                self._tokenizer,
                messages,
                allow_special_tokens_in_content=self._allow_special_tokens,
                add_generation_prompt=request.add_generation_prompt,
            )
        except ChatTemplateError as error:
            raise BadRequestError(
                f"the model's chat template refuses these messages: {error}",
                param="messages",
                code="chat_template_error",
            ) from error

    def completion(self, prompt: str | list[int], param: str) -> list[int]:
        """Token ids of a plain prompt; ids that the client sent pass as they are.

        Raises:
            BadRequestError: the prompt gives no tokens, or can never fit.
        """
        if not isinstance(prompt, str):
            return prompt
        self._check_length([prompt], param)
        token_ids = self._tokenizer.encode(prompt)
        if not token_ids:
            raise BadRequestError(
                f"`{param}` is empty: this model's tokenizer adds nothing to it, and there is nothing to continue",
                param=param,
            )
        return token_ids

    def _check_length(self, texts: Iterable[str], param: str) -> None:
        """Refuses what no tokenizing could make fit, before work is spent on it."""
        num_bytes = 0
        for text in texts:
            num_bytes += len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        if num_bytes > self._max_prompt_bytes:
            raise BadRequestError(
                f"`{param}` has {num_bytes} bytes of text, more than this model's context of "
                f"{self._max_model_len} tokens can hold",
                param=param,
                code="context_length_exceeded",
            )


def _texts(message: ChatMessage) -> list[str]:
    return [message.content] if isinstance(message.content, str) else [part.text for part in message.content]


def _for_template(message: ChatMessage) -> dict[str, Any]:
    """The message as templates know it: without absent fields, `developer` by the name that models learnt."""
    fields = message.model_dump(exclude_none=True)
    return fields | {"role": "system"} if message.role == "developer" else fields
