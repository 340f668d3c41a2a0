"""Programs of an earlier start whose sizes were others must not serve a later one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.config import EngineConfig
from jaxserve.engine.build import build_engine
from jaxserve.progress import NoProgress
from jaxserve.sampling_params import SamplingParams
from tests.tiny_engine import MODEL_CONFIG, Answer, tiny_params

PROMPT = tuple(range(5, 25))


@pytest.fixture
def kept_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the engines of a test keep their programs: not in jax's cache."""
    folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setenv("JAXSERVE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield tmp_path / "compiled"
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


def prompt_logprobs(max_num_batched_tokens: int) -> list[float]:
    config = EngineConfig(
        max_num_seqs=1, max_num_batched_tokens=max_num_batched_tokens, max_model_len=64, page_size=8, num_pages=16
    )
    engine = build_engine(MODEL_CONFIG, tiny_params(), config, NoProgress())  # with every size that a user's has
    try:
        answer = Answer(engine, PROMPT, SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1))
        told = []
        while not answer.reasons[0]:
            output = answer.next()
            told += [each.logprob for each in output.prompt_logprobs or () if each is not None]
        return told
    finally:
        engine.shutdown()


def test_more_tokens_a_step_than_at_the_start_before(kept_programs: Path) -> None:
    """What a step leaves for the prompt's log probabilities has room for the largest step."""
    first = prompt_logprobs(64)
    assert len(first) == len(PROMPT) - 1
    assert list(kept_programs.glob("*.executable"))
    assert prompt_logprobs(96) == pytest.approx(first, abs=1e-4)
