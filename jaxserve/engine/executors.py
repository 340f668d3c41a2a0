"""Two ways to run a forward pass: as one program, or layer by layer with one program that all layers share.

One program is fastest where launches are dear (a GPU). On a CPU a launch costs little beside a layer, and compiling every
layer anew for every bucket would keep the first user waiting for minutes.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxserve.engine.decode_state import DecodeState
from jaxserve.engine.device_batch import Bucket, packed_size
from jaxserve.engine.programs import ForwardResult, ProgramFactory, without_layers
from jaxserve.models.kv_cache import KVCache
from jaxserve.models.params import LlamaParams
from jaxserve.sharding.placement import replicated


class ForwardExecutor(Protocol):
    """Runs the forward pass of one bucket. Cache and state are donated: the caller goes on with those of the result."""

    def __call__(
        self, params: LlamaParams, cache: KVCache, state: DecodeState, packed: jax.Array
    ) -> ForwardResult: ...


class WholeForward:
    """The whole pass as one compiled program."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def __call__(
        self, params: LlamaParams, cache: KVCache, state: DecodeState, packed: jax.Array
    ) -> ForwardResult:
        return self._compiled(params, cache, state, packed)


class LayerwiseForward:
    """Begin, then each layer through one compiled program, then end."""

    def __init__(self, begin: Any, layer: Any, end: Any, layer_indices: tuple[jax.Array, ...]) -> None:
        self._begin = begin
        self._layer = layer
        self._end = end
        self._layer_indices = layer_indices

    def __call__(
        self, params: LlamaParams, cache: KVCache, state: DecodeState, packed: jax.Array
    ) -> ForwardResult:
        outer = without_layers(params)
        state, x, inputs = self._begin(outer, state, packed)
        for index, layer in zip(self._layer_indices, params.layers, strict=True):
            x, cache = self._layer(layer, index, x, cache, inputs)
        return ForwardResult(cache=cache, state=state, logits=self._end(outer, x, inputs), slots=inputs.slots)


def compile_whole(
    factory: ProgramFactory,
    bucket: Bucket,
    num_logits: int,
    params: LlamaParams,
    cache: KVCache,
    state: DecodeState,
) -> WholeForward:
    """Compiles one bucket's pass as one program; the arrays give shapes and placement only."""
    function = jax.jit(factory.forward(bucket, num_logits), donate_argnums=(1, 2))
    return WholeForward(function.lower(params, cache, state, _packed(factory, bucket)).compile())


def compile_layerwise(
    factory: ProgramFactory,
    bucket: Bucket,
    num_logits: int,
    params: LlamaParams,
    cache: KVCache,
    state: DecodeState,
) -> LayerwiseForward:
    """Compiles one bucket's begin, layer and end; the arrays give shapes and placement only."""
    outer = without_layers(params)
    packed = _packed(factory, bucket)
    whole = replicated(factory.mesh)
    begin = jax.jit(factory.begin(bucket, num_logits), donate_argnums=(1,)).lower(outer, state, packed).compile()
    _, x, inputs = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
        jax.eval_shape(factory.begin(bucket, num_logits), outer, state, packed),
    )
    indices = tuple(jax.device_put(jnp.int32(index), whole) for index in range(len(params.layers)))
    layer = jax.jit(factory.layer(), donate_argnums=(2, 3)).lower(params.layers[0], indices[0], x, cache, inputs)
    end = jax.jit(factory.end()).lower(outer, x, inputs)
    return LayerwiseForward(begin, layer.compile(), end.compile(), indices)


def _packed(factory: ProgramFactory, bucket: Bucket) -> jax.ShapeDtypeStruct:
    size = packed_size(bucket, factory.sizes)
    return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=replicated(factory.mesh))
