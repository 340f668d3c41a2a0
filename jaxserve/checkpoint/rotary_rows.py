"""The order of q's and k's rows: what turns together lies side by side in some formats, half a head apart in others."""

from __future__ import annotations

import numpy as np

from jaxserve.checkpoint.errors import CheckpointError


def pairs_apart(values: np.ndarray, num_heads: int, where: str) -> np.ndarray:
    """Rows in Hugging Face's order, from the one in which each head's pairs are neighbours (Meta's, and GGUF's).

    Args:
        values: a weight [num_heads * head_dim, ...] or a bias [num_heads * head_dim].

    Raises:
        CheckpointError: if the rows are not of so many heads.
    """
    if values.shape[0] % (2 * num_heads):
        raise CheckpointError(f"{where} of shape {values.shape} is not of {num_heads} heads")
    # [heads, pair, which of the pair] becomes [heads, which of the pair, pair].
    pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
