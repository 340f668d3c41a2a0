"""The residual add and the norm after it for Hopper in Pallas Mosaic GPU: one kernel where XLA makes two or three.

A thread block takes a row, which lies in the registers of its warpgroups from the first load to the last store. In
decode all of it is latency, so everything is a plain load or store, and all loads are under way before the first use.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.kernels.register_layout import LANES, WARPS

_THREADS = WARPS * LANES
_MAX_ELEMENTS_PER_THREAD = 64  # of each of three arrays, in registers


def _vector(size: int) -> int:
    """Elements that a thread loads at once: 16 bytes of two-byte elements, where the size allows it."""
    return next(vector for vector in (8, 4, 2, 1) if size % (vector * _THREADS) == 0)


def unsupported_reason(x: Array) -> str | None:
    """Why the kernel can't take x [rows, size], or None if it can."""
    size = x.shape[1]
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{x.dtype=} is neither bfloat16 nor float16"
    if size % _THREADS or size > _MAX_ELEMENTS_PER_THREAD * _THREADS:
        return f"{size=} is not a multiple of {_THREADS} up to {_MAX_ELEMENTS_PER_THREAD * _THREADS}"
    return None


# The inner jit lets all layers of a program share one lowered kernel; a call site costs nothing then.
@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def add_rms_norm_mosaic_gpu(
    x: Float[Array, "rows size"],
    update: Float[Array, "*parts rows size"],
    weight: Float[Array, " size"],
    *,
    eps: float,
    interpret: Any = None,
) -> tuple[Float[Array, "rows size"], Float[Array, "rows size"]]:
    """Computes what `add_rms_norm` documents, from validated arguments.

    `interpret` takes `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    rows, size = x.shape
    has_parts = update.ndim == 3
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=_vector(size))

    def load(ref) -> Array:
        return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue] (jax 0.10)

    def add_rms_norm(x_ref, update_ref, weight_ref, total_ref, normed_ref):
        if interpret is None:
            # The next kernel may be launched while this one runs; it must itself wait for this one's end.
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
        row = lax.axis_index("row")
        updates = [update_ref.at[part, row] for part in range(update.shape[0])] if has_parts else [update_ref.at[row]]
        x, weight, *updates = [load(ref) for ref in (x_ref.at[row], weight_ref, *updates)]
        # Always in this order: the same bits in every run.
        wide = x.astype(jnp.float32) + functools.reduce(jnp.add, [part.astype(jnp.float32) for part in updates])
        total = wide.astype(x.dtype)
        total_ref[row] = total
        wide = total.astype(jnp.float32)
        scale = lax.rsqrt(jnp.sum(wide * wide) / size + eps)
        normed_ref[row] = (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)

    shape = jax.ShapeDtypeStruct((rows, size), x.dtype)
    total, normed = plgpu.kernel(
        add_rms_norm,
        out_type=(shape, shape),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(x, update, weight)
    return total, normed
