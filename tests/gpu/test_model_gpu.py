"""A whole model on the card: what the Hopper kernels add to bfloat16's own error, and greedy text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import ModelConfig
from jaxserve.models import linear, llama
from jaxserve.models.params import LlamaParams, init_params
from tests.models import paged_model
from tests.models.paged_model import PagedModel

CONFIG = ModelConfig(
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=2816,
    num_layers=4,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    max_position_embeddings=2048,
    rope_theta=500000.0,
)

pytestmark = pytest.mark.usefixtures("hopper")
PROMPT = [(7 * i * i + 3 * i) % CONFIG.vocab_size for i in range(300)]
STEPS = 24
KERNELS = ("add_rms_norm", "rope_write_kv", "decode_attention", "prefill_attention")


@contextlib.contextmanager
def plain_xla() -> Iterator[None]:
    """The same model without a single kernel of ours."""
    paged_model._whole_pass.cache_clear()
    with contextlib.ExitStack() as stack:
        for name in KERNELS:
            stack.enter_context(mock.patch.object(llama, name, partial(getattr(llama, name), implementation="xla")))
        for module in (llama, linear):
            stack.enter_context(mock.patch.object(module, "num_parts", return_value=1))
        yield
    paged_model._whole_pass.cache_clear()


def logits_of(params: LlamaParams, tokens: list[int], *, rows: int, dtype: jnp.dtype) -> np.ndarray:
    """Logits of the prompt's last token and of each token after it, all of which are given."""
    model = PagedModel(CONFIG, params, capacity=512, page_size=16, cache_dtype=dtype)
    prompt, rest = tokens[: len(PROMPT)], tokens[len(PROMPT) :]
    found = [model.prefill(prompt, bucket=512)[-1]]
    found += [model.decode(token, rows=rows) for token in rest]
    return np.stack(found).astype(np.float64)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_kernels_add_no_error_to_that_of_bfloat16(rows: int):
    wide = init_params(CONFIG, 0, jnp.dtype(jnp.float32))
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), wide)
    narrow = replace(narrow, final_norm=wide.final_norm)
    with plain_xla(), jax.default_matmul_precision("highest"):
        model = PagedModel(CONFIG, wide, capacity=512, page_size=16)
        first = int(model.prefill(PROMPT, bucket=512)[-1].argmax())
        tokens = PROMPT + model.greedy(first, STEPS - 1)[0]
        exact = logits_of(wide, tokens, rows=1, dtype=jnp.dtype(jnp.float32))
    with plain_xla():
        xla = logits_of(narrow, tokens, rows=rows, dtype=jnp.dtype(jnp.bfloat16))
    ours = logits_of(narrow, tokens, rows=rows, dtype=jnp.dtype(jnp.bfloat16))
    error, error_of_xla = (np.sqrt(np.mean((logits - exact) ** 2)) for logits in (ours, xla))
    assert 0 < error_of_xla < 0.1 * exact.std()
    assert error < 1.2 * error_of_xla
    # Greedy text is the same but where two tokens are nearly level.
    gaps = np.sort(exact, axis=1)[:, -1] - np.sort(exact, axis=1)[:, -2]
    differs = ours.argmax(axis=1) != exact.argmax(axis=1)
    assert np.all(gaps[differs] < 6 * error_of_xla)
