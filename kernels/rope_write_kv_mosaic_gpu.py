"""Rotary embedding and the write to the paged KV cache for Hopper in Pallas Mosaic GPU.

A thread block takes some KV heads of one token: it loads their queries, keys and values to registers, turns the first
two, and stores queries to the output, keys and values to the token's place in the cache, which is updated in place.
In decode all of it is latency, so everything is a plain load or store, and all loads are under way before the first use.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxserve.kernels.register_layout import LANES, WARPS, spread_layout
from jaxserve.kernels.rope_write_kv_xla import to_cache_dtype

ELEMENTS_PER_THREAD = 24  # of q, k and v together; more would cost registers and leave processors without a block


def _load(ref, layout) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue] (jax 0.10)


def _load_halves(ref, cosines, sines, half: int):
    """Loads both halves of the heads in ref [..., head_dim] with their cosines and sines, spread to the heads' shape."""
    shape = (*ref.shape[:-1], half)
    layout = spread_layout(shape)
    head_axes = tuple(range(len(shape) - 1))
    first, second = [_load(ref.at[_half(len(shape), half, start)], layout) for start in (0, half)]

    def spread(table_ref):
        table = _load(table_ref, layout.reduce(head_axes))
        return plgpu.layout_cast(lax.broadcast_in_dim(table, shape, (len(shape) - 1,)), layout)

    return first, second, spread(cosines), spread(sines)


def _half(rank: int, half: int, start: int) -> tuple:
    return (*[slice(None)] * (rank - 1), pl.ds(start, half))


def _turn(first: Array, second: Array, cosines: Array, sines: Array) -> tuple[Array, Array]:
    """The turned halves, rounded to the heads' dtype."""
    wide_first, wide_second = first.astype(jnp.float32), second.astype(jnp.float32)
    turned = wide_first * cosines - wide_second * sines, wide_second * cosines + wide_first * sines
    return turned[0].astype(first.dtype), turned[1].astype(first.dtype)


def _heads_per_block(kv_heads: int, elements_per_head: int) -> int:
    """KV heads of a token that one thread block takes: a divisor of them, one at least."""
    most = max(1, ELEMENTS_PER_THREAD * WARPS * LANES // elements_per_head)
    return max(heads for heads in range(1, kv_heads + 1) if kv_heads % heads == 0 and heads <= most)


def unsupported_reason(qkv: Array, k_pages: Array) -> str | None:
    """Why the kernel can't take these arrays, or None if it can."""
    tokens, _, width, head_dim = qkv.shape
    if jax.__version_info__ >= (0, 12):
        return f"jax {jax.__version__} wants stores of whole cache lines, which the kernel does not make; 0.11 does not"
    if qkv.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"{qkv.dtype=} is none of bfloat16, float16, float32"
    if k_pages.dtype not in (qkv.dtype, jnp.float8_e4m3fn):
        return f"{k_pages.dtype=} is neither {qkv.dtype=} nor float8_e4m3fn"
    if head_dim not in (64, 96, 128, 256):
        return f"{head_dim=} is not one of 64, 96, 128, 256"
    if width * head_dim > 2 * ELEMENTS_PER_THREAD * WARPS * LANES:
        return f"{width - 2} query heads of {head_dim} elements a KV head are more than a thread block's registers hold"
    if tokens == 0:
        return "there are no tokens"
    return None


# The inner jit lets all layers of a program share one lowered kernel; a call site costs nothing then.
@functools.partial(jax.jit, static_argnames=("interpret",))
def rope_write_kv_mosaic_gpu(
    qkv: Float[Array, "tokens kv_heads width head_dim"],
    k_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "layers pages page_size kv_heads head_dim"],
    layer: Int32[Array, ""],
    cosines: Float[Array, "tokens half"],
    sines: Float[Array, "tokens half"],
    pages: Int32[Array, " tokens"],
    offsets: Int32[Array, " tokens"],
    *,
    k_scale: Float[Array, ""] | None = None,
    v_scale: Float[Array, ""] | None = None,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """Turns queries and keys and stores keys and values; arguments as in `rope_write_kv`, already validated.

    `interpret` takes `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    tokens, kv_heads, width, head_dim = qkv.shape
    group, half, num_pages = width - 2, head_dim // 2, k_pages.shape[1]
    heads_per_block = _heads_per_block(kv_heads, width * head_dim)
    has_scales = k_scale is not None or v_scale is not None

    def rope_write_kv(
        qkv_ref, layer_ref, cosines_ref, sines_ref, pages_ref, offsets_ref, scales_ref, k_pages_ref, v_pages_ref, q_ref
    ):
        if interpret is None:
            # The next kernel may be launched while this one runs; it must itself wait for this one's end.
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
        token = lax.axis_index("token")
        heads = pl.ds(lax.axis_index("heads") * heads_per_block, heads_per_block)
        layer, page, offset = layer_ref[0], pages_ref[token], offsets_ref[token]
        scales = [scales_ref[i] if has_scales else None for i in range(2)]
        tables = cosines_ref.at[token], sines_ref.at[token], half
        q = _load_halves(qkv_ref.at[token, heads, pl.ds(0, group)], *tables)
        k = _load_halves(qkv_ref.at[token, heads, group], *tables)
        v = _load(qkv_ref.at[token, heads, group + 1], spread_layout((heads_per_block, head_dim)))
        for start, turned in zip((0, half), _turn(*q), strict=True):
            q_ref.at[token, heads][_half(3, half, start)] = turned

        @pl.when((page >= 0) & (page < num_pages))
        def _():
            row = layer, page, offset, heads
            for start, turned in zip((0, half), _turn(*k), strict=True):
                k_pages_ref.at[row][_half(2, half, start)] = to_cache_dtype(turned, scales[0], k_pages.dtype)
            v_pages_ref[row] = to_cache_dtype(v, scales[1], v_pages.dtype)

    k_pages_ref, v_pages_ref = jax.new_ref(k_pages), jax.new_ref(v_pages)
    q = plgpu.kernel(
        rope_write_kv,
        out_type=jax.ShapeDtypeStruct((tokens, kv_heads, group, head_dim), qkv.dtype),
        grid=(tokens, kv_heads // heads_per_block),
        grid_names=("token", "heads"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(
        qkv, layer[None], cosines, sines, pages, offsets,
        jnp.stack([jnp.float32(1) if scale is None else scale for scale in (k_scale, v_scale)]),
        k_pages_ref, v_pages_ref,
    )  # fmt: skip
    return q.reshape(tokens, kv_heads * group, head_dim), k_pages_ref[...], v_pages_ref[...]
