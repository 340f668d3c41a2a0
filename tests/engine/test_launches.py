"""Which programs an engine on a GPU runs at its start, and how many of them each step launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from jaxserve.engine.build_heads import random_head
from jaxserve.engine.device_batch import Bucket
from jaxserve.engine.executable_cache import ExecutableCache
from jaxserve.engine.pending import PendingLogits
from jaxserve.engine.runner import ModelRunner
from jaxserve.engine.schedule import ScheduledBatch
from jaxserve.speculative_config import HEAD_METHODS, SpeculativeConfig
from tests.engine.lean_engine import lean_engine
from tests.engine.test_engine import until_idle
from tests.engine.test_speculative import greedy
from tests.tiny_engine import MODEL_CONFIG, Answer


class Launches(Counter[str]):
    """Of each program, by its name."""

    def counted(self, name: str, program: Any) -> Any:
        launches = self
        self[name] = 0

        class Counted:
            def __call__(self, *arguments: Any) -> Any:
                launches[name] += 1
                return program(*arguments)

            def __getattr__(self, attribute: str) -> Any:
                return getattr(program, attribute)

        return Counted()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    counts = Launches()
    load_or_compile = ExecutableCache.load_or_compile

    def counted(programs: ExecutableCache, name: str, lower: Callable[[], Any], **options: Any) -> Any:
        return counts.counted(name, load_or_compile(programs, name, lower, **options))

    monkeypatch.setattr(ExecutableCache, "load_or_compile", counted)
    return counts


def speculation(method: Any) -> dict[str, Any]:
    if method is None:
        return {}
    config = SpeculativeConfig(method, 3, model="of the test" if method in HEAD_METHODS else None)
    head = random_head(config, MODEL_CONFIG, 0) if method in HEAD_METHODS else None
    return {"speculative": config, "draft": head}


@pytest.mark.parametrize(
    "method", [None, "eagle", *(pytest.param(name, marks=pytest.mark.long) for name in ("ngram", "medusa"))]
)
def test_every_program_has_been_set_up_when_the_engine_is_ready(method: str | None, launches: Launches) -> None:
    """Its first run loads code and its second makes its launch graph: nobody's first token is to wait for that."""
    with lean_engine(**speculation(method), layerwise=False):
        few = {name: count for name, count in launches.items() if count < 2}
        assert len(launches) > 2 and not few


@pytest.mark.parametrize("method", ["eagle", pytest.param("early_exit", marks=pytest.mark.long)])
def test_prompts_that_end_in_a_step_cost_it_no_launches_of_their_own(
    method: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that looks at drawn tokens alone is not told those of prompts."""
    steps: list[tuple[ScheduledBatch, Counter[str]]] = []
    launch = ModelRunner.launch_forward

    def noted(runner: ModelRunner, batch: ScheduledBatch) -> PendingLogits:
        steps.append((batch, Counter(launches)))
        return launch(runner, batch)

    monkeypatch.setattr(ModelRunner, "launch_forward", noted)
    with lean_engine(**speculation(method), layerwise=False) as engine:
        Answer(engine, [3, 4, 5], greedy(max_tokens=6, n=3)).wait()
        until_idle(engine)
    assert any(sum(chunk.samples for chunk in batch.prefill) == 3 for batch, _ in steps)
    for (_, before), (_, after) in pairwise(steps):
        assert max((after - before).values()) == 1


@pytest.mark.parametrize("layerwise", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_it_takes_to_show_a_head_prompts_is_measured_at_the_start(
    layerwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready: list[ModelRunner] = []
    warm_up = ModelRunner.warm_up

    def noted(runner: ModelRunner, *arguments: Any, **options: Any) -> None:
        warm_up(runner, *arguments, **options)
        ready.append(runner)

    monkeypatch.setattr(ModelRunner, "warm_up", noted)
    with lean_engine(**speculation("eagle"), layerwise=layerwise):
        (runner,) = ready
        assert runner.showing_seconds is not None
        assert list(runner.showing_seconds) == [Bucket(3, 3, 20)]
        assert all(seconds > 0 for seconds in runner.showing_seconds.values())
