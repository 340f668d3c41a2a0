"""Which compiled program serves a step, by what each was measured to take."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxserve.engine.device_batch import Bucket
from jaxserve.engine.step_pace import LEAST_SHARE

logger = logging.getLogger(__name__)

_ROUNDS, _TIMED = 3, 2  # in which a program's time is measured, and its runs in each
_GAIN = 0.96  # of its own time that a larger program must stay under to take a smaller one's steps


def fastest_programs(seconds: Mapping[Bucket, float]) -> dict[Bucket, Bucket]:
    """For each bucket the one whose program serves its steps: itself, or a larger one that is faster.

    More padding can take less time: what a library chooses for a product of 128 rows may be slower than what it chooses for
    192.

    Args:
        seconds: what each program took for a step without anybody in it.
    """
    chosen = {}
    for bucket, own in seconds.items():
        best = min((other for other in seconds if _may_serve(other, bucket)), key=lambda other: seconds[other])
        chosen[bucket] = best if seconds[best] < _GAIN * own else bucket
        if chosen[bucket] != bucket:
            logger.info(
                "steps of %s take %.2f ms, those of %s %.2f ms: the latter serve both",
                bucket, own * 1e3, best, seconds[best] * 1e3,
            )  # fmt: skip
    return chosen


def added_by_prompts(seconds: Mapping[Bucket, float]) -> dict[int, dict[int, float]]:
    """What prompt tokens without context add to a step: of each number of decode rows that they ride along with, by size.

    Args:
        seconds: what each program took for a step without anybody in it.
    """
    alone = {bucket.decode_rows: took for bucket, took in seconds.items() if not bucket.prefill_tokens}
    added: dict[int, dict[int, float]] = {}
    for bucket in seconds:
        enough = [took for rows, took in alone.items() if rows >= bucket.decode_rows]
        if bucket.prefill_tokens and bucket.decode_rows and enough:
            best, decode = min(took for other, took in seconds.items() if _may_serve(other, bucket)), min(enough)
            added.setdefault(bucket.decode_rows, {})[bucket.prefill_tokens] = max(best - decode, LEAST_SHARE * decode)
    return added


def times_in_rounds(seconds: Callable[[str], float], names: Sequence[str]) -> dict[str, list[float]]:
    """What each of some programs takes, several times.

    Args:
        seconds: measures one of them once.
    """
    # Round by round, so that what disturbs the machine for a while does not meet all rounds of a program.
    rounds = [{name: seconds(name) for name in names} for _ in range(_ROUNDS)]
    return {name: [each[name] for each in rounds] for name in names}


def seconds_of_run(launch: Callable[[], object], arrays: Callable[[], Any]) -> float:
    """Seconds of one run of a program, some of which are launched ahead of each other as always.

    Args:
        arrays: those that the runs before it and its own leave behind, as they are now.
    """
    jax.block_until_ready(arrays())
    started = time.perf_counter()
    for _ in range(_TIMED):
        launch()
    jax.block_until_ready(arrays())
    return (time.perf_counter() - started) / _TIMED


def is_settled(rounds: Sequence[float]) -> bool:
    """Whether a program's time is known well enough to choose by.

    Something else that runs on the machine makes some rounds longer, and none shorter: two that agree on the least were not
    disturbed.

    Args:
        rounds: seconds that it took each time that it was measured.
    """
    return len(rounds) > 1 and min(rounds) >= _GAIN * sorted(rounds)[1]


def _may_serve(larger: Bucket, bucket: Bucket) -> bool:
    """Whether every step of a bucket fits another one, and both take prompts: without, fewer rows never take longer."""
    return larger == bucket or (
        bucket.prefill_tokens > 0
        and larger.num_drafts == bucket.num_drafts
        and larger.decode_rows >= bucket.decode_rows
        and larger.prefill_rows >= bucket.prefill_rows
        and larger.prefill_tokens >= bucket.prefill_tokens
    )
