"""The parameters of a Llama-family model: shape, logical axes and initialisation of each array in one declaration.

Every weight is laid out so that a tensor-parallel shard is a slice along one axis: `wqkv` and `wo` along `kv_heads`,
`w_gate_up` and `w_down` along `ffn`, the embedding and the head along `vocab`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxserve.config import ModelConfig, QuantizationConfig
from jaxserve.models.param_spec import ParamSpec
from jaxserve.models.quantization import QuantizedWeight, quantize, quantized_spec

# (name, what lowers it) -> the compiled program that is called so.
LoadOrCompile = Callable[[str, Callable[[], jax.stages.Lowered]], Any]


@struct.dataclass
class LayerParams:
    """One decoder layer. Leaves are arrays, or `ParamSpec`s where only the declaration is wanted.

    Where the model is quantized, `wqkv`, `wo`, `w_gate_up` and `w_down` are `QuantizedWeight`s of the shapes told here, but
    for those that its quantization leaves as they are.
    """

    attention_norm: Any  # [hidden]
    wqkv: Any  # [hidden, kv_heads, group + 2, head_dim]: a KV head's query heads, then its k, then its v
    bqkv: Any  # [kv_heads, group + 2, head_dim] or None
    q_norm: Any  # [head_dim] or None
    k_norm: Any  # [head_dim] or None
    wo: Any  # [kv_heads, group, head_dim, hidden]
    bo: Any  # [hidden] or None
    mlp_norm: Any  # [hidden]
    w_gate_up: Any  # [hidden, 2, ffn]: gate, then up
    b_gate_up: Any  # [2, ffn] or None
    w_down: Any  # [ffn, hidden]
    b_down: Any  # [hidden] or None
    k_scale: Any = None  # [], that keys in a float8 cache are multiplied with, or None
    v_scale: Any = None  # [], of the values


# The weights of `LayerParams` that quantization is for, and how many of their axes, the first ones, are summed over.
QUANTIZABLE: dict[str, int] = {"wqkv": 1, "wo": 3, "w_gate_up": 1, "w_down": 1}


@struct.dataclass
class LlamaParams:
    """A whole model. `lm_head` is None where the head is tied to the embedding (stored once)."""

    embedding: Any  # [vocab, hidden]
    layers: tuple[LayerParams, ...]
    final_norm: Any  # [hidden]
    lm_head: Any  # [hidden, vocab] or None


def _layer_specs(config: ModelConfig, index: int) -> LayerParams:
    hidden, ffn = config.hidden_size, config.intermediate_size
    kv_heads, group, head_dim = config.num_kv_heads, config.group_size, config.head_dim

    def norm(size: int, axis: str) -> ParamSpec:
        return ParamSpec((size,), (axis,), None)

    def when(wanted: bool, spec: ParamSpec) -> ParamSpec | None:
        return spec if wanted else None

    dense = LayerParams(
        attention_norm=norm(hidden, "hidden"),
        wqkv=ParamSpec(
            (hidden, kv_heads, group + 2, head_dim), ("hidden", "kv_heads", "qkv", "head_dim"), hidden**-0.5
        ),
        bqkv=when(
            config.attention_bias, ParamSpec((kv_heads, group + 2, head_dim), ("kv_heads", "qkv", "head_dim"), 0.0)
        ),
        q_norm=when(config.qk_norm, norm(head_dim, "head_dim")),
        k_norm=when(config.qk_norm, norm(head_dim, "head_dim")),
        wo=ParamSpec(
            (kv_heads, group, head_dim, hidden),
            ("kv_heads", "group", "head_dim", "hidden"),
            (config.num_heads * head_dim) ** -0.5,
        ),
        bo=when(config.attention_output_bias, ParamSpec((hidden,), ("hidden",), 0.0)),
        mlp_norm=norm(hidden, "hidden"),
        w_gate_up=ParamSpec((hidden, 2, ffn), ("hidden", "gate_up", "ffn"), hidden**-0.5),
        b_gate_up=when(config.mlp_bias, ParamSpec((2, ffn), ("gate_up", "ffn"), 0.0)),
        w_down=ParamSpec((ffn, hidden), ("ffn", "hidden"), ffn**-0.5),
        b_down=when(config.mlp_bias, ParamSpec((hidden,), ("hidden",), 0.0)),
        k_scale=when(config.kv_cache_scales, ParamSpec((), (), None)),
        v_scale=when(config.kv_cache_scales, ParamSpec((), (), None)),
    )
    if config.quantization is None:
        return dense
    quantized = {
        name: quantized_spec(getattr(dense, name), num_input_axes, config.quantization)
        for name, num_input_axes in QUANTIZABLE.items()
        if config.quantization.quantizes(index, name)
    }
    return dataclasses.replace(dense, **quantized)


def param_specs(config: ModelConfig) -> LlamaParams:
    """The declaration of every array of a model with this config: a `LlamaParams` whose leaves are `ParamSpec`s."""
    hidden, vocab = config.hidden_size, config.vocab_size
    layers = tuple(_layer_specs(config, index) for index in range(config.num_layers))
    head = None if config.tie_word_embeddings else ParamSpec((hidden, vocab), ("hidden", "vocab"), hidden**-0.5)
    return LlamaParams(
        embedding=ParamSpec((vocab, hidden), ("vocab", "hidden"), 1.0 if head is not None else hidden**-0.5),
        layers=layers,
        final_norm=ParamSpec((hidden,), ("hidden",), None),
        lm_head=head,
    )


def init_params(
    config: ModelConfig,
    seed: int,
    dtype: jnp.dtype,
    shardings: Any = None,
    load_or_compile: LoadOrCompile | None = None,
) -> LlamaParams:
    """Seeded random weights (norms ones, biases zeros), each made where it will live.

    Those of a quantized model are the dense model's, quantized one by one as they are drawn.

    Args:
        dtype: of every array but the norms, which are float32 as everywhere in the engine, and quantized weights.
        shardings: a `LlamaParams` of shardings; None: the default device.
        load_or_compile: what keeps compiled programs, those for the mesh of `shardings`; None: they are compiled anew.
    """
    specs, treedef = jax.tree.flatten(param_specs(dataclasses.replace(config, quantization=None)), is_leaf=is_declared)
    wanted = jax.tree.leaves(param_specs(config), is_leaf=is_declared)
    places = [None] * len(specs) if shardings is None else jax.tree.leaves(shardings, is_leaf=is_declared)
    programs: dict[str, Any] = {}  # one for each kind of array, not one for each array
    arrays = []
    for index, (spec, kind, place) in enumerate(zip(specs, wanted, places, strict=True)):
        draw = partial(draw_param, spec, dtype)
        name = f"random {spec}, one of {len(specs)}, {dtype}, by {_random_numbers()}"
        if isinstance(kind, QuantizedWeight) and config.quantization is not None:
            draw = partial(_draw_quantized, draw, kind.num_input_axes, config.quantization)
            name += f", of {kind.num_input_axes} input axes, {config.quantization}"
        # Of a larger seed `jax.random.key` takes the last 32 bits as well.
        which = np.int64(seed).astype(np.int32), np.int32(index)
        if name not in programs:
            function = jax.jit(partial(_draw_one, draw, len(specs)), out_shardings=place)
            lower = partial(function.lower, *which)
            programs[name] = function if load_or_compile is None else load_or_compile(name, lower)
        arrays.append(programs[name](*which))
    return jax.tree.unflatten(treedef, arrays)


def is_declared(leaf: Any) -> bool:
    """Whether a node of a tree of declarations (or of what goes with them one by one) stands for one weight."""
    return isinstance(leaf, (ParamSpec, QuantizedWeight))


def draw_param(spec: ParamSpec, dtype: jnp.dtype, key: jax.Array) -> jax.Array:
    """One random array as its spec declares it; norms are float32 ones."""
    if spec.standard_deviation is None:
        return jnp.ones(spec.shape, jnp.float32)
    if spec.standard_deviation == 0.0:
        return jnp.zeros(spec.shape, dtype)
    return jax.random.normal(key, spec.shape, dtype) * jnp.asarray(spec.standard_deviation, dtype)


def _random_numbers() -> str:
    """What decides beside a seed which numbers JAX draws."""
    is_partitionable = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    return f"{jax.config.jax_default_prng_impl}, {is_partitionable=}"  # pyright: ignore[reportAttributeAccessIssue]


def _draw_one(draw: Callable[[jax.Array], Any], count: int, seed: jax.Array, index: jax.Array) -> Any:
    """One of the `count` arrays of a model, each of which has a key of its own."""
    return draw(jax.random.split(jax.random.key(seed), count)[index])


def _draw_quantized(
    draw: Callable[[jax.Array], jax.Array], num_input_axes: int, config: QuantizationConfig, key: jax.Array
) -> QuantizedWeight:
    return quantize(draw(key), num_input_axes, config)
