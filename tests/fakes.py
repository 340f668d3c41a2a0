"""A scripted engine with the real one's contract, so that protocol and server are tested without a model or jax."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from tokenizers.processors import TemplateProcessing

from jaxserve.checkpoint.tokenizer_files import TokenizerFiles, TokenizerSettings
from jaxserve.config import ModelConfig
from jaxserve.engine.draft_stats import SpeculativeStats
from jaxserve.engine.host_pages import OffloadStats
from jaxserve.engine.request import EngineStoppedError, QueueFullError, RequestError, RequestOutput, TokenLogprobs
from jaxserve.engine.time_histogram import TimeCounts
from jaxserve.protocol.service import OpenAIService
from jaxserve.sampling_params import SamplingParams
from jaxserve.template_sandbox import TemplateLimits
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer
from tests.tiny_model import CHAT_TEMPLATE, SPECIAL_TOKENS, byte_level_tokenizer

MODEL_NAME = "fake-model"
EOS = 256 + SPECIAL_TOKENS.index("<|im_end|>")
MODEL_CONFIG = ModelConfig(
    vocab_size=256 + len(SPECIAL_TOKENS), hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=8, max_position_embeddings=256, eos_token_ids=(EOS,),
)  # fmt: skip

Script = Callable[[Sequence[int], SamplingParams, int], Iterable[int]]


def say(*texts: str) -> Script:
    """Choice i says the i-th text (the last one again and again) and ends."""
    return lambda prompt, sampling, index: [*texts[min(index, len(texts) - 1)].encode(), EOS]


def endless(prompt: Sequence[int], sampling: SamplingParams, index: int) -> Iterable[int]:
    """The alphabet, for ever."""
    del prompt, sampling, index
    return itertools.cycle(b"abcdefghijklmnopqrstuvwxyz ")


@dataclass(frozen=True)
class FakeStats:
    num_running: int
    num_waiting: int
    num_pages: int = 100
    num_free_pages: int = 100
    num_preemptions: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    forced_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    uptime_s: float = 1.0
    last_step_ms: float = 1.0
    host_gap: float = 0.0
    busy_s: float = 0.0
    device_idle_s: float = 0.0
    host_s: float = 0.0
    last_host_ms: float = 0.0
    step_times: TimeCounts = field(default_factory=lambda: TimeCounts((1.0,), (0, 0), 0.0))
    host_times: TimeCounts = field(default_factory=lambda: TimeCounts((1.0,), (0, 0), 0.0))
    device_kind: str = "cpu"
    kv_offload: OffloadStats | None = None
    speculative: SpeculativeStats | None = None
    replicas: tuple[FakeStats | None, ...] = ()


def logprobs_of(token: int, count: int) -> TokenLogprobs:
    """Larger ids are likelier, and each is the second likeliest where it stands."""
    top = [(other, -1.0 - (255 - other) / 256) for other in (token + 1, token, *range(token - 1, token - 20, -1))]
    return TokenLogprobs(token, -1.0 - (255 - token) / 256, tuple((other % 256, value) for other, value in top[:count]))


class FakeStream(AsyncIterator[RequestOutput]):
    """Outputs of one request, made by one task for each choice."""

    def __init__(self, engine: FakeEngine, request_id: str, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self._engine = engine
        self._scheduled_time = time.monotonic()
        self._outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self._unfinished = set(range(sampling.n))
        self._sampling = sampling
        self._unsent_prompt: Sequence[int] | None = None if sampling.prompt_logprobs is None else prompt
        self._tasks = [asyncio.create_task(self._run(prompt, sampling, index)) for index in range(sampling.n)]

    def abort(self, index: int | None = None) -> None:
        for choice in sorted(self._unfinished) if index is None else [index]:
            self._engine.aborted.append((self.request_id, choice))
            self._finish(choice, "abort")

    async def aclose(self) -> None:
        if self._unfinished:
            self.abort()

    async def __anext__(self) -> RequestOutput:
        if not self._unfinished and self._outputs.empty():
            raise StopAsyncIteration
        return await self._outputs.get()

    def fail(self) -> None:
        """What a stopped engine does to a request that still runs."""
        for choice in sorted(self._unfinished):
            self._finish(choice, "error", error="boom in /secret/path/engine.py")

    def _finish(self, index: int, reason: str, tokens: Iterable[int] = (), **fields: object) -> None:
        if index in self._unfinished:
            self._unfinished.discard(index)
            output = self._output(index, tokens)
            self._outputs.put_nowait(output._replace(finish_reason=reason, **fields))  # type: ignore[arg-type]
            self._tasks[index].cancel()
            if not self._unfinished:
                self._engine.live.pop(self.request_id, None)

    def _output(self, index: int, tokens: Iterable[int]) -> RequestOutput:
        output = RequestOutput(
            self.request_id, index, tuple(tokens), time=time.monotonic(), scheduled_time=self._scheduled_time
        )
        logprobs_of = self._engine.logprobs_of
        if self._sampling.logprobs is not None:
            values = tuple(logprobs_of(token, self._sampling.logprobs) for token in output.token_ids)
            output = output._replace(logprobs=values)
        if index == 0 and self._unsent_prompt is not None and self._sampling.prompt_logprobs is not None:
            rest = [logprobs_of(token, self._sampling.prompt_logprobs) for token in self._unsent_prompt[1:]]
            output = output._replace(prompt_logprobs=(None, *rest))
            self._unsent_prompt = None
        return output

    async def _run(self, prompt: Sequence[int], sampling: SamplingParams, index: int) -> None:
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
        room = self._engine.max_model_len - len(prompt)
        limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        pending: list[int] = []
        for count, token in enumerate(self._engine.script(prompt, sampling, index), start=1):
            await self._engine.before_token(count)
            pending.append(token)
            if token in stops:
                self._finish(index, "stop", pending, stop_token_id=token)
                return
            if count >= limit:
                self._finish(index, "length", pending)
                return
            if len(pending) >= self._engine.tokens_per_output:
                self._outputs.put_nowait(self._output(index, pending))
                pending = []


class FakeEngine:
    """Says what its script says.

    Args:
        token_delay: seconds before each token.
        fail_after: tokens of a choice after which the engine fails the request.
        max_live: requests at once; one more is refused.
        logprobs_of: log probabilities of a token, with that many alternatives.
        replicas: numbers of the engines behind this one.

    Attributes:
        gate: while cleared, no token comes.
        live: requests that have not finished.
        submitted: what was asked, in order.
        aborted: request id and index, in order.
    """

    def __init__(
        self,
        script: Script,
        *,
        tokens_per_output: int = 1,
        token_delay: float = 0.0,
        fail_after: int | None = None,
        max_live: int = 1000,
        max_model_len: int = 256,
        logprobs_of: Callable[[int, int], TokenLogprobs] = logprobs_of,
        replicas: tuple[FakeStats | None, ...] = (),
    ) -> None:
        self.script = script
        self._replicas = replicas
        self.logprobs_of = logprobs_of
        self.tokens_per_output = tokens_per_output
        self.model_config = MODEL_CONFIG
        self.max_model_len = max_model_len
        self.device_kind = "cpu"
        self.failure: BaseException | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.live: dict[str, FakeStream] = {}
        self.submitted: list[tuple[list[int], SamplingParams]] = []
        self.salts_and_priorities: list[tuple[str | None, int]] = []
        self.aborted: list[tuple[str, int]] = []
        self.pinned: list[list[int]] = []
        self.num_flushed = 0
        self._token_delay = token_delay
        self._fail_after = fail_after
        self._max_live = max_live
        self._draining = False
        self._ids = itertools.count()

    @property
    def is_ready(self) -> bool:
        return not self._draining and self.failure is None

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> FakeStream:
        if not self.is_ready:
            raise EngineStoppedError("the engine takes no new requests")
        if not prompt_token_ids:
            raise RequestError("the prompt is empty", parameter="prompt")
        if any(token >= self.model_config.vocab_size for token in prompt_token_ids):
            raise RequestError("a token id is outside the vocabulary", parameter="prompt")
        if any(token >= self.model_config.vocab_size for token, _ in sampling.logit_bias):
            raise RequestError("a token id is outside the vocabulary", parameter="logit_bias")
        if len(prompt_token_ids) >= self.max_model_len:
            raise RequestError("the prompt is too long", parameter="prompt", code="context_length_exceeded")
        if len(self.live) >= self._max_live:
            raise QueueFullError("too many requests wait")
        self.submitted.append((list(prompt_token_ids), sampling))
        self.salts_and_priorities.append((cache_salt, priority))
        stream = FakeStream(self, f"request-{next(self._ids)}", prompt_token_ids, sampling)
        self.live[stream.request_id] = stream
        return stream

    async def before_token(self, count: int) -> None:
        await asyncio.sleep(self._token_delay)
        await self.gate.wait()
        if self._fail_after is not None and count > self._fail_after:
            self.fail(RuntimeError("boom in /secret/path/engine.py"))
            await asyncio.sleep(3600)  # the failed choice is cancelled here

    def fail(self, error: BaseException) -> None:
        """What happens when the engine thread dies."""
        self.failure = error
        self._fail_live()

    def stats(self) -> FakeStats:
        return FakeStats(
            num_running=len(self.live), num_waiting=0, num_free_pages=100 - len(self.live), replicas=self._replicas
        )

    def flush_prefix_cache(self) -> Future[int]:
        self.num_flushed += 1
        freed: Future[int] = Future()
        freed.set_result(7)
        return freed

    def pin_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        if len(prompt_token_ids) >= self.max_model_len:
            raise RequestError("the prompt is too long", parameter="prompt", code="context_length_exceeded")
        self.pinned.append(list(prompt_token_ids))

    def start_draining(self) -> None:
        self._draining = True

    async def wait_drained(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                while self.live:
                    await asyncio.sleep(0.005)
        except TimeoutError:
            return False
        return True

    def shutdown(self) -> None:
        self._draining = True
        self._fail_live()

    def _fail_live(self) -> None:
        for stream in list(self.live.values()):
            stream.loop.call_soon_threadsafe(stream.fail)


def byte_tokenizer(*, bos: bool = False) -> Tokenizer:
    """Token i is byte i; special tokens follow. With `bos`, encoding adds one in front."""
    backend = byte_level_tokenizer()
    if bos:
        backend.post_processor = TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=f"{SPECIAL_TOKENS[0]} $A", special_tokens=[(SPECIAL_TOKENS[0], 256)]
        )
    settings = TokenizerSettings(bos_token=SPECIAL_TOKENS[0], eos_token="<|im_end|>", eos_token_ids=(EOS,))
    return Tokenizer(TokenizerFiles(backend.to_str(), settings))


def fake_service(
    engine: FakeEngine,
    *,
    template: str | None = CHAT_TEMPLATE,
    bos: bool = False,
    tokenizer: Tokenizer | None = None,
    limits: TemplateLimits | None = None,
) -> OpenAIService:
    chat_template = (
        None if template is None else ChatTemplate(template, bos_token="", eos_token="<|im_end|>", limits=limits)
    )
    return OpenAIService(engine, tokenizer or byte_tokenizer(bos=bos), chat_template, MODEL_NAME)
