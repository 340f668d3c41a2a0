"""Requests that come, go and are aborted at random, which must get what each gets alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

from jaxserve.engine.client import EngineClient
from jaxserve.sampling_params import SamplingParams
from tests.tiny_engine import TIMEOUT, Answer

Requests = list[tuple[list[int], SamplingParams]]


class RandomTraffic:
    """What an engine gave for requests of which some were aborted.

    Args:
        pauses: outputs that are waited for between two requests, of which one number is drawn each time.
        abort_share, flush_share: after which share of the requests one of those so far is aborted, or the prefix cache is
            emptied.
    """

    def __init__(
        self,
        engine: EngineClient,
        requests: Requests,
        *,
        seed: int,
        pauses: Sequence[int],
        abort_share: float,
        flush_share: float,
    ) -> None:
        self._requests = requests
        self._aborted: set[int] = set()
        rng = random.Random(seed)
        answers: list[Answer] = []
        for number, (prompt, sampling) in enumerate(requests):
            answers.append(Answer(engine, prompt, sampling))
            for _ in range(rng.choice(pauses)):
                unfinished = [answer for answer in answers if not all(answer.reasons)]
                if unfinished:
                    rng.choice(unfinished).next()
            if rng.random() < abort_share:
                victim = rng.randrange(number + 1)
                engine.abort(answers[victim].request_id)
                self._aborted.add(victim)
            if rng.random() < flush_share:
                engine.flush_prefix_cache().result(TIMEOUT)
        self._together = [answer.wait() for answer in answers]

    def check(self, plain: EngineClient) -> None:
        """Each request got what it gets alone, or the beginning of that where it was aborted."""
        for number, (prompt, sampling) in enumerate(self._requests):
            alone = Answer(plain, prompt, sampling).wait()
            if number in self._aborted:
                alone = [choice[: len(given)] for choice, given in zip(alone, self._together[number], strict=True)]
            assert self._together[number] == alone
