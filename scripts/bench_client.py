#!/usr/bin/env python3
"""How many tokens a second the client of `jaxserve bench` can follow before it becomes the bottleneck.

    python scripts/bench_client.py --streams 64 --tokens-per-second 10000

A fake server in a process of its own sends one token a chunk at a fixed pace, so that what the client should see is known:
its TPOT is that pace, and all of the tokens come in their time. It tells what was seen, and the cores that both took.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection

from jaxserve.bench.client_processes import ProcessTarget, make_client
from jaxserve.bench.endpoint import EndpointOptions
from jaxserve.bench.http_target import HttpTarget, new_event_loop
from jaxserve.bench.load import LoadRun
from jaxserve.bench.records import Load, summarize
from jaxserve.bench.workload import Prompts, load_workload

EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,"model":"fake","choices":'
    b'[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class PacedAnswer(asyncio.Protocol):
    """Answers a POST with as many chunks as tokens were asked for, one each `pace` seconds."""

    def __init__(self, pace: float) -> None:
        self._pace = pace
        self._received = b""
        self._transport: asyncio.WriteTransport | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        for task in self._tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator or self._transport is None:
            return
        if head.startswith(b"GET"):
            self._received = body
            self._transport.write(NOT_FOUND)
            return
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) >= length:
            self._received = body[length:]
            task = asyncio.get_running_loop().create_task(
                self._send(self._transport, json.loads(body[:length])["max_tokens"])
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self, transport: asyncio.WriteTransport, count: int) -> None:
        loop = asyncio.get_running_loop()
        transport.write(HEAD)
        begun = loop.time()
        token = chunk(EVENT)
        for number in range(count):
            delay = begun + number * self._pace - loop.time()
            if delay > 0:
                await asyncio.sleep(delay)
            transport.write(token)
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":6,"completion_tokens":%d}}\n\n' % count
        transport.write(chunk(usage) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def serve(pipe: Connection, pace: float) -> None:
    """The server's process. Sends its port; at the end, the processor time that it took."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: PacedAnswer(pace), "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await loop.run_in_executor(None, pipe.recv)
        pipe.send(time.process_time())

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens-per-second", type=float, default=10_000, help="over all streams")
    parser.add_argument("--tokens", type=int, default=500, help="of an answer")
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--client", choices=["own", "openai"], default="own")
    parser.add_argument("--client-processes", type=int, default=1)
    arguments = parser.parse_args()
    pace = arguments.streams / arguments.tokens_per_second
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, pace), daemon=True)
    server.start()
    options = EndpointOptions(f"http://127.0.0.1:{ours.recv()}", model="fake")
    prompts = Prompts(1000)
    target: HttpTarget | ProcessTarget
    if arguments.client_processes == 1:
        target = HttpTarget(options, "fake", prompts, make_client(arguments.client, options))
    else:
        target = ProcessTarget(options, prompts, client=arguments.client, processes=arguments.client_processes)
    workload = load_workload(f"fixed:6/{arguments.tokens}")
    load = Load("concurrency", arguments.streams)
    try:
        LoadRun(target, workload, load, arguments.streams).run(600)
        own, started = time.process_time(), time.perf_counter()
        run = LoadRun(target, workload, load, arguments.requests).run(600)
        wall, own = time.perf_counter() - started, time.process_time() - own
        summary = summarize(load, [run])
    finally:
        target.close()
        ours.send(None)
        server_time = ours.recv()
        server.join()
    print(
        f"{arguments.client} client, {arguments.streams} streams, one token every {pace * 1e3:.3f} ms each "
        f"({arguments.tokens_per_second:,.0f} tokens/s): saw {summary.output_tokens_per_second:,.0f} tokens/s, "
        f"TPOT mean {summary.tpot_ms['mean']:.3f} ms ({summary.tpot_ms['mean'] / pace / 1e3 - 1:+.2%}), "
        f"p99 {summary.tpot_ms['p99']:.3f} ms; {own / wall:.2f} cores in this process "
        f"({own / run.output_tokens * 1e6:.0f} us a token), {server_time:.1f} s of a core in the server in all"
    )


if __name__ == "__main__":
    main()
