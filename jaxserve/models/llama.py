"""The forward pass of a Llama-family decoder: one device's part, pure, over a paged KV cache."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int32

from jaxserve.config import ModelConfig
from jaxserve.kernels.add_rms_norm import add_rms_norm
from jaxserve.kernels.all_reduce_add_rms_norm import all_reduce_add_rms_norm
from jaxserve.kernels.decode_attention import decode_attention
from jaxserve.kernels.peer_memory import PeerMemory
from jaxserve.kernels.prefill_attention import prefill_attention
from jaxserve.kernels.quantize_rows import Float8Product, Float8Rows
from jaxserve.kernels.quantized_matmul_xla import product_rows
from jaxserve.kernels.rms_norm_xla import rms_norm
from jaxserve.kernels.rope_write_kv import rope_write_kv
from jaxserve.models.batch import Batch
from jaxserve.models.embedding import embed
from jaxserve.models.kv_cache import KVCache
from jaxserve.models.linear import (
    add_bias,
    column_parallel,
    head_scores,
    num_parts,
    num_tokens,
    rounds_rows,
    row_parallel,
    row_parallel_unscaled,
    swiglu,
)
from jaxserve.models.params import LayerParams, LlamaParams
from jaxserve.models.rope import RopeTables, inverse_frequencies, rope_tables
from jaxserve.sharding.collectives import Collectives
from jaxserve.sharding.mesh import TENSOR_AXIS


@struct.dataclass
class Unsummed:
    """One device's part of what is still to be summed over devices: the kernel that adds it to the residual does that."""

    part: Float[Array, "tokens hidden"] | Float8Product


@struct.dataclass
class Stream:
    """The residual stream between two layers: its sum is kept in two parts, so that the add and the next norm are one.

    Attributes:
        residual: what all blocks but the last one left.
        update: what the last block adds to it; perhaps in float32 parts, whose sum that is, or not yet summed over
            devices.
    """

    residual: Float[Array, "tokens hidden"]
    update: Float[Array, "*parts tokens hidden"] | Unsummed


def forward(
    params: LlamaParams, cache: KVCache, batch: Batch, *, config: ModelConfig, collectives: Collectives
) -> tuple[Float[Array, "tokens hidden"], KVCache]:
    """Hidden states of every token after the final norm, and the cache with their keys and values written.

    Runs inside `jax.shard_map`: `params` and `cache` are this device's shards, `batch` and the result are replicated.
    """
    return forward_with_taps(params, cache, batch, config=config, collectives=collectives)[:2]


def forward_with_taps(
    params: LlamaParams,
    cache: KVCache,
    batch: Batch,
    *,
    config: ModelConfig,
    collectives: Collectives,
    peers: PeerMemory | None = None,
    tap_layers: tuple[int, ...] = (),
) -> tuple[Float[Array, "tokens hidden"], KVCache, tuple[Float[Array, "tokens hidden"], ...]]:
    """As `forward`, and what goes into each of `tap_layers` (the number of layers: what comes out of the last one).

    Args:
        peers: for sums over devices that kernels make by themselves; None: XLA makes them all.
    """
    stream = embed_tokens(params, batch, collectives=collectives)
    stream = _like_between_layers(stream, params.layers[0], collectives, peers)
    rope = rotary_tables(batch, config=config)
    # Traced and lowered once for all layers; XLA inlines the calls.
    one_layer = jax.jit(partial(decoder_layer, config=config, collectives=collectives, peers=peers))
    taps: dict[int, Array] = {}
    for index, layer in enumerate(params.layers):
        if index in tap_layers:
            taps[index] = stream_sum(_summed(stream, collectives))
        stream, cache = one_layer(layer, jnp.int32(index), stream, cache, batch, rope)
    if len(params.layers) in tap_layers:
        taps[len(params.layers)] = stream_sum(_summed(stream, collectives))
    return final_norm(params, stream, config=config, peers=peers), cache, tuple(taps[index] for index in tap_layers)


def stream_sum(stream: Stream) -> Float[Array, "tokens hidden"]:
    """The residual stream itself.

    Raises:
        ValueError: it is not yet summed over devices.
    """
    update = stream.update
    if isinstance(update, Unsummed):
        raise ValueError("the stream's update is not yet summed over devices")
    if update.ndim == stream.residual.ndim:
        return stream.residual + update
    return (stream.residual.astype(jnp.float32) + jnp.sum(update, axis=0)).astype(stream.residual.dtype)


def embed_tokens(params: LlamaParams, batch: Batch, *, collectives: Collectives) -> Stream:
    """Embeddings of the batch's tokens. `params.layers` is not looked at."""
    with jax.named_scope("embed"):
        x = embed(params.embedding, batch.token_ids, collectives)
        return Stream(residual=x, update=jnp.zeros_like(x))


def _summed(stream: Stream, collectives: Collectives) -> Stream:
    """The same with its update summed over devices."""
    if not isinstance(stream.update, Unsummed):
        return stream
    part = stream.update.part
    if isinstance(part, Float8Product):
        part = part.scaled(stream.residual.shape[0], stream.residual.dtype)
    return Stream(residual=stream.residual, update=collectives.all_reduce(part))


def _add_norm(
    residual: Float[Array, "tokens hidden"],
    update: Float[Array, "*parts tokens hidden"] | Unsummed,
    weight: Float[Array, " hidden"],
    config: ModelConfig,
    peers: PeerMemory | None,
    w_next: Any = None,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"] | Float8Rows]:
    """The residual stream with what the last block adds to it, and its norm.

    Args:
        w_next: a weight that alone takes in the norm; where its product rounds what it gets to float8, the norm may be
            rounded so already.
    """
    if isinstance(update, Unsummed):
        return all_reduce_add_rms_norm(
            residual,
            update.part,
            weight,
            config.rms_norm_eps,
            axis=TENSOR_AXIS,
            peers=peers,
            rounds=rounds_rows(w_next),
        )
    return add_rms_norm(residual, update, weight, config.rms_norm_eps)


def _leaves_unsummed(tokens: int, bias: Float[Array, " hidden"] | None, peers: PeerMemory | None) -> bool:
    """Whether a block leaves the sum over devices to the next norm."""
    return peers is not None and bias is None and tokens <= peers.layout.max_rows


def _row_parallel(
    x: Float[Array, "tokens k"] | Float8Rows,
    w: Any,
    bias: Float[Array, " hidden"] | None,
    collectives: Collectives,
    peers: PeerMemory | None,
) -> Float[Array, "*parts tokens hidden"] | Unsummed:
    """The product that ends a block, summed over devices or left to be."""
    if _leaves_unsummed(num_tokens(x), bias, peers):
        return Unsummed(row_parallel_unscaled(x, w))
    return row_parallel(x, w, bias, collectives)


def _like_between_layers(
    stream: Stream, layer: LayerParams, collectives: Collectives, peers: PeerMemory | None
) -> Stream:
    """The stream before the first layer in the form that it has before all others, so that one trace serves them all."""
    if _leaves_unsummed(stream.residual.shape[0], layer.b_down, peers):
        return Stream(residual=stream.residual, update=Unsummed(_nothing(stream.residual, layer.w_down)))
    parts = num_parts(stream.residual.shape[0], layer.w_down, layer.b_down, collectives)
    if parts == 1:
        return stream
    return Stream(residual=stream.residual, update=jnp.zeros((parts, *stream.residual.shape), jnp.float32))


def _nothing(residual: Float[Array, "tokens hidden"], w: Any) -> Float[Array, "tokens hidden"] | Float8Product:
    """What `row_parallel_unscaled` with this weight gives of nothing."""
    if not rounds_rows(w):
        return jnp.zeros_like(residual)
    rows = product_rows(residual.shape[0])
    return Float8Product(
        numbers=jnp.zeros((rows, residual.shape[1]), jnp.float32),
        factors=jnp.zeros(rows, jnp.float32),
        scales=w.scales.reshape(-1),
    )


def rotary_tables(batch: Batch, *, config: ModelConfig) -> RopeTables:
    """Cosines and sines of the batch's positions, which every layer shares."""
    with jax.named_scope("rope"):
        attention_factor = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor
        return rope_tables(batch.positions, inverse_frequencies(config), attention_factor)


def decoder_layer(
    layer: LayerParams,
    index: Int32[Array, ""],
    stream: Stream,
    cache: KVCache,
    batch: Batch,
    rope: RopeTables,
    *,
    config: ModelConfig,
    collectives: Collectives,
    peers: PeerMemory | None = None,
) -> tuple[Stream, KVCache]:
    """One layer: attention, then the MLP, each added to the residual; `peers` as in `forward_with_taps`."""
    with jax.named_scope("attention_norm"):
        x, normed = _add_norm(stream.residual, stream.update, layer.attention_norm, config, peers, layer.wqkv)
    return layer_of_normed(
        layer, index, x, normed, cache, batch, rope, config=config, collectives=collectives, peers=peers
    )


def layer_of_normed(
    layer: LayerParams,
    index: Int32[Array, ""],
    residual: Float[Array, "tokens hidden"],
    normed: Float[Array, "tokens inputs"] | Float8Rows,
    cache: KVCache,
    batch: Batch,
    rope: RopeTables,
    *,
    config: ModelConfig,
    collectives: Collectives,
    peers: PeerMemory | None = None,
) -> tuple[Stream, KVCache]:
    """One layer from what its attention takes in, which may be wider than the residual stream."""
    attended, cache = _attention(layer, index, normed, cache, batch, rope, config, collectives, peers)
    with jax.named_scope("mlp_norm"):
        w_next = None if layer.b_gate_up is not None or not rounds_rows(layer.w_down) else layer.w_gate_up
        x, normed = _add_norm(residual, attended, layer.mlp_norm, config, peers, w_next)
    with jax.named_scope("mlp"):
        activated = swiglu(normed, layer.w_gate_up, layer.b_gate_up, layer.w_down)
        update = _row_parallel(activated, layer.w_down, layer.b_down, collectives, peers)
        return Stream(residual=x, update=update), cache


def final_norm(
    params: LlamaParams, stream: Stream, *, config: ModelConfig, peers: PeerMemory | None = None
) -> Float[Array, "tokens hidden"]:
    with jax.named_scope("final_norm"):
        normed = _add_norm(stream.residual, stream.update, params.final_norm, config, peers)[1]
        return cast("Array", normed)  # nothing was said to take it in float8


def logits(
    params: LlamaParams, hidden: Float[Array, "rows hidden"], *, collectives: Collectives
) -> Float[Array, "rows vocab"]:
    """Float32 scores over the whole vocabulary, for hidden states that `forward` gave."""
    with jax.named_scope("lm_head"):
        if params.lm_head is None:
            scores = jnp.einsum("rh,vh->rv", hidden, params.embedding, preferred_element_type=jnp.float32)
        else:
            scores = head_scores(hidden, params.lm_head)
        return collectives.all_gather_last(scores)


def _attention(
    layer: LayerParams,
    index: Int32[Array, ""],
    normed: Float[Array, "tokens hidden"] | Float8Rows,
    cache: KVCache,
    batch: Batch,
    rope: RopeTables,
    config: ModelConfig,
    collectives: Collectives,
    peers: PeerMemory | None,
) -> tuple[Float[Array, "*parts tokens hidden"] | Unsummed, KVCache]:
    """What attention adds to the residual stream, and the cache with the tokens' keys and values written."""
    tokens = num_tokens(normed)
    _, kv_heads, width, head_dim = layer.wqkv.shape  # this device's KV heads; width is query heads a KV head + 2
    with jax.named_scope("qkv"):
        qkv = column_parallel(normed, layer.wqkv, None)
        qkv = qkv.reshape(tokens, kv_heads, width, head_dim)
        qkv = _norm_heads(add_bias(qkv, layer.bqkv), layer, config)
    with jax.named_scope("rope_write_kv"):
        places = batch.write_pages, batch.write_offsets
        kv_scales = _kv_scales(layer, cache)
        q, k_pages, v_pages = rope_write_kv(qkv, cache.k_pages, cache.v_pages, index, *rope, *places, **kv_scales)
        cache = KVCache(k_pages=k_pages, v_pages=v_pages)
    with jax.named_scope("attention"):
        attended = _paged_attention(q, cache, index, batch, config, kv_scales)
    with jax.named_scope("output"):
        flat = attended.reshape(tokens, -1)  # [tokens, kv_heads * group * head_dim]
        return _row_parallel(flat, layer.wo, layer.bo, collectives, peers), cache


def _norm_heads(
    qkv: Float[Array, "tokens kv_heads width head_dim"], layer: LayerParams, config: ModelConfig
) -> Float[Array, "tokens kv_heads width head_dim"]:
    """Norms every query and key head, in models that do (Qwen3)."""
    if layer.q_norm is None or layer.k_norm is None:
        return qkv
    q, k, v = qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1:]
    q = rms_norm(q, layer.q_norm, config.rms_norm_eps)
    k = rms_norm(k, layer.k_norm, config.rms_norm_eps)
    return jnp.concatenate([q, k, v], axis=2)


def _kv_scales(layer: LayerParams, cache: KVCache) -> dict[str, Any]:
    """What keys and values are divided by before they go into a float8 cache; other caches hold them as they are."""
    if cache.k_pages.dtype != jnp.float8_e4m3fn:
        return {}
    return {"k_scale": layer.k_scale, "v_scale": layer.v_scale}


def _paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    cache: KVCache,
    index: Int32[Array, ""],
    batch: Batch,
    config: ModelConfig,
    kv_scales: dict[str, Any],
) -> Float[Array, "tokens heads head_dim"]:
    """Decode rows and prefill chunks each through their own kernel."""
    decode_rows = batch.decode_kv_lens.shape[0]
    scale, window = config.head_dim**-0.5, config.sliding_window
    parts = []
    if decode_rows:
        parts.append(
            decode_attention(
                q[:decode_rows],
                cache.k_pages,
                cache.v_pages,
                index,
                batch.decode_page_table,
                batch.decode_kv_lens,
                scale=scale,
                window=window,
                **kv_scales,
            )
        )
    if q.shape[0] > decode_rows:
        parts.append(
            prefill_attention(
                q[decode_rows:],
                cache.k_pages,
                cache.v_pages,
                index,
                batch.prefill_page_table,
                batch.prefill_query_starts,
                batch.prefill_kv_lens,
                scale=scale,
                window=window,
                **kv_scales,
            )
        )
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
