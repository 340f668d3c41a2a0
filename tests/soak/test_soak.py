"""A real server with a tiny model and far too few pages, under mixed traffic: nothing lost, mixed up, or left behind."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.harness import raw_request
from tests.server.processes import ServerProcess, server_process
from tests.soak.traffic import Choice, Traffic, ask, good_questions

LAUNCH = "from jaxserve.cli.main import main; main()"
NUM_CLIENTS = 24
MAX_GROWTH = 48 * 2**20  # bytes that the server may grow by once it is warm: its allocator's slack


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    options = {
        "--port": "0", "--max-num-seqs": "8", "--max-num-batched-tokens": "64", "--num-pages": "40",
        "--max-num-queued-requests": "2000", "--access-log": "none",
    }  # fmt: skip
    flags = [part for pair in options.items() for part in pair]
    with server_process(["-c", LAUNCH, "serve", str(tiny_model_dir), *flags], folder / "log") as process:
        process.wait_ready()
        yield process
        process.process.terminate()
        assert process.exit_code() == 0
        assert "Traceback" not in process.log


def stats(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/stats").json()


def wait_idle(url: str, seconds: float) -> None:
    """Nothing runs, nothing waits, and every page is free."""
    deadline = time.monotonic() + seconds
    while True:
        now = stats(url)
        if now["num_running"] == now["num_waiting"] == 0 and now["num_free_pages"] == now["num_pages"]:
            return
        assert time.monotonic() < deadline, f"something stayed behind: {now}"
        time.sleep(0.02)


def memory(server: ServerProcess) -> int:
    """Bytes of the process that are in memory."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def soak(server: ServerProcess, seconds: float) -> None:
    url = server.url()

    async def alone() -> list[Any]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            questions = good_questions(random.Random(0), 60)
            return [(question, await ask(client, question, stream=False)) for question in questions]

    traffic = Traffic(url, asyncio.run(alone()), seed=1)
    asyncio.run(traffic.run(NUM_CLIENTS, seconds / 4))  # until every buffer has its size
    warm = memory(server)
    asyncio.run(traffic.run(NUM_CLIENTS, seconds * 3 / 4))
    report = traffic.report
    wait_idle(url, 10)
    assert not report.wrong, f"{len(report.wrong)} of {report.counts}: {report.wrong[:3]}"
    assert not report.statuses
    assert min(report.counts[kind] for kind in ("streamed", "whole", "left", "bad")) > 0
    assert stats(url)["num_preemptions"] > 0  # else the pool is not tiny
    assert memory(server) - warm < MAX_GROWTH


LONG_PROMPT = "Once upon a time there was " * 4  # with 100 tokens of an answer 14 pages of the 40, for 8 sequences
SEEDED: dict[str, Any] = {"seed": 3, "temperature": 0.9, "frequency_penalty": 1, "max_tokens": 100, "ignore_eos": True}
SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 20, "maxItems": 20}
PREEMPTED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**SEEDED, "prompt": LONG_PROMPT, "logprobs": 3}),
    ("/v1/chat/completions", {
        **SEEDED, "messages": [{"role": "user", "content": LONG_PROMPT}], "logprobs": True, "top_logprobs": 3, "n": 2,
    }),
    ("/v1/chat/completions", {
        "messages": [{"role": "user", "content": LONG_PROMPT}], "max_tokens": 80, "seed": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
    }),
]  # fmt: skip


async def told(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], salt: str, *, stream: bool
) -> dict[str, Any]:
    """What a client is told, that must not depend on how often its request was put aside."""
    body = {**body, "cache_salt": salt}  # nobody's pages are another's: as many tokens are cached each time
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    if not stream:
        parts = [response.json()]
    else:
        lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
        assert lines[-1] == "[DONE]"
        parts = [json.loads(line) for line in lines[:-1]]
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert all(part["usage"]["prompt_tokens"] == parts[-1]["usage"]["prompt_tokens"] for part in parts)
    choices = [Choice() for _ in range(body.get("n", 1))]
    for part in parts:
        for choice in part["choices"]:
            choices[choice["index"]].add(choice)
    return {"choices": choices, "usage": parts[-1]["usage"]}


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_told_after_preemption(server: ServerProcess, stream: bool) -> None:
    """Text, tokens with log probabilities, finish reasons and usage are what they are for a request alone."""
    url = server.url()

    async def ask_all() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            for number, (path, body) in enumerate(PREEMPTED):
                alone = await told(client, path, body, f"alone {number} {stream}", stream=stream)
                assert alone["usage"]["completion_tokens"] <= 200
                before = stats(url)["num_preemptions"]
                for attempt in range(5):  # on a busy machine they may come so late that some are done by then
                    salts = [f"{number} {stream} {attempt} {twin}" for twin in range(6)]
                    together = await asyncio.gather(*(told(client, path, body, salt, stream=stream) for salt in salts))
                    assert all(answer == alone for answer in together)
                    if stats(url)["num_preemptions"] > before:
                        break
                assert stats(url)["num_preemptions"] > before

    asyncio.run(ask_all())
    wait_idle(url, 10)


def test_soak_for_some_seconds(server: ServerProcess) -> None:
    soak(server, 10)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_soak_for_ten_minutes(server: ServerProcess) -> None:
    soak(server, 600)


@pytest.mark.parametrize("stream", [False, True])
def test_two_hundred_clients_that_vanish(server: ServerProcess, stream: bool) -> None:
    url = server.url()
    port = int(url.rsplit(":", 1)[1])
    body = {"prompt": "x" * 50, "max_tokens": 400, "ignore_eos": True, "stream": stream}

    async def come_and_go() -> None:
        writers = await asyncio.gather(*(raw_request(port, "/v1/completions", body) for _ in range(200)))
        await asyncio.sleep(0.5)
        for writer in writers:
            writer.transport.abort()

    asyncio.run(come_and_go())
    started = time.monotonic()
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 3}, timeout=30)
    assert answer.status_code == 200
    assert time.monotonic() - started < 5
    wait_idle(url, 5)
    metrics = httpx.get(f"{url}/metrics").text.splitlines()
    assert "jaxserve:num_requests_running 0.0" in metrics
    assert "jaxserve:num_requests_waiting 0.0" in metrics
    assert "jaxserve:kv_cache_usage_perc 0.0" in metrics
    assert httpx.get(f"{url}/load").json() == {"server_load": 0}
