"""How the weights of a model's layers are held in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

QuantizationFormat = Literal["fp8", "fp8-weight-only", "int8", "int4"]
Quantization = Literal["fp8", "fp8-weight-only", "int8", "int4", "int4-32"]  # as users ask for it


@dataclass(frozen=True)
class QuantizationConfig:
    """How the weights of a model's layers are held. Embedding, output head, norms and biases are never quantized.

    Attributes:
        format: "fp8": float8_e4m3fn weights with a scale for each output, and activations in float8 too, with a scale for
            each token; "fp8-weight-only", "int8": 8-bit weights with a scale for each output; "int4": 4-bit weights with
            a scale for each group of inputs.
        group_size: inputs in a group at most (int4 only; see `jaxserve.models.quantization.group_length`).
        dense_layers, dense_weights: layers, and weights of every layer (fields of `LayerParams`), that stay as they are.
        dense_parts: single weights that do: the number of a layer, and one of its weights.
        has_input_scales: the checkpoint brings one fixed scale for each product's activations (fp8 only).
    """

    format: QuantizationFormat
    group_size: int = 128
    has_input_scales: bool = False
    dense_layers: tuple[int, ...] = ()
    dense_weights: tuple[str, ...] = ()
    dense_parts: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        if self.format not in get_args(QuantizationFormat):
            raise ValueError(f"quantization format={self.format!r} must be one of {get_args(QuantizationFormat)}")
        if self.group_size < 2:
            raise ValueError(f"group_size={self.group_size} must be at least 2")
        if self.has_input_scales and self.format != "fp8":
            raise ValueError(f"has_input_scales goes with format 'fp8', not {self.format!r}")

    @staticmethod
    def named(name: str) -> QuantizationConfig:
        """What a `Quantization` stands for: "int4" has groups of 128, "int4-32" of 32.

        Raises:
            ValueError: there is none of that name.
        """
        if name not in get_args(Quantization):
            raise ValueError(f"quantization={name!r} must be one of {', '.join(get_args(Quantization))}")
        if name == "int4-32":
            return QuantizationConfig("int4", 32)
        return QuantizationConfig(name)  # pyright: ignore[reportArgumentType] - the other names are formats

    @property
    def leaves_some(self) -> bool:
        """Whether it says of some layers or weights that they stay as they are."""
        return bool(self.dense_layers or self.dense_weights or self.dense_parts)

    def quantizes(self, layer: int, weight: str) -> bool:
        """Whether one of a layer's large weights, a field of `LayerParams`, is quantized."""
        is_left = layer in self.dense_layers or weight in self.dense_weights or (layer, weight) in self.dense_parts
        return not is_left

    @property
    def name(self) -> str:
        """For people: the format, with the group size where it is not the usual one."""
        return f"int4-{self.group_size}" if self.format == "int4" and self.group_size != 128 else self.format
