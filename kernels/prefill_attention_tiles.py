"""Which row and tokens a CUDA block of the Hopper prefill kernel works on, found inside the kernel."""

import dataclasses
import functools

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax

_BLOCKS_OF_A_PART = 16  # at least: what two parts save must be worth their joining
TOKEN_ALIGNMENT = 8  # of a tile's first token: shared memory is laid out in groups of 8 rows


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one CUDA block works on: traced int32 scalars, and whether there is anything to do."""

    exists: Array
    row: Array
    start: Array  # the tile's first token, in q
    live_start: Array  # the row's tokens in the tile, counted from start
    live_end: Array
    first_position: Array  # of the tile's first token in the row's KV; negative where the tile starts before the row
    first_visible: Array  # the first and one past the last position that any live token sees
    end_visible: Array
    number: Array  # of the tile, the same for all CUDA blocks that share its KV
    part: Array  # which of them this one is
    most_parts: Array  # how many there may be of the tile
    stride: Array  # of `number + part * stride`, by which a CUDA block of some head is told from the others


def locate_tile(
    query_starts_ref,
    kv_lens_ref,
    *,
    tokens: int,
    tile_tokens: int,
    kv_block: int,
    window: int | None,
    tiles: int,
    blocks_at_once: int,
) -> Tile:
    """Find the row and tokens of this CUDA block; the padding behind the last row counts as one more, without KV.

    A launch has more CUDA blocks than tiles wherever rows are fewer than there may be. Where those that are left over find a
    multiprocessor each, they take parts of the KV of tiles that see most of it: a prompt that begins behind the end of a
    long one has nothing to share out.

    Args:
        kv_block: KV positions that are worked on at once.
        tiles: CUDA blocks of each group of heads.
        blocks_at_once: CUDA blocks of each group of heads that run at the same time; 0: KV is not cut.
    """
    rows = kv_lens_ref.shape[0]
    starts = [query_starts_ref[row] for row in range(rows + 1)]
    ends = [*starts[1:], jnp.int32(tokens)]
    first_tokens = [start & -TOKEN_ALIGNMENT for start in starts]
    counts = [
        jnp.where(end > start, divide_up(end - first, tile_tokens), 0)
        for start, end, first in zip(starts, ends, first_tokens, strict=True)
    ]
    parts = [jnp.int32(1)] * (rows + 1)
    if blocks_at_once:
        room = jnp.minimum(tiles - counts[rows], blocks_at_once)
        parts[:rows] = _parts_of_rows(counts[:rows], [kv_lens_ref[row] for row in range(rows)], room, kv_block, window)
    blocks = [count * part for count, part in zip(counts, parts, strict=True)]
    cut = _sum(blocks[:rows])  # CUDA blocks that have a row's tile, or a part of one
    index = lax.axis_index("tile")
    # A row's later tiles see more KV. Starting with the longest work leaves the shortest to fill the gaps at the end.
    index = jnp.where(index < cut, cut - 1 - index, index)

    row = first = row_start = row_end = base = total = jnp.int32(0)
    count = most_parts = jnp.int32(1)
    for candidate, num_blocks in enumerate(blocks):
        inside = (index >= total) & (index < total + num_blocks)
        row = jnp.where(inside, candidate, row)
        base = jnp.where(inside, total, base)
        first = jnp.where(inside, first_tokens[candidate], first)
        row_start = jnp.where(inside, starts[candidate], row_start)
        row_end = jnp.where(inside, ends[candidate], row_end)
        count = jnp.where(inside, counts[candidate], count)
        most_parts = jnp.where(inside, parts[candidate], most_parts)
        total = total + num_blocks
    part = lax.div(index - base, count) if blocks_at_once else jnp.int32(0)
    number = index - part * count
    start = first + (number - base) * tile_tokens

    start = jnp.minimum(start, tokens - tile_tokens)
    live_start = jnp.maximum(row_start - start, 0)
    live_end = jnp.minimum(row_end - start, tile_tokens)
    is_padding = row == rows
    row = jnp.minimum(row, rows - 1)
    first_position = kv_lens_ref[row] - row_end + start
    first_visible = jnp.int32(0)
    if window is not None:
        first_visible = jnp.maximum(first_position + live_start - (window - 1), 0)
    return Tile(
        exists=index < total,
        row=row,
        start=pl.multiple_of(start, TOKEN_ALIGNMENT),
        live_start=live_start,
        live_end=live_end,
        first_position=first_position,
        first_visible=jnp.where(is_padding, 0, first_visible),
        end_visible=jnp.where(is_padding, 0, first_position + live_end),
        number=number,
        part=part,
        most_parts=most_parts,
        stride=count,
    )


def _parts_of_rows(
    counts: list[Array], kv_lens: list[Array], room: Array, kv_block: int, window: int | None
) -> list[Array]:
    """How many CUDA blocks may share a tile of each row: as many as there is room for where much is seen, and else one.

    Args:
        counts: tiles of each row.
        room: CUDA blocks of all rows.
    """
    # By one division for all rows: each CUDA block works this out anew.
    seen = kv_lens if window is None else [jnp.minimum(length, window) for length in kv_lens]
    seen = [jnp.where(count > 0, length, 0) for count, length in zip(counts, seen, strict=True)]
    most = functools.reduce(jnp.maximum, seen)
    is_long = [2 * length >= most for length in seen]
    long_tiles = _sum([jnp.where(long, count, 0) for long, count in zip(is_long, counts, strict=True)])
    short_tiles = _sum(counts) - long_tiles
    parts = jnp.maximum(lax.div(jnp.maximum(room - short_tiles, 0), jnp.maximum(long_tiles, 1)), 1)
    parts = jnp.where(most >= 2 * _BLOCKS_OF_A_PART * kv_block, parts, 1)
    return [jnp.where(long, parts, 1) for long in is_long]


def _sum(terms: list[Array]) -> Array:
    return functools.reduce(lambda a, b: a + b, terms)


def divide_up(dividend: Array, divisor: int) -> Array:
    """Divide and round up; for a dividend of at least 0."""
    return lax.div(dividend + (divisor - 1), jnp.int32(divisor))


def kv_blocks(tile: Tile, kv_block: int) -> tuple[Array, Array]:
    """The first and one past the last KV block that this CUDA block takes of those that the tile sees."""
    first, end = _visible_blocks(tile, kv_block)
    share = _share(tile, kv_block)
    begin = first + tile.part * share
    return jnp.minimum(begin, end), jnp.minimum(begin + share, end)


def num_parts(tile: Tile, kv_block: int) -> Array:
    """CUDA blocks that have KV of the tile; one where it sees none."""
    first, end = _visible_blocks(tile, kv_block)
    share = jnp.maximum(_share(tile, kv_block), 1)
    return jnp.maximum(lax.div(end - first + share - 1, share), 1)


def _visible_blocks(tile: Tile, kv_block: int) -> tuple[Array, Array]:
    return lax.div(tile.first_visible, jnp.int32(kv_block)), divide_up(tile.end_visible, kv_block)


def _share(tile: Tile, kv_block: int) -> Array:
    """KV blocks of each part of the tile but the last."""
    first, end = _visible_blocks(tile, kv_block)
    parts = jnp.clip(lax.div(end - first, jnp.int32(_BLOCKS_OF_A_PART)), 1, tile.most_parts)
    return lax.div(end - first + parts - 1, parts)


def column_group(head_dim: int) -> int:
    """How many columns lie together in shared memory."""
    return 64 if head_dim % 64 == 0 else 32
