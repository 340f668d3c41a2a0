"""decode_attention on the card: the Hopper kernel, its choice, and the fall-back."""

import functools
import logging

import jax
import jax.numpy as jnp
import pytest

from jaxserve.kernels.decode_attention import decode_attention
from jaxserve.kernels.decode_attention_mosaic_gpu import decode_attention_mosaic_gpu
from jaxserve.kernels.decode_attention_plan import TuningConfig
from tests.kernels.decode_attention_cases import CASES, Case, check

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


@pytest.mark.parametrize("workers_per_sm", [1, 2])
def test_every_cut_gives_the_same(workers_per_sm: int):
    case = Case(kv_lens=(700, 0, 33, 1500), kv_heads=4)
    for block_kv, thread_blocks in ((64, 2), (64, 7), (128, 132)):
        config = TuningConfig(block_kv=block_kv, stages=2, workers_per_sm=workers_per_sm, thread_blocks=thread_blocks)
        check(case, functools.partial(decode_attention_mosaic_gpu, config=config))


def test_falls_back_where_the_kernel_cannot_run_and_says_so_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with jax.default_matmul_precision("highest"):  # a GPU else multiplies float32 with fewer bits
                check(Case(dtype=jnp.float32), decode_attention)
    assert [record.levelname for record in caplog.records if "plain XLA" in record.message] == ["WARNING"]
