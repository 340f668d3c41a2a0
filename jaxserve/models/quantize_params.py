"""Quantizes the weights of a whole model, or of a layer of it, where they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from jaxserve.config import ModelConfig, QuantizationConfig
from jaxserve.models.params import QUANTIZABLE, LlamaParams, param_specs
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


class LayerQuantizer:
    """Quantizes a dense model's layers one after the other, by one program for each of their weights."""

    def __init__(self, quantization: QuantizationConfig, shardings: LlamaParams | None = None) -> None:
        """
        Args:
            shardings: of the quantized model (`named_shardings` of its `param_specs`); None: where jax puts them.
        """
        self._quantization = quantization
        self._shardings = shardings
        self._programs: dict[str, Any] = {}

    def weights_of(self, layer: int) -> tuple[str, ...]:
        """The fields of `LayerParams` that are to be quantized in a layer."""
        return tuple(name for name in QUANTIZABLE if self._quantization.quantizes(layer, name))

    def quantized(self, layer: int, dense: Mapping[str, Any], *, donate: bool) -> dict[str, QuantizedWeight]:
        """The weights of a layer (`weights_of`), of NumPy or jax arrays in any float.

        Args:
            donate: delete each dense jax array as soon as its quantized form is there.
        """
        quantized: dict[str, QuantizedWeight] = {}
        for name in self.weights_of(layer):
            if name not in self._programs:
                function = partial(quantize, num_input_axes=QUANTIZABLE[name], config=self._quantization)
                place = None if self._shardings is None else getattr(self._shardings.layers[layer], name)
                self._programs[name] = jax.jit(function, out_shardings=place)
            weight = dense[name]
            quantized[name] = self._programs[name](weight)
            if donate and isinstance(weight, jax.Array):
                jax.block_until_ready(quantized[name])
                weight.delete()
        return quantized


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
    quantizer = LayerQuantizer(quantization, shardings)
    layers = []
    for index, layer in enumerate(params.layers):
        dense = {name: getattr(layer, name) for name in quantizer.weights_of(index)}
        layers.append(dataclasses.replace(layer, **quantizer.quantized(index, dense, donate=donate)))
        advance(1)
    return dataclasses.replace(params, layers=tuple(layers))
