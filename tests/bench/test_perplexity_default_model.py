"""What quantization costs the default model, on the text in tests/data: the table in docs/quantization.md holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

from jaxserve.bench.perplexity import perplexity
from jaxserve.checkpoint.store import load_checkpoint
from jaxserve.config import EngineConfig, Quantization
from jaxserve.engine.build import build_engine
from jaxserve.progress import NoProgress
from jaxserve.text.tokenizer import load_tokenizer
from tests.optimized_programs import optimized_programs
from tests.tiny_engine import few_programs

TEXT = Path(__file__).parents[1] / "data" / "alice.txt"
WINDOW = 512  # tokens
FEW_WINDOWS = 2  # of the text's sixteen: too few to hold it to one per cent
DENSE_OF_FEW = 28.35  # the perplexity of those, unquantized; held to by a long test

Measure = Callable[[Literal["float32", "bfloat16"], Quantization | None, int | None], float]


@pytest.fixture(scope="module")
def measure(default_model_dir: Path) -> Measure:
    """(dtype, quantization, windows; None: all) -> the perplexity."""

    @cache
    def measured(
        dtype: Literal["float32", "bfloat16"], quantization: Quantization | None, windows: int | None
    ) -> float:
        config = EngineConfig(
            dtype=dtype,
            quantization=quantization,
            max_model_len=WINDOW + 1,
            max_num_seqs=1,
            max_num_batched_tokens=256,
            enable_prefix_caching=False,
        )
        checkpoint = load_checkpoint(default_model_dir, dtype, NoProgress())
        token_ids = load_tokenizer(checkpoint.tokenizer_dir).encode(TEXT.read_text(encoding="utf-8"))
        with optimized_programs(), few_programs("greedy"):
            engine = build_engine(checkpoint.model_config, checkpoint.params, config, NoProgress())
        try:
            return perplexity(engine, token_ids[: windows and windows * WINDOW], WINDOW).value
        finally:
            engine.shutdown()

    return measured


def test_float8_costs_little_on_the_first_pages(measure: Measure) -> None:
    """Here it was 1.3%, and 2.8% with every weight in float8."""
    assert measure("float32", "fp8", FEW_WINDOWS) < 1.02 * DENSE_OF_FEW


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_first_pages_unquantized(measure: Measure) -> None:
    assert measure("float32", None, FEW_WINDOWS) == pytest.approx(DENSE_OF_FEW, rel=1e-3)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("quantization", "most"), [("fp8", 0.01), ("fp8-weight-only", 0.01), ("int8", 0.01), ("int4-32", 0.26)]
)
def test_quantized_weights_cost_no_more_than_is_told(quantization: Quantization, most: float, measure: Measure) -> None:
    dense = measure("bfloat16", None, None)
    assert dense == pytest.approx(26.16, rel=0.005)  # or the text or the model is another one
    assert measure("float32", quantization, None) < (1 + most) * dense
