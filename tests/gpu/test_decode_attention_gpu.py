"""decode_attention on the card: the Hopper kernel, its choice, and the fall-back."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.decode_attention import decode_attention
from jaxserve.kernels.decode_attention_mosaic_gpu import decode_attention_mosaic_gpu
from jaxserve.kernels.decode_attention_plan import TuningConfig
from tests.kernels.decode_attention_cases import CASES, Case, check, make_arrays, reference

SIXTEEN_BIT_CASES = {name: case for name, case in CASES.items() if case.dtype != jnp.float32} | {
    "many rows of all lengths": Case(
        kv_lens=tuple((i * 997) % 1500 for i in range(70)), kv_heads=8, head_dim=128, group=4
    ),
    "one long row": Case(kv_lens=(5000,), kv_heads=8, head_dim=128, group=4),
    "one long row among short ones": Case(kv_lens=(1, 2, 4000, 3, 0, 90), kv_heads=8, head_dim=128, group=8),
    "tables longer than a chunk, window": Case(kv_lens=(3000, 2900, 10), kv_heads=8, head_dim=128, window=2500),
    "sixty-four query heads a KV head": Case(group=64, kv_heads=1),
}


@pytest.mark.parametrize("case", SIXTEEN_BIT_CASES.values(), ids=SIXTEEN_BIT_CASES.keys())
def test_hopper_kernel_matches_the_definition(case: Case):
    check(case, functools.partial(decode_attention, implementation="mosaic_gpu"))


@pytest.mark.parametrize("separate_join", [False, True])
@pytest.mark.parametrize("workers_per_sm", [1, 2])
def test_every_cut_gives_the_same(workers_per_sm: int, separate_join: bool):
    case = Case(kv_lens=(700, 0, 33, 1500), kv_heads=4)
    for block_kv, thread_blocks in ((64, 2), (64, 7), (128, 132)):
        config = TuningConfig(block_kv, 2, workers_per_sm, thread_blocks, separate_join)
        check(case, functools.partial(decode_attention_mosaic_gpu, config=config))


@pytest.mark.parametrize(
    "case",
    [
        Case(kv_lens=(1, 2, 4000, 3, 0, 90, 400, 400), kv_heads=8, head_dim=128, group=4),
        Case(kv_lens=(8192,), kv_heads=1, head_dim=128, group=8),
        Case(kv_lens=(400,), kv_heads=8, head_dim=128, group=4),
    ],
    ids=["ragged rows", "one pair for all workers", "a worker a block"],
)
def test_gives_the_same_bits_in_every_run_and_in_every_call_of_a_program(case: Case):
    q, k_pages, v_pages, page_table, kv_lens = make_arrays(case)
    calls = 50

    @jax.jit
    def run(q):
        # The barrier keeps XLA from making one call of all.
        outs = []
        for _ in range(calls):
            out = decode_attention(
                q, k_pages, v_pages, case.layer, page_table, kv_lens, scale=case.scale, implementation="mosaic_gpu"
            )
            outs.append(out)
            _, q = jax.lax.optimization_barrier((out, q))
        return jnp.stack(outs)

    outs = np.stack([np.asarray(run(q).astype(jnp.float32)) for _ in range(4)]).reshape(-1, *q.shape)
    assert len(np.unique(outs, axis=0)) == 1
    np.testing.assert_allclose(outs[0], reference(case, q, k_pages, v_pages, page_table, kv_lens), rtol=2e-2, atol=2e-2)


def test_falls_back_where_the_kernel_cannot_run_and_says_so_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with jax.default_matmul_precision("highest"):  # a GPU else multiplies float32 with fewer bits
                check(Case(dtype=jnp.float32), decode_attention)
    assert [record.levelname for record in caplog.records if "plain XLA" in record.message] == ["WARNING"]
