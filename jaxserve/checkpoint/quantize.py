"""Quantization of weights on their way to the disk."""

from __future__ import annotations

import contextlib
import dataclasses
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

    Raises:
        ValueError: as `jaxserve.models.quantization.quantize`.
    """
    with _on_the_host():
        compiled = jax.jit(partial(quantize, num_input_axes=num_input_axes, config=quantization))
        return jax.tree.map(np.asarray, compiled(values))


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
