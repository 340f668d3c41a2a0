#!/usr/bin/env python3
"""Whether `jaxserve bench --endpoint` tells what another client sees of the same traffic.

    python scripts/check_bench_client.py llama-3-8b --concurrency 1,16,64 --rounds 3 --processes 8
    python scripts/check_bench_client.py --paced 7 --concurrency 1,8 --rounds 3
    python scripts/check_bench_client.py --endpoint http://127.0.0.1:8000 --concurrency 8

The other client shares no code with the benchmark: httpx, and its own clock, sums and loop. Both hold as many requests of
the same lengths in flight, in the same order, one after the other in each round; the figures are medians of the rounds. One
that differs by more than `--limit` per cent is named in the last line, and ends the script with status 1.

MODEL is served here without a prefix cache (prompts come again in every round), on a GPU with the engine in a process of its
own. `--paced` serves the engine over a fake device whose steps take as long as is said: what differs then is the clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package, without installing

import httpx

ROOT = Path(__file__).resolve().parents[1]
FIGURES = {
    "TPOT mean, ms": 1e3,
    "TPOT p90, ms": 1e3,
    "TTFT mean, ms": 1e3,
    "TTFT median, ms": 1e3,
    "tokens/s": 1.0,
}  # with their factor to seconds


@dataclass
class Seen:
    """What one process of the other client saw; times in seconds of the machine's monotonic clock."""

    tpot: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    last_end: float = 0.0  # of a measured request
    chunks: list[float] = field(default_factory=list)  # when each chunk with text came
    tokens: int = 0  # of whole answers, as the server counted them
    whole_chunks: int = 0  # that these came in


async def ask(client: httpx.AsyncClient, body: dict[str, object], seen: Seen, *, measured: bool) -> None:
    """Streams one answer and notes its times."""
    request = client.build_request("POST", "/v1/completions", json=body)
    sent, first, last, tokens, count = time.monotonic(), 0.0, 0.0, 0, 0
    answer = await client.send(request, stream=True)
    async with aclosing(answer):
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now, event = time.monotonic(), json.loads(line[6:])
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            if any(choice["text"] for choice in event["choices"]):
                first, last, count = first or now, now, count + 1
                seen.chunks.append(now)
    seen.tokens += tokens
    seen.whole_chunks += count
    if measured:
        seen.tpot.append((last - first) / (tokens - 1))
        seen.ttft.append(first - sent)
        seen.last_end = time.monotonic()


async def hold(
    pipe: Connection, url: str, bodies: list[dict[str, object]], workers: int, first: int, stride: int
) -> None:
    """Keeps `workers` requests in flight; of those of all processes the first `len(bodies)` are measured."""
    seen, limits = Seen(), httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        first_body = {**bodies[0], "prompt": [5], "max_tokens": 2}
        # What is set up once, connections among it.
        await asyncio.gather(*(ask(client, first_body, Seen(), measured=False) for _ in range(workers)))
        numbers = iter(range(first, sys.maxsize, stride))
        own = len(range(first, len(bodies), stride))

        async def work() -> None:
            for number in numbers:
                await ask(client, bodies[number % len(bodies)], seen, measured=number < len(bodies))
                if len(seen.tpot) == own and number < len(bodies):
                    pipe.send("measured")

        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        tasks = [asyncio.create_task(work()) for _ in range(workers)]
        over = asyncio.create_task(asyncio.to_thread(pipe.recv))
        await asyncio.wait([*tasks, over], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()  # a worker ends by an error only
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    pipe.send(seen)


def hold_in_process(pipe: Connection, *arguments: object) -> None:
    asyncio.run(hold(pipe, *arguments))  # type: ignore[arg-type]


def other_client(url: str, bodies: list[dict[str, object]], concurrency: int, processes: int) -> dict[str, float]:
    """One round of the other client."""
    processes = min(processes, concurrency)
    context = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    for number in range(processes):
        ours, theirs = context.Pipe()
        share = len(range(number, concurrency, processes))
        arguments = (theirs, url, bodies, share, number, processes)
        worker = context.Process(target=hold_in_process, args=arguments, daemon=True)
        worker.start()
        theirs.close()
        pipes.append(ours)
        workers.append(worker)
    for pipe in pipes:
        pipe.recv()  # ready
    started = time.monotonic()
    for pipe in pipes:
        pipe.send("go")
    for pipe in pipes:
        pipe.recv()  # measured
    for pipe in pipes:
        pipe.send("stop")
    seen: list[Seen] = [pipe.recv() for pipe in pipes]
    for worker in workers:
        worker.join()
    end = max(part.last_end for part in seen)
    per_chunk = sum(part.tokens for part in seen) / sum(part.whole_chunks for part in seen)
    tokens = per_chunk * sum(moment <= end for part in seen for moment in part.chunks)
    tpot = sorted(value for part in seen for value in part.tpot)
    ttft = [value for part in seen for value in part.ttft]
    place = 0.9 * (len(tpot) - 1)
    low, rest = tpot[int(place)], place - int(place)
    p90 = low + rest * (tpot[min(int(place) + 1, len(tpot) - 1)] - low)
    return dict(zip(FIGURES, (fmean(tpot), p90, fmean(ttft), median(ttft), tokens / (end - started)), strict=True))


def the_benchmark(url: str, workload: str, concurrency: int, requests: int, processes: int) -> dict[str, float]:
    """One round of `jaxserve bench`, as anybody starts it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "jaxserve", "bench", "--endpoint", url, "--workload", workload, "--concurrency",
            str(concurrency), "--num-requests", str(requests), "--vocab-size", "256", "--output", f"{folder}/run.json",
            *(["--client-processes", str(processes)] if processes > 1 else []),
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        [summary] = json.loads(Path(folder, "run.json").read_text())["summaries"]
    tpot, ttft = summary["tpot_ms"], summary["ttft_ms"]
    figures = (tpot["mean"], tpot["p90"], ttft["mean"], ttft["p50"])
    rate = summary["output_tokens_per_second"]
    return dict(zip(FIGURES, (*(value / 1e3 for value in figures), rate), strict=True))


def request_bodies(model: str, workload: str, count: int) -> list[dict[str, object]]:
    """Requests of the workload's lengths, in its order: those of both clients differ in their token ids alone."""
    if workload == "sharegpt-like":
        lengths = json.loads((ROOT / "jaxserve" / "bench" / "sharegpt_like_lengths.json").read_text())
    else:
        lengths = [[int(part) for part in workload.removeprefix("fixed:").split("/")]]
    draw = random.Random(1)
    return [
        {
            "model": model, "prompt": [draw.randrange(256) for _ in range(prompt)], "max_tokens": output,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        }
        for prompt, output in (lengths[number % len(lengths)] for number in range(count))
    ]  # fmt: skip


@contextmanager
def paced_server(step_ms: float, streams: int) -> Iterator[str]:
    from bench_server import serve  # beside this file

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    settings = argparse.Namespace(paced=step_ms, streams=streams, access_log=False)
    server = context.Process(target=serve, args=(theirs, "process", settings))
    server.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        server.terminate()
        server.join()


@contextmanager
def model_server(model: str, streams: int) -> Iterator[str]:
    from jaxserve.bench.engine_run import start_engine
    from jaxserve.bench.http_comparison import serving
    from jaxserve.bench.in_own_process import start_remote_engine
    from jaxserve.cli.logs import configure_logging
    from jaxserve.config import EngineConfig
    from jaxserve.device_memory import claim_device_memory
    from jaxserve.engine.engine_process import ProcessSetup
    from jaxserve.engine.process_choice import has_own_process
    from jaxserve.progress_display import progress_on

    config = EngineConfig(enable_prefix_caching=False, max_num_seqs=streams)
    claim_device_memory(config.gpu_memory_utilization, 1)
    if has_own_process("auto", config):
        engine = start_remote_engine(model, config, ProcessSetup(partial(configure_logging, 0), progress_on))
    else:
        engine = start_engine(model, config, progress_on())
    try:
        with serving(engine) as url:
            yield url
    finally:
        engine.shutdown()


def compare(url: str, arguments: argparse.Namespace) -> list[str]:
    """Tells both clients' figures; those that they do not agree in."""
    model = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
    apart_in = []
    for concurrency in (int(part) for part in arguments.concurrency.split(",")):
        requests = arguments.requests or max(8, 3 * concurrency)
        bodies = request_bodies(model, arguments.workload, requests)
        rounds = []
        for _ in range(arguments.rounds):
            bench = the_benchmark(url, arguments.workload, concurrency, requests, arguments.processes)
            rounds.append((bench, other_client(url, bodies, concurrency, arguments.processes)))
        for name, unit in FIGURES.items():
            bench, other = (median(each[side][name] for each in rounds) * unit for side in (0, 1))
            apart = 100 * (bench / other - 1)
            is_client = name.startswith("TTFT") and abs(bench - other) <= arguments.ttft_slack_ms
            if abs(apart) > arguments.limit and not is_client:
                apart_in.append(f"{name} at {concurrency} ({apart:+.2f}%)")
            print(f"{concurrency} in flight, {name}: bench {bench:.2f}, httpx {other:.2f} ({apart:+.2f}%)", flush=True)
    return apart_in


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="to be served here")
    parser.add_argument("--endpoint", help="URL of a server without a prefix cache, in place of MODEL")
    parser.add_argument("--paced", type=float, metavar="MS", help="of each step of a fake device, in place of MODEL")
    parser.add_argument("--workload", default="sharegpt-like", help="or fixed:PROMPT/OUTPUT")
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--requests", type=int, help="of a round; unset: max(8, 3 x concurrency)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="that each client spreads its streams over")
    parser.add_argument("--limit", type=float, default=2.0, metavar="PERCENT")
    parser.add_argument(
        "--ttft-slack-ms",
        type=float,
        default=1.0,
        help="that TTFTs may differ by anyhow: a client's own time is in them",
    )
    arguments = parser.parse_args()
    if [arguments.model, arguments.endpoint, arguments.paced].count(None) != 2:
        parser.error("give one of MODEL, --endpoint and --paced")
    streams = max(int(part) for part in arguments.concurrency.split(","))
    if arguments.endpoint:
        apart_in = compare(arguments.endpoint.rstrip("/").removesuffix("/v1"), arguments)
    elif arguments.paced is not None:
        with paced_server(arguments.paced, streams) as url:
            apart_in = compare(url, arguments)
    else:
        with model_server(arguments.model, streams) as url:
            apart_in = compare(url, arguments)
    if apart_in:
        print(f"the clients differ by more than {arguments.limit:g}% in {', '.join(apart_in)}")
    else:
        print(f"the clients agree within {arguments.limit:g}% (TTFT: or {arguments.ttft_slack_ms:g} ms)")
    sys.exit(bool(apart_in))


if __name__ == "__main__":
    main()
