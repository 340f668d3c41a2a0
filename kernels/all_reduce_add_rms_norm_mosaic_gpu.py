"""The sum over devices, the residual add and the norm after it for Hopper in Pallas Mosaic GPU: one kernel.

A thread block takes a row, as in `add_rms_norm_mosaic_gpu`. What it sends is on its way to the other devices as soon as
it is loaded; the rest of the row's inputs are loaded meanwhile.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxserve.kernels.peer_exchange import VECTOR, row_layout, sum_over_devices
from jaxserve.kernels.peer_memory import PeerLayout
from jaxserve.kernels.quantize_rows_mosaic_gpu import round_row
from jaxserve.kernels.quantized_matmul_xla import FLOAT8, padded_rows
from jaxserve.kernels.register_layout import LANES, WARPS

_STEP = VECTOR * WARPS * LANES  # elements that a warpgroup holds in one vector a thread
_MAX_VECTORS = 8  # of a thread, of each of four arrays, in registers


def unsupported_reason(x: Array, update_dtype: jnp.dtype, layout: PeerLayout) -> str | None:
    """Why the kernel can't take x [rows, size] and updates sent in a dtype with such a memory, or None if it can."""
    rows, size = x.shape
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{x.dtype=} is neither bfloat16 nor float16"
    if size % _STEP or size > _MAX_VECTORS * _STEP:
        return f"{size=} is not a multiple of {_STEP} up to {_MAX_VECTORS * _STEP}"
    if rows > layout.max_rows:
        return f"{rows=} are more than the {layout.max_rows} that the devices' shared memory was made for"
    if size * update_dtype.itemsize > layout.slot_bytes:
        return f"a row of {size * update_dtype.itemsize} bytes is longer than {layout.slot_bytes=}"
    return None


# The inner jit lets all layers of a program share one lowered kernel; a call site costs nothing then.
@functools.partial(jax.jit, static_argnames=("eps", "layout", "rounds", "interpret"))
def all_reduce_add_rms_norm_mosaic_gpu(
    x: Float[Array, "local rows size"],
    update: Float[Array, "local *parts rows size"],
    weight: Float[Array, " size"],
    table: Int32[Array, "local words"],
    factors: Float[Array, "local padded"] | None = None,
    scales: Float[Array, "local size"] | None = None,
    *,
    eps: float,
    layout: PeerLayout,
    rounds: bool = False,
    interpret: Any = None,
) -> tuple[Array, ...]:
    """Computes what `all_reduce_add_rms_norm` documents, from validated arguments.

    With `factors` and `scales`, update is a `Float8Product`'s numbers [local, padded, size]. With `rounds` the norm comes in
    float8 [local, padded, size], and its rows' factors [local, padded] come third.

    The first axis is of size one. In tests it may hold what several devices would have, whose parts one device then
    plays, exchanging with itself; all thread blocks must fit on it at once.

    `interpret` takes `plgpu.InterpretGPUParams()` to run on a CPU, where `local` must be all ranks: what comes from the
    others is then read from `update`, not exchanged.
    """
    local, rows, size = x.shape
    has_parts, is_unscaled = update.ndim == 4, factors is not None
    product_scales = [array for array in (factors, scales) if array is not None]
    registers = row_layout(size)

    def load(ref: Any) -> Array:
        return plgpu.load(ref, layout=registers, optimized=False)  # pyright: ignore[reportCallIssue] (jax 0.10)

    def all_reduce_add_rms_norm(x_ref, update_ref, weight_ref, table_ref, *refs):
        scale_refs, (total_ref, normed_ref, *norm_factors_ref) = (
            refs[: len(product_scales)],
            refs[len(product_scales) :],
        )
        if interpret is None:
            # The next kernel may be launched while this one runs; it must itself wait for this one's end.
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
        device, row = lax.axis_index("device"), lax.axis_index("row")

        def update_of(device) -> Array:
            if is_unscaled:
                numbers, column_scales = load(update_ref.at[device, row]), load(scale_refs[1].at[device])
                return (numbers * scale_refs[0][device, row] * column_scales).astype(x.dtype)
            if not has_parts:
                return load(update_ref.at[device, row])
            # Always in this order: the same bits in every run.
            return functools.reduce(
                jnp.add, [load(update_ref.at[device, part, row]) for part in range(update.shape[1])]
            )

        own = update_of(device)
        residual, weight = load(x_ref.at[device, row]), load(weight_ref)
        if interpret is None:
            update_sum = sum_over_devices(table_ref.at[device], row, own, layout)
        else:
            update_sum = functools.reduce(jnp.add, [update_of(rank).astype(jnp.float32) for rank in range(local)])
        total = (residual.astype(jnp.float32) + update_sum).astype(x.dtype)
        total_ref[device, row] = total
        wide = total.astype(jnp.float32)
        scale = lax.rsqrt(jnp.sum(wide * wide) / size + eps)
        normed = (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)
        if not rounds:
            normed_ref[device, row] = normed
            return
        values, factor = round_row(normed.astype(jnp.float32), power_of_two_factors=False)
        normed_ref[device, row] = values
        norm_factors_ref[0][device, row] = factor

    whole, padded = jax.ShapeDtypeStruct(x.shape, x.dtype), padded_rows(rows)
    rounded = (
        jax.ShapeDtypeStruct((local, padded, size), FLOAT8),
        jax.ShapeDtypeStruct((local, padded), jnp.float32),
    )
    return plgpu.kernel(
        all_reduce_add_rms_norm,
        out_type=(whole, *rounded) if rounds else (whole, whole),
        grid=(local, rows),
        grid_names=("device", "row"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(x, update, weight, table, *product_scales)
