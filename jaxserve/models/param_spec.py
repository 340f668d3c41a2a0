"""The declaration of one array of a model: shape, logical axes, initialisation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True)
class ParamSpec:
    """Declaration of one array.

    Attributes:
        shape: of the whole (unsharded) array.
        logical_axes: a name for each axis, mapped to mesh axes by `jaxserve.sharding.rules`.
        standard_deviation: of the normal initialisation; None: filled with ones (norms); 0: zeros (biases).
        dtype: element type, whatever the model's is; None: the model's, but float32 for norms.
    """

    shape: tuple[int, ...]
    logical_axes: tuple[str, ...]
    standard_deviation: float | None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.logical_axes):
            raise ValueError(f"shape={self.shape} and logical_axes={self.logical_axes} must be of one length")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def num_bytes(self, model_dtype: jnp.dtype) -> int:
        """Of the array in a model whose weights have `model_dtype`."""
        return self.size * self.element_type(model_dtype).itemsize

    def element_type(self, model_dtype: jnp.dtype) -> jnp.dtype:
        """The array's element type in a model whose weights have `model_dtype`."""
        if self.dtype is not None:
            return jnp.dtype(self.dtype)
        return jnp.dtype(jnp.float32 if self.standard_deviation is None else model_dtype)
