"""Logits against transformers: a tiny checkpoint of every model option, converted, loaded, run over a paged cache.

The references are made by `scripts/make_goldens.py`, which tells what is in them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.store import load_checkpoint
from jaxserve.config import ModelConfig
from jaxserve.models.params import LlamaParams
from jaxserve.progress import NoProgress
from tests.long_cases import few_of
from tests.models.paged_model import PagedModel

FOLDER = Path(__file__).parent.parent / "goldens" / "tiny"
NAMES = sorted(path.stem for path in FOLDER.glob("*.npz"))
TOLERANCE = 1e-4  # over the whole vocabulary
PADDING_TOLERANCE = 1e-5
CHUNK = 1024  # tokens of a prefill step, for the long prompt


@dataclass(frozen=True)
class Golden:
    """A converted tiny checkpoint and what transformers computes with it."""

    config: ModelConfig
    params: LlamaParams
    prompt_ids: list[int]
    prefill_logits: np.ndarray  # [last positions, vocab]
    tokens: list[int]  # [steps + 1]
    decode_logits: np.ndarray  # [steps, vocab]

    def model(self, **options: int | float) -> PagedModel:
        page_size = 8 if len(self.prompt_ids) < CHUNK else 64
        capacity = len(self.prompt_ids) + len(self.tokens)
        return PagedModel(self.config, self.params, capacity=capacity, **{"page_size": page_size, **options})  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Golden]:
    folder = tmp_path_factory.mktemp("converted")

    @functools.cache
    def load(name: str) -> Golden:
        converted = convert(FOLDER / name, folder / name, progress=NoProgress())
        checkpoint = load_checkpoint(converted, "float32", NoProgress())
        arrays = np.load(FOLDER / f"{name}.npz")
        return Golden(
            config=checkpoint.model_config,
            params=checkpoint.params,
            prompt_ids=arrays["prompt_ids"].tolist(),
            prefill_logits=arrays["prefill_logits"],
            tokens=arrays["tokens"].tolist(),
            decode_logits=arrays["decode_logits"],
        )

    return load


def assert_near(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_prefill_and_greedy_steps_equal_transformers(name: str, golden: Callable[[str], Golden]) -> None:
    reference = golden(name)
    prompt = reference.prompt_ids
    chunk = min(CHUNK, len(prompt))
    # One program, unless a step then takes much longer for it.
    model = reference.model(chunk=chunk) if chunk < CHUNK else reference.model(is_optimized=True)
    prefill_logits = np.concatenate(
        [model.prefill(prompt[i : i + chunk], bucket=chunk) for i in range(0, len(prompt), chunk)]
    )
    assert_near(prefill_logits[-len(reference.prefill_logits) :], reference.prefill_logits, TOLERANCE)
    tokens, decode_logits = model.greedy(int(prefill_logits[-1].argmax()), len(reference.decode_logits))
    assert tokens == reference.tokens
    assert_near(decode_logits, reference.decode_logits, TOLERANCE)


@pytest.mark.parametrize(
    "name", ["attention_bias", *(pytest.param(name, marks=pytest.mark.long) for name in ("mlp_bias", "tied_head"))]
)
def test_logits_are_the_same_on_two_devices(name: str, golden: Callable[[str], Golden]) -> None:
    reference = golden(name)
    model = reference.model(tensor_parallel_size=2)
    assert_near(model.prefill(reference.prompt_ids), reference.prefill_logits, TOLERANCE)
    tokens, decode_logits = model.greedy(reference.tokens[0], 4)
    assert tokens == reference.tokens[:5]
    assert_near(decode_logits, reference.decode_logits[:4], TOLERANCE)


@pytest.mark.parametrize("name", ["grouped_query", "mistral_sliding_window"])
def test_a_prompt_in_uneven_chunks_gives_the_logits_of_the_whole(name: str, golden: Callable[[str], Golden]) -> None:
    reference = golden(name)
    whole, chunked = reference.model(), reference.model()
    whole_logits = whole.prefill(reference.prompt_ids)
    ends = np.cumsum([1, 6, 13, 4])
    assert ends[-1] == len(reference.prompt_ids)
    chunks = [chunked.prefill(chunk, bucket=16) for chunk in np.split(reference.prompt_ids, ends[:-1])]
    assert_near(np.concatenate(chunks), whole_logits, PADDING_TOLERANCE)
    assert_near(chunked.decode(reference.tokens[0]), whole.decode(reference.tokens[0]), PADDING_TOLERANCE)


@pytest.mark.parametrize(
    ("bucket", "rows", "fill"),
    few_of(((16, 1, np.nan), (32, 8, 1e30), (64, 8, np.nan)), itertools.product((16, 32, 64), (1, 8), (np.nan, 1e30))),
)
def test_padding_changes_nothing(bucket: int, rows: int, fill: float, golden: Callable[[str], Golden]) -> None:
    """Unused pages, the unwritten rest of pages in use, and the hidden states of padding tokens all hold `fill`."""
    reference = golden("grouped_query")
    prompt, steps = reference.prompt_ids[:11], 4
    exact = reference.model(is_optimized=True)
    exact_logits = exact.prefill(prompt)
    exact_tokens, exact_steps = exact.greedy(int(exact_logits[-1].argmax()), steps)

    unused = next(token for token in range(reference.config.vocab_size) if token not in {*prompt, *exact_tokens})
    poisoned = reference.params.replace(embedding=reference.params.embedding.at[unused].set(jnp.float32(fill)))
    capacity = len(prompt) + steps
    options: dict[str, Any] = {"capacity": capacity, "fill": fill, "padding_token": unused, "is_optimized": True}
    model = PagedModel(reference.config, poisoned, **options)
    logits = model.prefill(prompt, bucket=bucket, rows=rows)
    assert_near(logits, exact_logits, PADDING_TOLERANCE)
    tokens, step_logits = model.greedy(int(logits[-1].argmax()), steps, rows=rows)
    assert tokens == exact_tokens
    assert_near(step_logits, exact_steps, PADDING_TOLERANCE)
    spare = np.asarray(model.cache.k_pages)[:, model.spare_pages]
    np.testing.assert_array_equal(spare, np.full_like(spare, fill))  # padding was written nowhere
