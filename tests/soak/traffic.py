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


@dataclass(frozen=True)
class Question:
    """A request with one right answer: greedy, or drawn with a seed of its own."""

    path: str
    body: dict[str, Any]


def good_questions(random_numbers: random.Random, count: int) -> list[Question]:
    """Requests of all kinds that the two routes with several choices take."""
    questions: list[Question] = []
    for number in range(count):
        said = "".join(random_numbers.choices("abcdefgh ", k=random_numbers.randint(1, 120)))
        body: dict[str, Any] = {
            "max_tokens": random_numbers.randint(1, 60),
            "temperature": random_numbers.choice([0, 0.7, 1.0]),
            "top_p": random_numbers.choice([1, 0.9]),
            "seed": number,
            "n": random_numbers.choice([1, 1, 1, 2, 3]),
            "ignore_eos": True,
        }
        if random_numbers.random() < 0.3:
            body["stop"] = [chr(random_numbers.randint(97, 122)), "zz"]
        if random_numbers.random() < 0.3:
            body |= {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.1}
        if random_numbers.random() < 0.2:
            body["logit_bias"] = {"97": 3, "98": -100}
        has_logprobs = random_numbers.random() < 0.3
        if random_numbers.random() < 0.4:
            body |= {"messages": [{"role": "user", "content": said}], "logprobs": has_logprobs}
            questions.append(Question("/v1/chat/completions", body))
        else:
            body |= {"prompt": said, "logprobs": 2 if has_logprobs else None, "echo": random_numbers.random() < 0.2}
            questions.append(Question("/v1/completions", body))
    return questions


@dataclass
class Choice:
    """One choice as its client has it, with the tokens that log probabilities were told of."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)

    def add(self, choice: dict[str, Any]) -> None:
        """A whole choice, or the next piece of one."""
        said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        self.text += said.get("content") or ""
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        logprobs = choice["logprobs"] or {}
        self.tokens += logprobs.get("tokens") or [token["token"] for token in logprobs.get("content") or ()]


async def ask(client: httpx.AsyncClient, question: Question, *, stream: bool) -> list[Choice]:
    """The answer to a request, however it comes."""
    choices = [Choice() for _ in range(question.body["n"])]
    if not stream:
        response = await client.post(question.path, json=question.body)
        assert response.status_code == 200, response.text
        parts = [response.json()]
    else:
        async with client.stream("POST", question.path, json={**question.body, "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
        assert lines[-1] == "[DONE]", lines[-1]
        parts = [json.loads(line) for line in lines[:-1]]
    for part in parts:
        for choice in part["choices"]:
            choices[choice["index"]].add(choice)
    return choices


@dataclass
class Report:
    """What happened.

    Attributes:
        counts: requests by kind.
        wrong: answers that are not what the request gets alone: the request, what came, what should have.
        statuses: of all bad requests that were not answered as they should have been.
    """

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[Question, list[Choice], list[Choice]]] = field(default_factory=list)
    statuses: list[tuple[int, int]] = field(default_factory=list)


class Traffic:
    """Clients that ask again and again.

    Args:
        alone: requests, each with what it gets when nothing else runs.
    """

    def __init__(self, url: str, alone: Sequence[tuple[Question, list[Choice]]], seed: int) -> None:
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
        question, expected = self._random.choice(self._alone)
        stream = self._random.random() < 0.5
        answer = await ask(client, question, stream=stream)
        self.report.counts["streamed" if stream else "whole"] += 1
        if answer != expected:
            self.report.wrong.append((question, answer, expected))

    async def _bad(self, client: httpx.AsyncClient) -> None:
        status, body = self._random.choice(BAD_BODIES)
        response = await client.post("/v1/completions", json=body)
        self.report.counts["bad"] += 1
        if response.status_code != status:
            self.report.statuses.append((response.status_code, status))

    async def _leave(self, client: httpx.AsyncClient) -> None:
        """Goes away at some point of an answer."""
        question = self._random.choice(self._alone)[0]
        body = {**question.body, "stream": self._random.random() < 0.5, "max_tokens": 300}
        with suppress(TimeoutError):
            async with asyncio.timeout(self._random.uniform(0, 0.3)):
                await client.post(question.path, json=body)
        self.report.counts["left"] += 1
