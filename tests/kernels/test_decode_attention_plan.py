"""The plan of the Hopper kernel of decode_attention: every unit of work is dealt out once, and evenly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import decode_attention_plan
from jaxserve.kernels.decode_attention_plan import TABLE_CHUNK, TuningConfig, choose_config

make_plan = functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))(decode_attention_plan.make_plan)

LENGTHS = {
    "even": [1024] * 8,
    "ragged": [1, 0, 5000, 64, 65, 0, 0, 63, 300],
    "one row": [8192],
    "fewer units than workers": [10, 0, 20],
    "only padding": [0, 0],
}


def runs(plan) -> list[tuple[int, int]]:
    return [(int(begin), int(end)) for begin, end in np.asarray(plan.workers[:, :2])]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_workers_share_all_blocks_evenly(lengths: list[int], window: int | None):
    config = TuningConfig(thread_blocks=13)
    table = jnp.arange(len(lengths) * 600, dtype=jnp.int32).reshape(len(lengths), 600)
    plan = make_plan(table, jnp.asarray(lengths, jnp.int32), 4, 16, window, config)
    first_blocks = [0 if window is None else max(0, n - window) // 64 for n in lengths]
    blocks = [-(-n // 64) - first for n, first in zip(lengths, first_blocks, strict=True)]
    units = [
        (row, head, block)
        for row, count in enumerate(blocks)
        for head in range(4)
        for block in range(first_blocks[row], first_blocks[row] + count)
    ]
    covered = [unit for begin, end in runs(plan) for unit in range(begin, end)]
    assert covered == list(range(len(units)))
    largest = max(end - begin for begin, end in runs(plan))
    assert largest <= 1.0625 * (-(-len(units) // config.workers))
    for worker, (begin, end) in enumerate(runs(plan)):
        if begin == end:
            continue
        row, _, block = units[begin]
        assert plan.workers[worker, 2] == row
        np.testing.assert_array_equal(plan.workers[worker, 3:], plan.rows[row])
        chunk = block * 4 // TABLE_CHUNK * TABLE_CHUNK
        assert block * 4 - chunk < TABLE_CHUNK
        np.testing.assert_array_equal(plan.first_pages[worker][:88], plan.table[row, chunk : chunk + 88])


def test_runs_end_with_the_rows_where_that_costs_little():
    table = jnp.zeros((16, 512), jnp.int32)
    plan = make_plan(table, jnp.full((16,), 8192, jnp.int32), 8, 16, None, TuningConfig())
    assert all((end - begin) in (0, 128) for begin, end in runs(plan))  # 125 units each would cut every pair


def test_next_row_skips_rows_without_work():
    lengths = jnp.asarray([0, 5, 0, 0, 7, 0], jnp.int32)
    plan = make_plan(jnp.zeros((6, 4), jnp.int32), lengths, 2, 16, None, TuningConfig())
    assert plan.rows[1, 4] == 4
    assert plan.rows[4, 4] == 6


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("rows", [1, 64])
def test_a_configuration_exists_for_every_supported_shape(rows: int, head_dim: int, itemsize: int):
    config = choose_config(head_dim, 8, itemsize, rows)
    assert config.stages >= 2
    assert config.workers_per_sm * config.stages * 2 * config.block_kv * head_dim * itemsize <= 227 * 1024


def test_many_rows_and_float8_caches_get_two_workers_a_processor_where_they_fit():
    assert [choose_config(128, 4, 2, rows).workers_per_sm for rows in (1, 16, 32, 64)] == [1, 1, 2, 2]
    assert choose_config(128, 4, 1, 1).workers_per_sm == 2
    assert choose_config(256, 4, 2, 64).workers_per_sm == 1  # two stages of each do not fit


def test_an_impossible_configuration_names_its_value():
    with pytest.raises(ValueError, match="block_kv=96"):
        TuningConfig(block_kv=96)
    with pytest.raises(NotImplementedError, match="head_dim=2048"):
        choose_config(2048, 8, 2)
