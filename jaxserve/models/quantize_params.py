"""Quantizes the weights of a whole model where they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from jaxserve.config import ModelConfig, QuantizationConfig
from jaxserve.models.params import QUANTIZABLE, LayerParams, LlamaParams, param_specs
from jaxserve.models.quantization import QuantizedWeight, quantize

# Float8 keeps three bits behind the point. The fewer weights a model has, the more it loses by that, and the less it gains.
_FEW_WEIGHTS = 1_000_000_000
_ENOUGH_LAYERS = 8  # a model with fewer is an experiment
_SENSITIVE_WEIGHTS = ("wqkv", "w_down")  # by what they lose for each byte that they save


def quantization_for(model: ModelConfig, asked: QuantizationConfig) -> QuantizationConfig:
    """What a quantization that is asked for becomes in a model: float8 leaves some weights of a small one as they are.

    In models with fewer than a billion weights these are the first and the last layer, and `wqkv` and `w_down` of all.
    """
    if asked.format not in ("fp8", "fp8-weight-only") or asked.leaves_some:
        return asked
    dense = param_specs(dataclasses.replace(model, quantization=None))
    num_weights = sum(spec.size for spec in jax.tree.leaves(dense))
    if num_weights >= _FEW_WEIGHTS or model.num_layers < _ENOUGH_LAYERS:
        return asked
    return dataclasses.replace(asked, dense_layers=(0, model.num_layers - 1), dense_weights=_SENSITIVE_WEIGHTS)


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
        names = [name for name in QUANTIZABLE if quantization.quantizes(index, name)]
        layers.append(_quantize_layer(layer, names, quantization, places, programs, donate))
        advance(1)
    return dataclasses.replace(params, layers=tuple(layers))


def _quantize_layer(
    layer: LayerParams,
    names: Sequence[str],
    config: QuantizationConfig,
    places: Any,
    programs: dict[str, Any],
    donate: bool,
) -> LayerParams:
    quantized: dict[str, QuantizedWeight] = {}
    for name in names:
        if name not in programs:
            function = partial(quantize, num_input_axes=QUANTIZABLE[name], config=config)
            place = None if places is None else getattr(places, name)
            programs[name] = jax.jit(function, out_shardings=place)
        dense = getattr(layer, name)
        quantized[name] = programs[name](dense)
        if donate and isinstance(dense, jax.Array):
            jax.block_until_ready(quantized[name])
            dense.delete()
    return dataclasses.replace(layer, **quantized)
