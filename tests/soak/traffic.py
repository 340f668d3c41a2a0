"""What many clients do to a server at once: good requests, bad ones, and leaving early."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

BAD_BODIES: tuple[tuple[int, dict[str, Any]], ...] = (
    (400, {"prompt": "x", "temperature": 9}),
    (400, {"prompt": "x", "n": 0, "stream": True}),
    (400, {"prompt": [10**9]}),
    (400, {"prompt": "x" * 5000}),
    (400, {"promt": "x"}),
    (404, {"prompt": "x", "model": "gpt-5"}),
)


def good_bodies(random_numbers: random.Random, count: int) -> list[dict[str, Any]]:
    """Requests with one right answer each: greedy, or drawn with a seed of their own."""
    bodies: list[dict[str, Any]] = []
    for number in range(count):
        body: dict[str, Any] = {
            "prompt": "".join(random_numbers.choices("abcdefgh ", k=random_numbers.randint(1, 120))),
            "max_tokens": random_numbers.randint(1, 60),
            "temperature": random_numbers.choice([0, 0.7, 1.0]),
            "seed": number,
            "n": random_numbers.choice([1, 1, 1, 2, 3]),
            "ignore_eos": True,
        }
        if random_numbers.random() < 0.3:
            body["stop"] = [chr(random_numbers.randint(97, 122)), "zz"]
        bodies.append(body)
    return bodies


Texts = tuple[tuple[str, str], ...]  # text and finish reason of each choice


async def ask(client: httpx.AsyncClient, body: dict[str, Any], *, stream: bool) -> Texts:
    """The answer to a request, however it comes."""
    if not stream:
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return tuple((choice["text"], choice["finish_reason"]) for choice in response.json()["choices"])
    texts = [""] * body["n"]
    reasons = [""] * body["n"]
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines[-1] == "[DONE]", lines[-1]
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    return tuple(zip(texts, reasons, strict=True))


@dataclass
class Report:
    """What happened.

    Attributes:
        counts: requests by kind.
        wrong: answers that are not what the request gets alone: the request, what came, what should have.
        statuses: of all bad requests that were not answered as they should have been.
    """

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[dict[str, Any], Texts, Texts]] = field(default_factory=list)
    statuses: list[tuple[int, int]] = field(default_factory=list)


class Traffic:
    """Clients that ask again and again.

    Args:
        alone: requests, each with what it gets when nothing else runs.
    """

    def __init__(self, url: str, alone: Sequence[tuple[dict[str, Any], Texts]], seed: int) -> None:
        self.report = Report()
        self._url = url
        self._alone = alone
        self._random = random.Random(seed)

    async def run(self, num_clients: int, seconds: float) -> None:
        end = asyncio.get_running_loop().time() + seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=num_clients)
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(num_clients):
                group.create_task(self._client(client, end))

    async def _client(self, client: httpx.AsyncClient, end: float) -> None:
        while asyncio.get_running_loop().time() < end:
            draw = self._random.random()
            if draw < 0.6:
                await self._good(client)
            elif draw < 0.8:
                await self._leave(client)
            else:
                await self._bad(client)

    async def _good(self, client: httpx.AsyncClient) -> None:
        body, expected = self._random.choice(self._alone)
        stream = self._random.random() < 0.5
        answer = await ask(client, body, stream=stream)
        self.report.counts["streamed" if stream else "whole"] += 1
        if answer != expected:
            self.report.wrong.append((body, answer, expected))

    async def _bad(self, client: httpx.AsyncClient) -> None:
        status, body = self._random.choice(BAD_BODIES)
        response = await client.post("/v1/completions", json=body)
        self.report.counts["bad"] += 1
        if response.status_code != status:
            self.report.statuses.append((response.status_code, status))

    async def _leave(self, client: httpx.AsyncClient) -> None:
        """Goes away at some point of an answer."""
        body = {**self._random.choice(self._alone)[0], "stream": self._random.random() < 0.5, "max_tokens": 300}
        with suppress(TimeoutError):
            async with asyncio.timeout(self._random.uniform(0, 0.3)):
                await client.post("/v1/completions", json=body)
        self.report.counts["left"] += 1
