"""Logits of the default model against transformers in float32: three chat prompts and 32 greedy steps after each.

The references are made by `scripts/make_goldens.py`, which tells what is in them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxserve.checkpoint.store import LoadedCheckpoint, load_checkpoint
from jaxserve.progress import NoProgress
from tests.models.paged_model import PagedModel

GOLDEN = Path(__file__).parent.parent / "goldens" / "smollm2_logits.npz"
TOLERANCE = 5e-4  # over the whole vocabulary
CHUNK = 256  # tokens of a prefill step: the longest prompt takes two
LONGEST = 2


@pytest.fixture(scope="module")
def checkpoint(default_model_dir: Path) -> LoadedCheckpoint:
    return load_checkpoint(default_model_dir, "float32", NoProgress())


@pytest.mark.parametrize("index", [*(pytest.param(shorter, marks=pytest.mark.long) for shorter in (0, 1)), LONGEST])
def test_prefill_and_greedy_steps_equal_transformers(index: int, checkpoint: LoadedCheckpoint) -> None:
    arrays = np.load(GOLDEN)
    golden = {name: arrays[f"{index}_{name}"] for name in ("prompt_ids", "prefill_logits", "tokens")}
    decode = {
        name: arrays[f"{index}_decode_{name}"] for name in ("sampled_logits", "top_ids", "top_logits", "logsumexp")
    }
    prompt, steps = golden["prompt_ids"].tolist(), len(golden["tokens"]) - 1
    model = PagedModel(
        checkpoint.model_config, checkpoint.params, capacity=512, page_size=16, by_layer=True, is_optimized=True
    )

    for start in range(0, len(prompt), CHUNK):
        prefill_logits = model.prefill(prompt[start : start + CHUNK], bucket=CHUNK)[-1]
    np.testing.assert_allclose(prefill_logits, golden["prefill_logits"], rtol=0, atol=TOLERANCE)

    tokens, logits = model.greedy(int(prefill_logits.argmax()), steps)
    assert tokens == golden["tokens"].tolist()
    assert logits.shape == (steps, checkpoint.model_config.vocab_size)
    near = {"rtol": 0, "atol": TOLERANCE}
    np.testing.assert_allclose(logits[:, arrays["sampled_ids"]], decode["sampled_logits"], **near)
    np.testing.assert_allclose(np.take_along_axis(logits, decode["top_ids"], axis=1), decode["top_logits"], **near)
    largest = logits.max(axis=1)
    logsumexp = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    np.testing.assert_allclose(logsumexp, decode["logsumexp"], **near)
