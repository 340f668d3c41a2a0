"""Chat messages to prompt tokens, through the model's own Jinja template in a sandbox.

Safe by default: a control token in the prompt comes from the template, never from what a message says. Where no message
spells a control token, the ids are those of Hugging Face's `apply_chat_template`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from jaxserve.template_sandbox import SandboxedTemplate, TemplateLimits
from jaxserve.text.tokenizer import Tokenizer

# Unicode's noncharacters: valid in a str, and no text that means anything has them. One that the input lacks breaks up
# spellings.
_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
_PROBE = "jaxserve-probe"

# What a template trusts: requests set these by fields of their own, or not at all.
RESERVED_VARIABLES = frozenset(
    (
        *("messages", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message"),
        *(f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")),
    )
)


class ChatTemplateError(ValueError):
    """The template is broken, or it (or we) cannot take these messages. The message is fit for a client."""


class ChatTemplate:
    """A compiled template; immutable, and may be used from several threads.

    Attributes:
        source: the template as it is written.
        takes_parts: the template prints only content that is a list of parts; plain strings are wrapped for it.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str, limits: TemplateLimits | None = None) -> None:
        """Compile the template and find out what form of `content` it prints.

        Args:
            limits: of one rendering; None: the usual ones.

        Raises:
            ChatTemplateError: if it is not valid Jinja.
        """
        try:
            self._template = SandboxedTemplate(source, limits or TemplateLimits())
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is not valid: {_one_line(error)}") from error
        self.source = source
        self._special_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        parts = [{"type": "text", "text": _PROBE}]
        self.takes_parts = _PROBE not in self._try(_PROBE) and _printed_as_text(self._try(parts))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text.

        Args:
            messages: each with `role` and `content`: a string, None, or a list of text parts.
            variables: further ones for the template, such as `enable_thinking`.

        Raises:
            ChatTemplateError: if the template refuses the messages, or a content part is no text.
        """
        prepared = prepare_messages(messages, takes_parts=self.takes_parts)
        return self._render(prepared, tools, dict(variables or {}), add_generation_prompt=add_generation_prompt)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        allow_special_tokens_in_content: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt as token ids.

        Args:
            continue_final_message: the prompt ends with the last message's text, so that the answer goes on from there.
            allow_special_tokens_in_content: True: text that spells a control token becomes it wherever it stands, as
                Hugging Face does; whoever writes a message can then close their turn and open a system turn.

        Raises:
            ChatTemplateError: as `render`, or the template does not print the message that is to be continued.
        """
        end_mark, break_mark = _free_marks([messages, tools, variables])
        if continue_final_message:
            messages = _with_end_marked(messages, end_mark)
        prepared = prepare_messages(messages, takes_parts=self.takes_parts)
        inputs: dict[str, Any] = {
            "messages": prepared,
            "tools": None if tools is None else list(tools),
            "variables": dict(variables or {}),
        }
        mark = None
        if not allow_special_tokens_in_content:
            breaker = _SpellingBreaker(tokenizer.special_tokens, break_mark)
            inputs = breaker.apply(inputs)
            mark = break_mark if breaker.num_broken else None
        text = self._render(**inputs, add_generation_prompt=add_generation_prompt)
        if continue_final_message:
            text = _until_end_mark(text, end_mark, messages[-1]["content"])
        if mark is None:
            return tokenizer.encode(text, add_special_tokens=False)
        return encode_marked(tokenizer, text, mark)

    def _render(
        self, messages: list[dict[str, Any]], tools: Any, variables: dict[str, Any], *, add_generation_prompt: bool
    ) -> str:
        reserved = sorted(RESERVED_VARIABLES & set(variables))
        if reserved:
            raise ChatTemplateError(f"chat template variables {reserved} cannot be set by a request")
        everything = {
            **variables,
            **self._special_tokens,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(everything)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(_one_line(error)) from error
        except Exception as error:  # whatever Python raises inside a template is the messages' not fitting it
            message = f"the model's chat template cannot take these messages: {_one_line(error)}"
            raise ChatTemplateError(message) from error

    def _try(self, content: Any) -> str:
        try:
            return self._render([{"role": "user", "content": content}], None, {}, add_generation_prompt=True)
        except ChatTemplateError:
            return ""


def _printed_as_text(output: str) -> bool:
    """Whether the probe's text is there, and not as part of a printed list."""
    return _PROBE in output and "'type'" not in output and '"type"' not in output


def prepare_messages(messages: Sequence[Mapping[str, Any]], *, takes_parts: bool) -> list[dict[str, Any]]:
    """Messages whose content has the form that the template prints: text parts are joined by newlines, None is "".

    Raises:
        ChatTemplateError: for a part that is no text, or a list without parts.
    """
    prepared = []
    for index, message in enumerate(messages):
        text = _content_text(message.get("content"), f"messages[{index}].content")
        prepared.append({**message, "content": [{"type": "text", "text": text}] if takes_parts and text else text})
    return prepared


def _content_text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not content:
        raise ChatTemplateError(f"{where} must be a string or a non-empty list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) and kind == "text" else None
        if not isinstance(text, str):
            raise ChatTemplateError(f"{where}[{index}] is of type {kind!r}: this model takes text parts only")
        texts.append(text)
    return "\n".join(texts)


def _free_marks(inputs: Any) -> tuple[str, str]:
    """Two marks that occur nowhere in the inputs."""
    used = json.dumps(inputs, ensure_ascii=False, default=str)
    free = [mark for mark in _MARKS if mark not in used]
    if len(free) < 2:
        raise ChatTemplateError("the messages use up Unicode's noncharacters: remove them")
    return free[0], free[1]


def _with_end_marked(messages: Sequence[Mapping[str, Any]], mark: str) -> list[Mapping[str, Any]]:
    """The messages, a mark at the end of the last one's text; before its white space, which templates may trim."""
    *others, last = messages
    text = _content_text(last.get("content"), f"messages[{len(others)}].content")
    visible = text.rstrip()
    return [*others, {**last, "content": visible + mark + text[len(visible) :]}]


def _until_end_mark(text: str, mark: str, content: str) -> str:
    """The prompt up to the marked end; white space after it stays if the template prints it.

    Args:
        content: the last message's, mark included.
    """
    before, found, after = text.rpartition(mark)
    if not found:
        raise ChatTemplateError(
            "the model's chat template does not print the final message, so it cannot go on from it"
        )
    white_space = content.rpartition(mark)[2]
    return before.replace(mark, "") + (white_space if after.startswith(white_space) else "")


def encode_marked(tokenizer: Tokenizer, text: str, mark: str) -> list[int]:
    """Ids of a text in which `mark` breaks up each spelling of a control token that must stay text.

    The tokenizer cuts a text at control tokens before anything else, so encoding what lies between them piece by piece
    gives the ids of the whole.
    """
    tokens = tokenizer.special_tokens
    token_ids: list[int] = []
    position, at_start = 0, True

    def add_plain(piece: str) -> None:
        piece = piece.replace(mark, "")
        if piece and at_start:
            token_ids.extend(tokenizer.encode(piece, add_special_tokens=False, allow_special_tokens=False))
        elif piece:
            token_ids.extend(tokenizer.encode_continuation(piece))

    for match in _spelling_pattern(tokens, mark).finditer(text):
        token = tokens[match[0]]
        piece = text[position : match.start()]
        add_plain(piece.rstrip() if token.lstrip else piece)
        token_id = tokenizer.token_id(match[0])
        if token_id is None:
            raise ValueError(f"control token {match[0]!r} has no id in the vocabulary")
        token_ids.append(token_id)
        position, at_start = match.end(), False
        if token.rstrip:
            position += len(text[position:]) - len(text[position:].lstrip())
    add_plain(text[position:])
    return token_ids


class _SpellingBreaker:
    """Puts a mark into each spelling of a control token, and behind each end of a string that begins such a spelling.

    The second is for templates that print two strings of a client side by side.
    """

    def __init__(self, special_tokens: Mapping[str, Any], mark: str) -> None:
        self.mark = mark
        self.num_broken = 0
        self._pattern = _spelling_pattern(special_tokens, self.mark)
        beginnings = {token[:length] for token in special_tokens for length in range(1, len(token))}
        self._beginnings = beginnings
        self._longest_beginning = max(map(len, beginnings), default=0)

    def apply(self, value: Any) -> Any:
        """The same value with every string in it broken up, keys included."""
        if isinstance(value, str):
            return self._break(value)
        if isinstance(value, Mapping):
            return {self.apply(key): self.apply(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.apply(item) for item in value]
        return value

    def _break(self, text: str) -> str:
        broken = text
        while self._pattern.search(broken):  # again, since breaking one spelling can leave another that overlapped it
            broken = self._pattern.sub(self._break_match, broken)
        longest = min(self._longest_beginning, len(broken))
        if any(broken[len(broken) - length :] in self._beginnings for length in range(1, longest + 1)):
            broken += self.mark
        self.num_broken += broken != text
        return broken

    def _break_match(self, match: re.Match[str]) -> str:
        spelling = match[0]
        # A single character has no inside, so it gets two marks before it (one alone may stand there as an end's mark).
        return spelling[0] + self.mark + spelling[1:] if len(spelling) > 1 else self.mark * 2 + spelling


def _spelling_pattern(special_tokens: Mapping[str, Any], mark: str) -> re.Pattern[str]:
    """Matches any control token, the longest where several begin; a single character only without two marks before."""
    spellings = sorted((token for token in special_tokens if len(token) > 1), key=len, reverse=True)
    alternatives = [re.escape(token) for token in spellings]
    alternatives += [f"(?<!{mark}{mark}){re.escape(token)}" for token in special_tokens if len(token) == 1]
    return re.compile("|".join(alternatives) or r"(?!)")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
