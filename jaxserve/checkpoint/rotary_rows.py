"""The order of q's and k's rows: what turns together lies side by side in some formats, half a head apart in others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxserve.checkpoint.errors import CheckpointError


def read_pairs_apart(
    read: Callable[[range], np.ndarray], shape: tuple[int, ...], num_heads: int, rows: range, where: str
) -> np.ndarray:
    """Rows in Hugging Face's order, from the one in which each head's pairs are neighbours (Meta's, and GGUF's).

    Args:
        read: gives rows as they lie. It is asked for those of whole heads.
        shape: of a weight [num_heads * head_dim, ...] or a bias [num_heads * head_dim].
        rows: that are wanted, of step one.

    Raises:
        CheckpointError: if the rows are not of so many heads.
    """
    if shape[0] % (2 * num_heads):
        raise CheckpointError(f"{where} of shape {shape} is not of {num_heads} heads")
    head_dim = shape[0] // num_heads
    first, end = rows.start // head_dim, -(-rows.stop // head_dim)
    values = read(range(first * head_dim, end * head_dim))
    # [heads, pair, which of the pair] becomes [heads, which of the pair, pair].
    pairs = values.reshape(end - first, head_dim // 2, 2, *values.shape[1:])
    heads = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
    return heads[rows.start - first * head_dim : rows.stop - first * head_dim]
