"""Quantizes the weights of a whole model where they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxserve.config import ModelConfig, QuantizationConfig
from jaxserve.models.params import QUANTIZABLE, LayerParams, LlamaParams
from jaxserve.models.quantization import QuantizedWeight, quantize


def quantize_params(
    params: LlamaParams,
    config: ModelConfig,
    quantization: QuantizationConfig,
    shardings: LlamaParams | None = None,
    *,
    donate: bool = False,
    advance: Callable[[int], None] = lambda layers: None,
) -> LlamaParams:
    """A dense model's params with the layers' weights quantized; everything else is passed on.

    Args:
        params: NumPy or jax arrays.
        config: of the dense model.
        shardings: of the quantized model (`named_shardings` of its `param_specs`); None: where jax puts them.
        donate: delete each dense jax array as soon as its quantized form is there, so that there are never two models.
        advance: told that one more layer is done.

    Raises:
        ValueError: the model is quantized already, or the format does not fit its sizes.
    """
    if config.quantization is not None:
        raise ValueError(f"the model is quantized already ({config.quantization.name}): it cannot be again")
    layers = []
    programs: dict[str, Any] = {}
    for index, layer in enumerate(params.layers):
        places = shardings.layers[index] if shardings is not None else None
        layers.append(_quantize_layer(layer, quantization, places, programs, donate))
        advance(1)
    return dataclasses.replace(params, layers=tuple(layers))


def _quantize_layer(
    layer: LayerParams, config: QuantizationConfig, places: Any, programs: dict[str, Any], donate: bool
) -> LayerParams:
    quantized: dict[str, QuantizedWeight] = {}
    for name, num_input_axes in QUANTIZABLE.items():
        if name not in programs:
            function = partial(quantize, num_input_axes=num_input_axes, config=config)
            place = None if places is None else getattr(places, name)
            programs[name] = jax.jit(function, out_shardings=place)
        dense = getattr(layer, name)
        quantized[name] = programs[name](dense)
        if donate and isinstance(dense, jax.Array):
            jax.block_until_ready(quantized[name])
            dense.delete()
    return dataclasses.replace(layer, **quantized)
