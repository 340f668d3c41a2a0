"""The reductions of a per-device program, passed into the forward pass so that it is written once for any mesh."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import lax

from jaxserve.sharding.mesh import TENSOR_AXIS


@dataclass(frozen=True)
class Collectives:
    """Reductions over the tensor-parallel axis; with one device each is the identity and leaves no trace in the program."""

    size: int

    def all_reduce(self, x: jax.Array) -> jax.Array:
        """Sum of every device's `x`."""
        return x if self.size == 1 else lax.psum(x, TENSOR_AXIS)

    def all_gather_last(self, x: jax.Array) -> jax.Array:
        """Every device's `x` side by side along the last axis."""
        return x if self.size == 1 else lax.all_gather(x, TENSOR_AXIS, axis=x.ndim - 1, tiled=True)

    def index(self) -> jax.Array | int:
        """This device's place on the axis."""
        return 0 if self.size == 1 else lax.axis_index(TENSOR_AXIS)
