"""From messages or text to the token ids of a prompt. Slow for long ones, so the service does it in a thread pool."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any

from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.requests import ChatCompletionRequest, ChatPromptFields, CompletionRequest, GenerationRequest
from jaxserve.text.chat_template import ChatTemplate, ChatTemplateError
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt, ready for the engine.

    Attributes:
        param: what errors call it.
        detokenizer: at its end; each choice goes on with a copy.
        echo: its text, where that is told.
    """

    token_ids: list[int]
    param: str
    detokenizer: Detokenizer
    echo: str = ""


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
        vocab_size: int,
        allow_special_tokens_in_content: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._allow_special_tokens = allow_special_tokens_in_content
        self.max_model_len = max_model_len
        self._vocab_size = vocab_size
        longest = max((len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)), default=1)
        self._max_prompt_bytes = max_model_len * max(longest, 1)

    def conversation(
        self,
        request: ChatCompletionRequest,
        param: str,
        tools: Sequence[Mapping[str, Any]] | None,
        shown_ids: frozenset[int],
    ) -> EncodedPrompt:
        """The prompt of a conversation; `shown_ids` are control tokens that belong to the answer's text.

        Raises:
            BadRequestError: as for `chat`.
        """
        token_ids = self.chat(request, param, tools)
        return EncodedPrompt(token_ids, param, self._detokenizer(request, token_ids, shown_ids))

    def completions(self, request: CompletionRequest, shown_ids: frozenset[int]) -> list[EncodedPrompt]:
        """Every prompt of a request for completions, with its text where it is to be echoed.

        Raises:
            BadRequestError: as for `completion`.
        """
        encoded: list[EncodedPrompt] = []
        several = isinstance(request.prompt, list) and not isinstance(request.prompt[0], int)
        for position, prompt in enumerate(request.prompts()):
            param = f"prompt[{position}]" if several else "prompt"
            token_ids = self.completion(prompt, param, add_special_tokens=request.add_special_tokens)
            echo = ""
            if request.echo:
                echo = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
            encoded.append(EncodedPrompt(token_ids, param, self._detokenizer(request, token_ids, shown_ids), echo))
        return encoded

    def chat(
        self, request: ChatPromptFields, param: str = "messages", tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation; `param` is what errors call its messages, `tools` what the template tells of tools.

        Raises:
            BadRequestError: there is no template, it refuses the messages, or they can never fit.
        """
        if self._template is None:
            raise BadRequestError(
                "this model has no chat template: send a plain prompt to /v1/completions", code="no_chat_template"
            )
        texts = (text for message in request.messages for text in message.texts())
        self._check_length(chain(texts, [json.dumps(tools)] if tools else []), param)
        try:
            return self._template.encode(
                self._tokenizer,
                [message.for_template() for message in request.messages],
                add_generation_prompt=request.opens_answer,
                tools=tools,
                continue_final_message=request.continue_final_message,
                allow_special_tokens_in_content=self._allow_special_tokens,
                variables=request.chat_template_kwargs,
            )
        except ChatTemplateError as error:
            raise BadRequestError(
                f"the model's chat template refuses these messages: {error}",
                param=param,
                code="chat_template_error",
            ) from error

    def system_prefix(self, text: str) -> list[int]:
        """Token ids that every conversation with this system prompt begins with; every completion, without a template.

        Raises:
            BadRequestError: as for `chat`.
        """
        if self._template is None:
            return self.completion(text, "the pinned prompt")
        first, second = (
            self.chat(
                ChatPromptFields.model_validate(
                    {"messages": [{"role": "system", "content": text}, {"role": "user", "content": question}]}
                ),
                "the pinned prompt",
            )
            for question in ("a", "1")
        )
        return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]

    def completion(self, prompt: str | list[int], param: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain prompt; ids that the client sent pass as they are.

        Raises:
            BadRequestError: the prompt gives no tokens, holds ids that are none, or can never fit.
        """
        if not isinstance(prompt, str):
            if max(prompt) >= self._vocab_size:  # the tokenizer cannot even be asked about some
                raise BadRequestError(
                    f"`{param}`: token id {max(prompt)} is outside the vocabulary, which ends at {self._vocab_size - 1}",
                    param=param,
                )
            return prompt
        token_ids = self.encode(prompt, param, add_special_tokens=add_special_tokens)
        if not token_ids:
            raise BadRequestError(
                f"`{param}` is empty, and nothing is added to it: there is nothing to go on from", param=param
            )
        return token_ids

    def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text as Hugging Face has them; none for an empty one to which nothing is added.

        Raises:
            BadRequestError: it is longer than anything that fits.
        """
        self._check_length([text], param)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _detokenizer(self, request: GenerationRequest, token_ids: list[int], shown_ids: frozenset[int]) -> Detokenizer:
        return Detokenizer(self._tokenizer, token_ids, request.skip_special_tokens, shown_ids)

    def _check_length(self, texts: Iterable[str], param: str) -> None:
        """Refuses what no tokenizing could make fit, before work is spent on it."""
        num_bytes = 0
        for text in texts:
            num_bytes += len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        if num_bytes > self._max_prompt_bytes:
            raise BadRequestError(
                f"`{param}` has {num_bytes} bytes of text, more than this model's context of "
                f"{self.max_model_len} tokens can hold",
                param=param,
                code="context_length_exceeded",
            )
