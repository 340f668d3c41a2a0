"""An engine that files of tests share: it has every program that there is, which takes longest to compile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.client import EngineClient
from tests.tiny_engine import tiny_engine


@pytest.fixture(scope="session")
def small_engine() -> Iterator[EngineClient]:
    """72 tokens of KV cache for four sequences of up to 64: they cannot all stay."""
    config = EngineConfig(
        max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, page_size=4, num_pages=18, seed=0
    )
    with tiny_engine(config) as engine:
        yield engine
