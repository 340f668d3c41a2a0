"""OpenAI's calls over an engine: what the server and the Python API share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar, overload

from jaxserve.config import ToolCallFormat
from jaxserve.engine.request import EngineStoppedError
from jaxserve.protocol import assembly, responses_api_assembly
from jaxserve.protocol.answer_rules import AnswerRules
from jaxserve.protocol.answer_start import AnswerStarter
from jaxserve.protocol.assembly import Answer
from jaxserve.protocol.chunk_stream import ChunkStream
from jaxserve.protocol.engine_protocol import Engine
from jaxserve.protocol.errors import ApiError, BadRequestError, NotFoundError, from_engine_error
from jaxserve.protocol.observer import RequestObserver
from jaxserve.protocol.prompts import EncodedPrompt, PromptBuilder
from jaxserve.protocol.requests import (
    MAX_PROMPT_TOKEN_IDS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from jaxserve.protocol.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    DetokenizedText,
    Model,
    ModelList,
    Tokens,
)
from jaxserve.protocol.responses_api_objects import ResponseEvent, ResponseObject
from jaxserve.protocol.responses_api_requests import ResponsesRequest
from jaxserve.protocol.responses_api_tools import own_names
from jaxserve.protocol.text_chunks import WrittenChunk
from jaxserve.protocol.tokenize_requests import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from jaxserve.protocol.tools import Tool, ToolUse
from jaxserve.structured.compiler import Compiler
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer

ResultT = TypeVar("ResultT")

TEXT_THREADS = 2  # render templates and tokenize prompts


class OpenAIService:
    """Serves one model. All calls are made on one event loop.

    With `lazy`, answers are made for their JSON: long lists of log probabilities are `LazyList`s, for `json_pieces` to
    write, and chunks that only bring text are JSON already.

    The calls raise `ApiError`s: for what a client did wrong before anything was queued, for a full queue or a stopped
    engine, and for an engine that failed on the way.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        model_name: str,
        *,
        allow_special_tokens_in_content: bool = False,
        tool_call_parser: ToolCallFormat | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        """
        Args:
            compiler: of grammars, closed together with this; None: they are compiled in this process.
        """
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_name = model_name
        self._created = int(time.time())
        self._prompts = PromptBuilder(
            tokenizer,
            template,
            max_model_len=engine.max_model_len,
            vocab_size=engine.model_config.vocab_size,
            allow_special_tokens_in_content=allow_special_tokens_in_content,
        )
        self._starter = AnswerStarter(engine, tokenizer, model_name)
        self._rules = AnswerRules(tokenizer, template, tool_call_parser, compiler)
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="jaxserve-text")

    async def chat_completion(
        self, request: ChatCompletionRequest, observer: RequestObserver | None = None, *, lazy: bool = False
    ) -> ChatCompletion:
        """The whole answer to a conversation. Cancelling the call ends the work."""
        return await assembly.chat_completion(await self._chat_answer(request, observer, lazy))

    @overload
    async def chat_completion_stream(
        self, request: ChatCompletionRequest, observer: RequestObserver | None = None, *, lazy: Literal[False] = False
    ) -> ChunkStream[ChatCompletionChunk]: ...
    @overload
    async def chat_completion_stream(
        self, request: ChatCompletionRequest, observer: RequestObserver | None = None, *, lazy: Literal[True]
    ) -> ChunkStream[ChatCompletionChunk | WrittenChunk]: ...
    async def chat_completion_stream(
        self, request: ChatCompletionRequest, observer: RequestObserver | None = None, *, lazy: bool = False
    ) -> ChunkStream[ChatCompletionChunk | WrittenChunk]:
        """The answer chunk by chunk; it is queued when this returns, so refusals are raised here."""
        answer = await self._chat_answer(request, observer, lazy)
        return ChunkStream(answer, assembly.chat_completion_chunks(answer))

    async def completion(
        self, request: CompletionRequest, observer: RequestObserver | None = None, *, lazy: bool = False
    ) -> Completion:
        """The whole continuation of every prompt. Cancelling the call ends the work."""
        return await assembly.completion(await self._completion_answer(request, observer, lazy))

    @overload
    async def completion_stream(
        self, request: CompletionRequest, observer: RequestObserver | None = None, *, lazy: Literal[False] = False
    ) -> ChunkStream[Completion]: ...
    @overload
    async def completion_stream(
        self, request: CompletionRequest, observer: RequestObserver | None = None, *, lazy: Literal[True]
    ) -> ChunkStream[Completion | WrittenChunk]: ...
    async def completion_stream(
        self, request: CompletionRequest, observer: RequestObserver | None = None, *, lazy: bool = False
    ) -> ChunkStream[Completion | WrittenChunk]:
        """The continuations chunk by chunk; they are queued when this returns, so refusals are raised here."""
        answer = await self._completion_answer(request, observer, lazy)
        return ChunkStream(answer, assembly.completion_chunks(answer))

    async def response(
        self, request: ResponsesRequest, observer: RequestObserver | None = None, *, lazy: bool = False
    ) -> ResponseObject:
        """The whole answer, as the responses route has it. Cancelling the call ends the work."""
        return await responses_api_assembly.response(await self._response_answer(request, observer, lazy), request)

    async def response_stream(
        self, request: ResponsesRequest, observer: RequestObserver | None = None, *, lazy: bool = False
    ) -> ChunkStream[ResponseEvent]:
        """The answer event by event; it is queued when this returns, so refusals are raised here."""
        answer = await self._response_answer(request, observer, lazy)
        return ChunkStream(answer, responses_api_assembly.response_events(answer, request))

    async def tokenize(self, request: TokenizeTextRequest | TokenizeChatRequest) -> Tokens:
        """The token ids that a text or a conversation has as a prompt.

        Raises:
            BadRequestError: as for completions and chat completions; a prompt that is too long for an answer is fine,
                but not one of more than `MAX_PROMPT_TOKEN_IDS` tokens.
        """
        if request.model is not None:
            self._check_model(request.model)
        return await self._in_thread(lambda: self._tokens(request))

    def _tokens(self, request: TokenizeTextRequest | TokenizeChatRequest) -> Tokens:
        """In a thread."""
        if isinstance(request, TokenizeTextRequest):
            param = "prompt"
            adds = request.add_special_tokens
            token_ids = self._prompts.encode(request.prompt, param, add_special_tokens=adds)
        else:
            param = "messages"
            if request.tools:
                self._rules.tool_call_format()  # a model that knows no tools answers no conversation with them
            token_ids = self._prompts.chat(request, param, _told(request.tools) or None)
        if len(token_ids) > MAX_PROMPT_TOKEN_IDS:
            raise BadRequestError(
                f"`{param}` has {len(token_ids)} tokens; the limit of a response is {MAX_PROMPT_TOKEN_IDS}",
                param=param,
                code="context_length_exceeded",
            )
        token = self.tokenizer.token
        return Tokens(
            count=len(token_ids),
            max_model_len=self.engine.max_model_len,
            tokens=token_ids,
            token_strs=[token(token_id) or "" for token_id in token_ids] if request.return_token_strs else None,
        )

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizedText:
        """The text of token ids, control tokens included.

        Raises:
            BadRequestError: an id is outside the vocabulary.
        """
        if request.model is not None:
            self._check_model(request.model)
        self._check_vocabulary(request.tokens, "tokens")
        decode = self.tokenizer.decode
        return DetokenizedText(prompt=await self._in_thread(lambda: decode(request.tokens, skip_special_tokens=False)))

    def count_prompt_tokens(self, request: ChatCompletionRequest) -> int:
        """How many tokens a conversation has as a prompt. Renders and encodes in the caller's thread.

        Raises:
            BadRequestError: as for `chat_completion`.
        """
        return len(self._prompts.chat(request))

    def pin_prompt(self, system_prompt: str) -> int:
        """Computes the pages of a system prompt and keeps them, so that no conversation with it waits for that. Blocks.

        Returns:
            How many tokens it has, with the template's.

        Raises:
            BadRequestError, RequestError: the template refuses it, or it is too long.
        """
        tokens = self._prompts.system_prefix(system_prompt)
        self.engine.pin_prompt(tokens)
        return len(tokens)

    async def flush_cache(self) -> int:
        """Forgets what is kept of prompts that nobody uses now; returns how many KV pages that frees."""
        try:
            return await asyncio.wrap_future(self.engine.flush_prefix_cache())
        except EngineStoppedError as error:
            raise from_engine_error(error) from error

    def models(self) -> ModelList:
        return ModelList(object="list", data=[self.model(self.model_name)])

    def model(self, name: str) -> Model:
        """What is known of a model.

        Raises:
            NotFoundError: this server serves another one.
        """
        self._check_model(name)
        return Model(
            id=self.model_name,
            object="model",
            created=self._created,
            owned_by="jaxserve",
            max_model_len=self.engine.max_model_len,
        )

    def prepare_grammars(self) -> None:
        """Begins, in the background, what the first grammar would have to wait for: a process that knows the vocabulary."""
        self._rules.prepare()

    def close(self) -> None:
        """Stops the engine and the text threads; answers that still run fail."""
        self._rules.close()  # at once, while an engine may not come back
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.engine.shutdown()

    async def _chat_answer(
        self, request: ChatCompletionRequest, observer: RequestObserver | None, lazy: bool
    ) -> Answer:
        return await self._conversation_answer("chatcmpl", request, observer, "messages", lazy)

    async def _completion_answer(
        self, request: CompletionRequest, observer: RequestObserver | None, lazy: bool
    ) -> Answer:
        self._check_generation(request)
        constraint = await self._rules.constraint(request)
        prompts = await self._in_thread(
            lambda: self._prompts.completions(request, self._rules.shown_ids(request, None))
        )
        return self._starter.start(
            "cmpl", request, prompts, observer, has_echoes=request.echo, constraint=constraint, lazy=lazy
        )

    async def _response_answer(self, request: ResponsesRequest, observer: RequestObserver | None, lazy: bool) -> Answer:
        with own_names():
            return await self._conversation_answer("resp", request.as_chat(), observer, "input", lazy)

    async def _conversation_answer(
        self,
        kind: Literal["chatcmpl", "resp"],
        request: ChatCompletionRequest,
        observer: RequestObserver | None,
        param: str,
        lazy: bool,
    ) -> Answer:
        """Queues a conversation, whose messages errors call `param`."""
        self._check_generation(request)
        use = self._rules.tool_use(request)
        constraint = await self._rules.constraint(request, use)
        prompts = [await self._in_thread(lambda: self._conversation(request, param, use))]
        return self._starter.start(kind, request, prompts, observer, constraint=constraint, tool_use=use, lazy=lazy)

    def _conversation(self, request: ChatCompletionRequest, param: str, use: ToolUse | None) -> EncodedPrompt:
        """In a thread."""
        tools = use and _told(request.tools)
        return self._prompts.conversation(request, param, tools, self._rules.shown_ids(request, use))

    def _check_generation(self, request: GenerationRequest) -> None:
        if request.model is not None:
            self._check_model(request.model)
        self._check_vocabulary(request.stop_token_ids, "stop_token_ids")

    def _check_vocabulary(self, token_ids: Sequence[int], param: str) -> None:
        vocab_size = self.engine.model_config.vocab_size
        for position, token_id in enumerate(token_ids):
            if token_id >= vocab_size:
                raise BadRequestError(
                    f"`{param}[{position}]` is {token_id}; the vocabulary ends at {vocab_size - 1}",
                    param=f"{param}[{position}]",
                )

    def _check_model(self, name: str) -> None:
        if name != self.model_name:
            raise NotFoundError(
                f"the model {name[:200]!r} is not served here; {self.model_name!r} is",
                param="model",
                code="model_not_found",
            )

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        """The work's result.

        Raises:
            UnavailableError: this was closed before the work's turn.
        """
        try:
            future = self._threads.submit(work)
        except RuntimeError:  # the threads were shut down
            raise _stopped() from None
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if future.cancelled() and task is not None and not task.cancelling():
                raise _stopped() from None
            raise


def _stopped() -> ApiError:
    return from_engine_error(EngineStoppedError("the engine has stopped"))


def _told(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as a template tells of them."""
    return [tool.model_dump(exclude_none=True) for tool in tools]
