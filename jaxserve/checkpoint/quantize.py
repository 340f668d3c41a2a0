"""Quantization of weights on their way to the disk."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.config import ModelConfig, QuantizationConfig
from jaxserve.models.params import QUANTIZABLE, param_specs
from jaxserve.models.quantization import QuantizedWeight, quantize
from jaxserve.models.quantize_params import quantization_for

_NUMBERS_AT_ONCE = 1 << 19  # of a weight, about: each is a float32 up to twenty times while it is quantized
_FEWEST_OUTPUTS = 64  # that are worth a call
_quantize = jax.jit(quantize, static_argnames=("num_input_axes", "config"))


@dataclass(frozen=True)
class QuantizationStep:
    """The step of a conversion (see `jaxserve.checkpoint.convert.WeightStep`) that quantizes the layers' weights."""

    quantization: QuantizationConfig

    @property
    def name(self) -> str:
        return self.quantization.name

    def config(self, config: ModelConfig) -> ModelConfig:
        """Of the quantized model.

        Raises:
            CheckpointError: the model is quantized already, or its sizes do not fit the format.
        """
        if config.quantization is not None:
            raise CheckpointError(
                f"cannot quantize to {self.name}: the model is quantized already, as {config.quantization.name}"
            )
        quantized = dataclasses.replace(config, quantization=quantization_for(config, self.quantization))
        try:
            param_specs(quantized)
        except ValueError as error:
            raise CheckpointError(f"cannot quantize to {self.name}: {error}") from error
        return quantized

    def apply(self, config: ModelConfig, layer: int | None, name: str, values: np.ndarray) -> Any:
        """A layer's weight called `name`, quantized if it is to be; other arrays as they are."""
        quantization = config.quantization
        if quantization is None or layer is None or name not in QUANTIZABLE or not quantization.quantizes(layer, name):
            return values
        return quantize_tensor(values, QUANTIZABLE[name], quantization)


def quantization_step(name: str | None) -> QuantizationStep | None:
    """The step for a name that users give (`jaxserve.config.Quantization`); None: no step.

    Raises:
        ValueError: there is none of that name.
    """
    return None if name is None else QuantizationStep(QuantizationConfig.named(name))


def quantize_tensor(values: np.ndarray, num_input_axes: int, quantization: QuantizationConfig) -> QuantizedWeight:
    """One dense weight [*inputs, *outputs], quantized on the host into NumPy arrays.

    Some outputs at a time, none of which depends on another: on the way they take many times their size.

    Raises:
        ValueError: as `jaxserve.models.quantization.quantize`.
    """
    options = {"num_input_axes": num_input_axes, "config": quantization}
    whole = jax.eval_shape(partial(quantize, **options), jax.ShapeDtypeStruct(values.shape, values.dtype))
    quantized = np.empty(whole.values.shape, whole.values.dtype)  # [*outputs, *inputs]
    scales = np.empty(whole.scales.shape, whole.scales.dtype)  # [*groups, *outputs]
    inputs, outputs = values.shape[:num_input_axes], values.shape[num_input_axes:]
    num_outputs = math.prod(outputs)
    step = min(max(_FEWEST_OUTPUTS, _NUMBERS_AT_ONCE // math.prod(inputs)), num_outputs)
    # The same memory, with the outputs along one axis.
    dense_by_output = values.reshape(*inputs, num_outputs)
    quantized_by_output = quantized.reshape(num_outputs, *quantized.shape[len(outputs) :])
    scales_by_output = scales.reshape(*scales.shape[: scales.ndim - len(outputs)], num_outputs)
    with _on_the_host():
        for start in range(0, num_outputs, step):
            first = min(start, num_outputs - step)  # the last ones of the same number: another would be compiled for
            some = slice(first, first + step)
            part = _quantize(np.ascontiguousarray(dense_by_output[..., some]), **options)
            quantized_by_output[some] = part.values
            scales_by_output[..., some] = part.scales
    return dataclasses.replace(whole, values=quantized, scales=scales)


@contextlib.contextmanager
def _on_the_host() -> Iterator[None]:
    """Computes on the CPU, so that converting takes no memory from a GPU that serves meanwhile."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out: then where everything else runs
        yield
        return
    with jax.default_device(device):
        yield
