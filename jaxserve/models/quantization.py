"""Quantized weights: what they hold, how they are made from dense ones, and back.

A quantized weight sits where a dense one did. Its values have the outputs' axes in front and the inputs' behind, so that
what one output sums over lies together: 8-bit tensor cores take nothing else, and 4-bit numbers unpack run by run. A shard
along a weight's sharded axis is a slice of the values, and of the scales where they have that axis.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxserve.kernels.int4 import RUN_LENGTH, pack_int4, unpack_int4
from jaxserve.models.param_spec import ParamSpec
from jaxserve.quantization_config import QuantizationConfig, QuantizationFormat

FLOAT8_MAX = 448.0  # of float8_e4m3fn, which has no infinity
_INT8_MAX = 127.0
_INT4_MIN, _INT4_MAX = -8.0, 7.0
# How far the scale of an int4 group may shrink so that its largest number is cut and all others get finer steps.
_INT4_SHRINKAGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
_INT4_SCALE_DTYPE = "bfloat16"  # float32 would add a quarter to the bytes of groups of 32
_VALUE_DTYPES: dict[QuantizationFormat, str] = {
    "fp8": "float8_e4m3fn",
    "fp8-weight-only": "float8_e4m3fn",
    "int8": "int8",
    "int4": "uint8",
}


@struct.dataclass
class QuantizedWeight:
    """A weight as `values * scales`. Leaves are arrays, or `ParamSpec`s where only the declaration is wanted.

    Attributes:
        values: [*outputs, *inputs]: float8_e4m3fn, int8, or uint8 with two 4-bit numbers each along the last axis, as
            `jaxserve.kernels.int4` packs them.
        scales: float32 [*outputs]; int4: bfloat16 [*groups, *outputs], the groups being runs of inputs.
        input_scale: float32 [], by which activations are divided before they become float8; None: each token has its own.
        format: one of `QuantizationFormat`.
        num_input_axes: how many axes the inputs have.
    """

    values: Any
    scales: Any
    input_scale: Any
    format: QuantizationFormat = struct.field(pytree_node=False)
    num_input_axes: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the dense weight: [*inputs, *outputs]."""
        outputs, inputs = split_axes(self.values.shape, self.num_input_axes)
        if self.format == "int4":
            inputs = (*inputs[:-1], 2 * inputs[-1])
        return (*inputs, *outputs)


def split_axes(sizes: tuple[Any, ...], num_last: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """All but the last `num_last`, and those."""
    return sizes[: len(sizes) - num_last], sizes[len(sizes) - num_last :]


def quantized_spec(dense: ParamSpec, num_input_axes: int, config: QuantizationConfig) -> QuantizedWeight:
    """The declaration of a quantized weight, from that of the dense one ([*inputs, *outputs]).

    Raises:
        ValueError: int4 and an odd number of inputs.
    """
    inputs, outputs = dense.shape[:num_input_axes], dense.shape[num_input_axes:]
    input_axes, output_axes = dense.logical_axes[:num_input_axes], dense.logical_axes[num_input_axes:]
    scales = ParamSpec(outputs, output_axes, None, "float32")
    if config.format == "int4":
        groups = int4_groups(inputs, config.group_size)
        group_axes = (input_axes[0], *(("groups",) if len(groups) > 1 else ()))
        scales = ParamSpec((*groups, *outputs), (*group_axes, *output_axes), None, _INT4_SCALE_DTYPE)
        inputs = (*inputs[:-1], inputs[-1] // 2)
    return QuantizedWeight(
        values=ParamSpec((*outputs, *inputs), (*output_axes, *input_axes), 0.0, _VALUE_DTYPES[config.format]),
        scales=scales,
        input_scale=ParamSpec((), (), None, "float32") if config.has_input_scales else None,
        format=config.format,
        num_input_axes=num_input_axes,
    )


def group_length(num_inputs: int, group_size: int) -> int:
    """Inputs that share a scale: the largest even divisor of `num_inputs` that is not above `group_size`.

    Raises:
        ValueError: `num_inputs` is odd.
    """
    for length in range(min(group_size, num_inputs), 1, -1):
        if length % 2 == 0 and num_inputs % length == 0:
            return length
    raise ValueError(f"{num_inputs} inputs cannot be cut into int4 groups of at most {group_size}: it must be even")


def int4_groups(inputs: tuple[int, ...], group_size: int) -> tuple[int, ...]:
    """Numbers of groups. No group reaches over the first of several input axes, along which devices share the inputs.

    Devices that hold the same KV head share the second axis too, and may cut groups in parts there. That must leave the
    runs of 32 whole that long groups are stored in: where the last axis has no whole number of them, groups divide it.
    They also divide the groups that there would be otherwise, so that scales of these can be repeated.

    Raises:
        ValueError: two numbers cannot share each byte.
    """
    if len(inputs) == 1:
        return (inputs[0] // group_length(inputs[0], group_size),)
    per_first = math.prod(inputs[1:])
    if inputs[-1] % 2:
        raise ValueError(f"{inputs=} must end in an even size for int4: two numbers share a byte")
    length = group_length(per_first, group_size)
    if inputs[-1] % RUN_LENGTH:
        length = math.gcd(length, inputs[-1])
    return (inputs[0], per_first // length)


def quantize(w: Float[Array, "..."], num_input_axes: int, config: QuantizationConfig) -> QuantizedWeight:
    """Rounds a dense weight [*inputs, *outputs] to the nearest values, each output (or group) with a scale of its own.

    Scales make the largest magnitude the largest number of the format. int4 scales are chosen, group by group, as the
    best in the sense of least squares of some that are a little smaller; they may be negative, so that the one number
    more that there is below zero serves whichever sign is the larger.

    Raises:
        ValueError: input scales are asked for (they come with checkpoints), or int4 of an odd number of inputs.
    """
    if config.has_input_scales:
        raise ValueError("input scales come with a checkpoint: they cannot be made from the weights")
    inputs, outputs = w.shape[:num_input_axes], w.shape[num_input_axes:]
    wide = w.astype(jnp.float32)
    if config.format == "int4":
        groups = int4_groups(inputs, config.group_size)
        numbers, scales = _round_int4(wide, groups, outputs)
        length = math.prod(inputs) // math.prod(groups)
        values = pack_int4(_outputs_first(numbers.reshape(w.shape), num_input_axes), length)
    else:
        largest = FLOAT8_MAX if config.format in ("fp8", "fp8-weight-only") else _INT8_MAX
        extremes = jnp.max(jnp.abs(wide), axis=tuple(range(num_input_axes)))
        scales = jnp.where(extremes > 0, extremes / largest, 1.0)
        quotients = wide / scales.reshape((1,) * num_input_axes + outputs)
        if config.format == "int8":
            quotients = jnp.round(quotients)
        quotients = jnp.clip(quotients, -largest, largest)
        values = _outputs_first(quotients.astype(_VALUE_DTYPES[config.format]), num_input_axes)
    return QuantizedWeight(values, scales, None, format=config.format, num_input_axes=num_input_axes)


def _round_int4(wide: Array, groups: tuple[int, ...], outputs: tuple[int, ...]) -> tuple[Array, Array]:
    """Numbers as int8 [*groups, inputs of a group, *outputs], and scales [*groups, *outputs]."""
    grouped = wide.reshape(*groups, -1, *outputs)  # [*groups, inputs of a group, *outputs]
    axis = len(groups)
    lowest, highest = jnp.min(grouped, axis, keepdims=True), jnp.max(grouped, axis, keepdims=True)
    extremes = jnp.where(-lowest > highest, lowest, highest)

    def attempt(shrinkage: float) -> tuple[Array, Array, Array]:
        scales = (extremes * (shrinkage / _INT4_MIN)).astype(_INT4_SCALE_DTYPE)
        scales = jnp.where(scales == 0, jnp.ones_like(scales), scales)
        numbers = jnp.clip(jnp.round(grouped / scales.astype(jnp.float32)), _INT4_MIN, _INT4_MAX)
        errors = jnp.sum(jnp.square(numbers * scales.astype(jnp.float32) - grouped), axis, keepdims=True)
        return scales, numbers, errors

    best = attempt(_INT4_SHRINKAGES[0])
    for shrinkage in _INT4_SHRINKAGES[1:]:
        other = attempt(shrinkage)
        better = other[2] < best[2]
        best = tuple(jnp.where(better, new, old) for new, old in zip(other, best, strict=True))
    scales, numbers, _ = best
    return numbers.astype(jnp.int8), jnp.squeeze(scales, axis)


def dequantize(weight: QuantizedWeight) -> Float[Array, "..."]:
    """The dense weight [*inputs, *outputs] that a quantized one stands for, in float32."""
    num_outputs = weight.values.ndim - weight.num_input_axes
    inputs, outputs = split_axes(weight.shape, num_outputs)
    scales = weight.scales.astype(jnp.float32)
    order = (*range(num_outputs, weight.values.ndim), *range(num_outputs))  # [*inputs, *outputs]
    if weight.format != "int4":
        wide = weight.values.astype(jnp.float32).transpose(order)
        return wide * scales.reshape((1,) * weight.num_input_axes + outputs)
    groups, _ = split_axes(scales.shape, num_outputs)
    wide = unpack_int4(weight.values, math.prod(inputs) // math.prod(groups)).astype(jnp.float32).transpose(order)
    return (wide.reshape(*groups, -1, *outputs) * jnp.expand_dims(scales, len(groups))).reshape(wide.shape)


def _outputs_first(values: Array, num_input_axes: int) -> Array:
    return values.transpose(*range(num_input_axes, values.ndim), *range(num_input_axes))


def quantized_bytes(weight: QuantizedWeight) -> int:
    """Bytes of all arrays of a weight."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight))
