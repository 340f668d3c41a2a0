"""What files of tests share: an engine that has every program that there is, and programs that are kept between starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.config import EngineConfig
from jaxserve.engine import capacity
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


@pytest.fixture
def without_jax_cache() -> Iterator[str]:
    """As `program_folder` sees to it: programs are kept in jax's own cache or here, never in both. Yields jax's folder."""
    folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield folder
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says how many bytes of the machine's memory are free."""

    def have(free: int) -> None:
        monkeypatch.setattr(capacity, "available_host_bytes", lambda: free)

    have(64 * 1024**2)
    return have
