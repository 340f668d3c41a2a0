"""Programs of an earlier start whose sizes were others must not serve a later one."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.config import EngineConfig
from jaxserve.sampling_params import SamplingParams
from tests.tiny_engine import Answer, tiny_engine

PROMPT = tuple(range(5, 25))


def prompt_logprobs(max_num_batched_tokens: int) -> list[float]:
    config = EngineConfig(
        max_num_seqs=1, max_num_batched_tokens=max_num_batched_tokens, max_model_len=64, page_size=8, num_pages=16
    )
    with tiny_engine(config) as engine:
        answer = Answer(engine, PROMPT, SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1))
        told = []
        while not answer.reasons[0]:
            output = answer.next()
            told += [each.logprob for each in output.prompt_logprobs or () if each is not None]
        return told


@pytest.mark.usefixtures("without_jax_cache")
def test_more_tokens_a_step_than_at_the_start_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step leaves for the prompt's log probabilities has room for the largest step."""
    monkeypatch.setenv("JAXSERVE_HOME", str(tmp_path))
    first = prompt_logprobs(64)
    assert len(first) == len(PROMPT) - 1
    assert list((tmp_path / "compiled").glob("*.executable"))
    assert prompt_logprobs(96) == pytest.approx(first, abs=1e-4)
