"""Which CUDA block of the Hopper prefill kernel has what: everything once, and much KV shared out among many."""

import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.kernels import prefill_attention_tiles
from jaxserve.kernels.prefill_attention_tiles import TOKEN_ALIGNMENT, kv_blocks, locate_tile, num_parts

pytestmark = pytest.mark.usefixtures("without_hints")
TILE_TOKENS, KV_BLOCK, AT_ONCE, ROWS = 16, 64, 16, 4


@pytest.fixture(scope="module")
def without_hints() -> Iterator[None]:
    """Hints for the compiler cannot be traced for all CUDA blocks at once; here they are checked instead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_attention_tiles.pl, "multiple_of", lambda value, multiple: value)
        yield


@functools.partial(jax.jit, static_argnames=("tokens", "window", "at_once"))
def located(
    starts: jax.Array, kv_lens: jax.Array, *, tokens: int, window: int | None, at_once: int
) -> dict[str, jax.Array]:
    tiles = (tokens + (ROWS + 1) * (TOKEN_ALIGNMENT - 1)) // TILE_TOKENS + ROWS + 1

    def block(_: jax.Array) -> dict[str, jax.Array]:
        tile = locate_tile(
            starts, kv_lens, tokens=tokens, tile_tokens=TILE_TOKENS, kv_block=KV_BLOCK, window=window, tiles=tiles,
            blocks_at_once=at_once,
        )  # fmt: skip
        begin, end = kv_blocks(tile, KV_BLOCK)
        return {
            "exists": tile.exists, "row": tile.row, "start": tile.start, "live_start": tile.live_start,
            "live_end": tile.live_end, "position": tile.first_position, "begin": begin, "end": end,
            "first_visible": tile.first_visible, "end_visible": tile.end_visible, "parts": num_parts(tile, KV_BLOCK),
            "place": tile.number + tile.part * tile.stride, "counter": tile.number,
        }  # fmt: skip

    return jax.vmap(block, axis_name="tile")(jnp.arange(tiles))


def blocks_of(
    lengths: list[int], contexts: list[int], tokens: int, window: int | None = None, at_once: int = AT_ONCE
) -> tuple[list[dict[str, int]], Any, Any]:
    """What each CUDA block has of rows of so many tokens behind so many others, as dictionaries."""
    starts = np.cumsum([0, *lengths, *[0] * (ROWS - len(lengths))]).astype(np.int32)
    kv_lens = np.zeros(ROWS, np.int32)
    kv_lens[: len(lengths)] = np.add(lengths, contexts)
    out = jax.device_get(
        located(jnp.asarray(starts), jnp.asarray(kv_lens), tokens=tokens, window=window, at_once=at_once)
    )
    each = [{name: int(values[block]) for name, values in out.items()} for block in range(len(out["row"]))]
    return [block for block in each if block["exists"]], starts, kv_lens


rows = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 20_000)), min_size=1, max_size=ROWS)


@settings(max_examples=200, deadline=None)
@given(rows=rows, window=st.sampled_from([None, 100, 5000]), at_once=st.sampled_from([0, AT_ONCE]))
def test_every_token_attends_to_all_that_it_sees_once(
    rows: list[tuple[int, int]], window: int | None, at_once: int
) -> None:
    lengths, contexts = [row[0] for row in rows], [row[1] for row in rows]
    blocks, starts, kv_lens = blocks_of(lengths, contexts, 256, window, at_once)
    kv_of_token: dict[int, list[int]] = defaultdict(list)
    parts_of_counter: dict[int, list[int]] = defaultdict(list)
    for block in blocks:
        assert block["start"] % TOKEN_ALIGNMENT == 0
        for token in range(block["start"] + block["live_start"], block["start"] + block["live_end"]):
            kv_of_token[token] += range(block["begin"], block["end"])
            if token < starts[-1]:
                assert starts[block["row"]] <= token < starts[block["row"] + 1]
        if block["end"] > block["begin"]:
            parts_of_counter[block["counter"]].append(block["parts"])
    assert sorted(kv_of_token) == list(range(256))  # padding too: its outputs are written
    for row in range(len(rows)):
        for token in range(starts[row], starts[row + 1]):
            position = int(kv_lens[row]) - int(starts[row + 1]) + token
            first = 0 if window is None else max(position - window + 1, 0)
            seen = kv_of_token[token]
            assert len(set(seen)) == len(seen)
            assert set(range(first // KV_BLOCK, position // KV_BLOCK + 1)) <= set(seen)
    assert len({block["place"] for block in blocks}) == len(blocks)
    for parts in parts_of_counter.values():
        assert parts == [len(parts)] * len(parts)  # whoever counts them knows when all are there


@pytest.mark.parametrize("other", [(), ((56, 0),), ((24, 0), (32, 30))])
def test_the_end_of_a_long_prompt_is_shared_out_whatever_begins_behind_it(other: tuple[tuple[int, int], ...]) -> None:
    rows = [(72, 15_928), *other]
    blocks, _, kv_lens = blocks_of([row[0] for row in rows], [row[1] for row in rows], 128)
    longest = max(block["end"] - block["begin"] for block in blocks)
    assert longest <= -(-int(kv_lens[0]) // KV_BLOCK) // 2 + 1


def test_rows_of_about_one_length_are_shared_out_alike() -> None:
    blocks, *_ = blocks_of([16, 16, 16], [9000, 8000, 7000], 64)
    assert len([block for block in blocks if block["end"] > block["begin"]]) == 9  # of 11, three tiles of three parts


def test_short_contexts_are_not_cut() -> None:
    blocks, *_ = blocks_of([16, 16], [1000, 500], 64)
    assert len([block for block in blocks if block["end"] > block["begin"]]) == 2
