#!/usr/bin/env python3
"""What the server side alone can carry: streamed chunks a second, with an engine that answers at once.

    scripts/bench_server.py --streams 64 --seconds 10
    scripts/bench_server.py --paced 7

The engine gives each request its 200 tokens without delay, so that all that is timed is HTTP, validation, tokenizing,
detokenizing, JSON and the event stream. The client is a process of its own that only counts events; both report the
processor time they took, which on a shared machine says more than the wall clock.

With `--paced MS` the engine is the real one, over a device that takes that long for a step and holds no lock meanwhile. The
time of a token that the client then sees is told twice: with the engine in a thread of the server's process, and in its own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package and tests/, without installing

import numpy as np

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine.client import EngineClient
from jaxserve.engine.engine_process import ProcessSetup
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.process_messages import HostedEngine
from jaxserve.engine.remote_engine import RemoteEngine
from jaxserve.engine.request import RequestOutput
from jaxserve.engine.schedule import SampledTokens, ScheduledBatch
from jaxserve.engine.scheduler import Scheduler
from jaxserve.progress import NoProgress, Progress
from jaxserve.protocol.engine_protocol import Engine
from jaxserve.protocol.service import OpenAIService
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.app import create_app
from jaxserve.server.connection import uvicorn_config
from jaxserve.server.lifecycle import QuietServer
from jaxserve.server.listener import bind
from jaxserve.text.chat_template import ChatTemplate
from tests.fakes import MODEL_CONFIG, FakeStats, byte_tokenizer

NUM_TOKENS = 200
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


class InstantStream(AsyncIterator[RequestOutput]):
    """The whole answer, token by token, all of it there already."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._now = time.monotonic()
        self._tokens = iter(range(NUM_TOKENS))

    def abort(self, index: int | None = None) -> None:
        del index
        self._tokens = iter(())

    async def aclose(self) -> None:
        self.abort()

    async def __anext__(self) -> RequestOutput:
        number = next(self._tokens, None)
        if number is None:
            raise StopAsyncIteration
        last = number == NUM_TOKENS - 1
        return RequestOutput(
            self.request_id,
            0,
            (97 + number % 26,),
            finish_reason="length" if last else None,
            time=self._now,
            scheduled_time=self._now,
        )


class InstantEngine:
    """Has every answer at once."""

    model_config = MODEL_CONFIG
    max_model_len = 4096
    device_kind = "none"
    is_ready = True
    failure: BaseException | None = None

    def __init__(self) -> None:
        self._ids = itertools.count()

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> InstantStream:
        del prompt_token_ids, sampling, cache_salt, priority
        return InstantStream(f"request-{next(self._ids)}")

    def stats(self) -> FakeStats:
        return FakeStats(num_running=0, num_waiting=0)

    def flush_prefix_cache(self) -> Future[int]:
        raise NotImplementedError

    def pin_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        raise NotImplementedError

    def start_draining(self) -> None: ...

    async def wait_drained(self, timeout: float) -> bool:
        del timeout
        return True

    def shutdown(self) -> None: ...


class PacedRunner:
    """A device that takes as long for each step, one after the other, and says letters."""

    page_copier = None

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._idle_from = 0.0

    def launch_forward(self, batch: ScheduledBatch) -> ScheduledBatch:
        self._idle_from = max(self._idle_from, time.perf_counter()) + self._step_seconds
        return batch

    def launch_sample(self, logits: ScheduledBatch, masks: Any = None) -> tuple[float, SampledTokens]:
        del masks
        counts = np.array([1] * len(logits.decode) + [int(chunk.samples) for chunk in logits.prefill], np.int32)
        return self._idle_from, SampledTokens(np.full((len(counts), 1), 97, np.int32), counts)

    def is_ready(self, pending: tuple[float, SampledTokens]) -> bool:
        return time.perf_counter() >= pending[0]

    def fetch(self, pending: tuple[float, SampledTokens]) -> SampledTokens:
        time.sleep(max(0.0, pending[0] - time.perf_counter()))
        return pending[1]

    def close(self) -> None: ...


def start_paced(step_seconds: float, streams: int, progress: Progress) -> HostedEngine:
    """The engine over such a device; in the server's process or another one."""
    del progress
    limits = SchedulerLimits(
        max_num_seqs=streams, max_num_batched_tokens=2048, max_prefill_rows=streams, max_model_len=4096, page_size=16,
        num_pages=streams * 64,
    )  # fmt: skip
    engine = EngineClient(
        config=EngineConfig(), model_config=MODEL_CONFIG, scheduler=Scheduler(limits),
        runner=PacedRunner(step_seconds),  # type: ignore[arg-type] - no device, but all that the loop calls
        device_kind="paced",
    )  # fmt: skip
    engine.start()
    return HostedEngine(engine)


def make_engine(kind: str, arguments: argparse.Namespace) -> Engine:
    if kind == "instant":
        return InstantEngine()
    start = partial(start_paced, arguments.paced / 1e3, arguments.streams)
    if kind == "thread":
        return start(NoProgress()).engine
    return RemoteEngine(start, ProcessSetup(logging.basicConfig, NoProgress))


def serve(pipe: Connection, kind: str, arguments: argparse.Namespace) -> None:
    """The server's process. Sends its port when it listens."""
    template = ChatTemplate(TEMPLATE, bos_token="", eos_token="<|im_end|>")
    service = OpenAIService(make_engine(kind, arguments), byte_tokenizer(), template, "bench")
    config = ServerConfig(access_log="text" if arguments.access_log else "none")
    settings = uvicorn_config(create_app(service, config), config)
    listener = bind("127.0.0.1", 0)
    pipe.send(listener.getsockname()[1])
    with asyncio.Runner(loop_factory=settings.get_loop_factory()) as runner:
        runner.run(QuietServer(settings).serve(sockets=[listener]))


async def stream(
    port: int, end: float, request: bytes, times: list[tuple[float, float]] | None = None
) -> tuple[int, int]:
    """One client: asks again and again on one connection. Returns chunks and requests.

    Args:
        times: gets, of each answer, the seconds to its first chunk and the mean ones of each token after it.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    chunks = requests = 0
    while time.monotonic() < end:
        asked = time.perf_counter()
        writer.write(request)
        tail = b""
        first = 0.0
        while not tail.endswith(b"\r\n0\r\n\r\n"):
            data = await reader.read(2**16)
            if not data:
                raise ConnectionError("the server closed the connection")
            first = first or time.perf_counter()
            chunks += data.count(b"data: ")
            tail = (tail + data)[-7:]
        requests += 1
        if times is not None:
            times.append((first - asked, (time.perf_counter() - first) / (NUM_TOKENS - 1)))
    writer.close()
    await writer.wait_closed()
    return chunks, requests


def processor_seconds(pid: int) -> float:
    """Processor time that a process has taken; Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def request_bytes() -> bytes:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "Tell me a story."}], "stream": True, "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
        }
    ).encode()  # fmt: skip
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )


async def measure(port: int, pid: int, arguments: argparse.Namespace) -> dict[str, float]:
    request = request_bytes()
    await stream(port, time.monotonic() + 1.0, request)  # warm
    before, started, own = processor_seconds(pid), time.monotonic(), time.process_time()
    end = started + arguments.seconds
    times: list[tuple[float, float]] = []
    counts = await asyncio.gather(*(stream(port, end, request, times) for _ in range(arguments.streams)))
    wall = time.monotonic() - started
    processor = processor_seconds(pid) - before
    chunks, requests = (sum(numbers) for numbers in zip(*counts, strict=True))
    return {
        "streams": arguments.streams,
        "ttft_ms": round(sum(to_first for to_first, _ in times) / len(times) * 1e3, 2),
        "tpot_ms": round(sum(of_token for _, of_token in times) / len(times) * 1e3, 2),
        "chunks_per_answer": round(chunks / requests),
        "chunks_per_second": round(chunks / wall),
        "requests_per_second": round(requests / wall, 1),
        "server_cores": round(processor / wall, 2),
        "server_us_per_chunk": round(processor / chunks * 1e6, 1),
        "client_us_per_chunk": round((time.process_time() - own) / chunks * 1e6, 1),
        "chunks_per_server_core_second": round(chunks / processor),
    }


def run(kind: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Measures a server with one kind of engine: "instant", "thread" or "process"."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=serve, args=(theirs, kind, arguments)
    )  # no daemon: those may not start an engine's
    process.start()
    try:
        port = ours.recv()
        return asyncio.run(measure(port, process.pid or 0, arguments))
    finally:
        process.kill()  # an engine's process ends with it
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description="Streamed chunks a second that the server side alone can carry.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--access-log", action="store_true", help="with the server's access log as text")
    parser.add_argument("--paced", type=float, metavar="MS", help="of each step, with the engine in both its places")
    arguments = parser.parse_args()
    for kind in ("instant",) if arguments.paced is None else ("thread", "process"):
        print(json.dumps({"engine": kind, **run(kind, arguments)}), flush=True)


if __name__ == "__main__":
    main()
