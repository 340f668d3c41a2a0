"""rope_write_kv on the card: the Hopper kernel, its work on the caller's cache, and the fall-back."""

import functools
import logging

import jax
import jax.numpy as jnp
import pytest

from jaxserve.kernels.rope_write_kv import rope_write_kv
from tests.kernels.rope_write_kv_cases import CASES, PADDING, PAGE_SIZE, PAGES, Case, check

PLACES = tuple((page, offset) for page in range(PAGES) for offset in range(PAGE_SIZE))
GPU_CASES = CASES | {
    "a prefill chunk with padding": Case(places=PLACES + ((PADDING, 0),) * 2000, kv_heads=8, head_dim=128),
    "sixteen query heads a KV head": Case(kv_heads=8, group=16, head_dim=128),
    "one KV head, float32, head_dim 96": Case(kv_heads=1, group=1, head_dim=96, dtype=jnp.float32),
}


@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES.keys())
def test_hopper_kernel_matches_the_definition(case: Case):
    check(case, functools.partial(rope_write_kv, implementation="mosaic_gpu"))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_xla_program_matches_the_definition(case: Case):
    check(case, functools.partial(rope_write_kv, implementation="xla"))


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
@pytest.mark.parametrize("tokens", [1, 16])
def test_the_cache_is_never_copied(implementation, tokens: int):
    cache = jnp.zeros((4, 1024, 16, 8, 128), jnp.bfloat16)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def write_every_layer(k_pages, v_pages, qkv, tables, pages):
        outputs = []
        for layer in range(cache.shape[0]):
            q, k_pages, v_pages = rope_write_kv(
                qkv, k_pages, v_pages, layer, tables, tables, pages, pages, implementation=implementation
            )
            # What the next layer writes hangs on what attention read here.
            qkv = qkv + k_pages[layer, :2].sum() + v_pages[layer, :2].sum()
            outputs.append(q)
        return outputs, k_pages, v_pages

    qkv, tables = jnp.zeros((tokens, 8, 6, 128), jnp.bfloat16), jnp.zeros((tokens, 64), jnp.float32)
    pages = jnp.arange(tokens, dtype=jnp.int32)
    memory = write_every_layer.lower(cache, cache, qkv, tables, pages).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == 2 * cache.nbytes
    assert memory.temp_size_in_bytes < cache.nbytes


def test_falls_back_where_the_kernel_cannot_run_and_says_so_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            check(Case(head_dim=32), rope_write_kv)
    assert [record.levelname for record in caplog.records if "plain XLA" in record.message] == ["WARNING"]
