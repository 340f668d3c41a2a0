"""From a vendor's float8 checkpoint to quantized weights: its numbers and scales as they are, in the fused layout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.checkpoint.assemble import Assembler, transposed
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.float8_config import Float8Form
from jaxserve.checkpoint.pieces import EMBEDDING_PIECE, HEAD_PIECE, piece_names
from jaxserve.checkpoint.tensor_names import TensorNames
from jaxserve.checkpoint.tensor_source import FLOAT8_E4M3, TensorSource
from jaxserve.config import ModelConfig

# The modules that each weight is fused of; they share their input, and so its scale.
_WEIGHTS = {"wqkv": ("q", "k", "v"), "wo": ("o",), "w_gate_up": ("gate", "up"), "w_down": ("down",)}
# Ends of the names that vendors give the scale of keys; that of values has v for k.
_KV_SCALE_ENDS = ("self_attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.k_proj.output_scale")


class WithoutScales:
    """A `TensorSource` without some of its tensors."""

    def __init__(self, source: TensorSource, hidden: frozenset[str]) -> None:
        self._source = source
        self._hidden = hidden

    def names(self) -> list[str]:
        return [name for name in self._source.names() if name not in self._hidden]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def dtype(self, name: str) -> np.dtype:
        return self._source.dtype(name)

    def read(self, name: str) -> np.ndarray:
        return self._source.read(name)


@dataclass(frozen=True)
class Float8Assembler:
    """Reads one float8 model, a piece at a time, as `Assembler` does a dense one. `checked` makes one.

    Attributes:
        dense: reads the weights' numbers, and all that is not quantized.
        scales: of each layer, the names of its scale tensors by the names of what they become.
    """

    dense: Assembler
    source: TensorSource
    form: Float8Form
    config: ModelConfig
    scales: tuple[dict[str, tuple[str, ...]], ...]

    @staticmethod
    def checked(
        source: TensorSource,
        names: TensorNames,
        config: ModelConfig,
        dtype: np.dtype | None,
        where: str,
        form: Float8Form,
    ) -> Float8Assembler:
        """Compare what the file holds with what the config says; arguments as of `Assembler.checked`.

        Raises:
            CheckpointError: as `Assembler.checked`; or if a weight is not float8, or a scale is missing or misshaped.
        """
        present = frozenset(source.names())
        if config.num_layers > len(present):
            raise CheckpointError(
                f"{where}: the config says {config.num_layers} layers, but there are {len(present)} tensors in all"
            )
        scales = tuple(_scale_names(names, layer, form, present, where) for layer in range(config.num_layers))
        hidden = frozenset(name for layer in scales for group in layer.values() for name in group)
        dense = Assembler.checked(WithoutScales(source, hidden), names, config, dtype, where)
        for layer in range(config.num_layers):
            _check_layer(source, names, layer, scales[layer], dense, where)
        quantized = dataclasses.replace(
            dense.config, quantization=form.quantization, kv_cache_scales=form.has_kv_scales
        )
        return Float8Assembler(dense, source, form, quantized, scales)

    def source_bytes(self) -> int:
        """Of all tensors that will be read."""
        return self.dense.source_bytes()

    def stored_bytes(self) -> int:
        """Of all arrays that will be given, or a little more."""
        return self.dense.stored_bytes()

    def piece_bytes(self, piece: str) -> int:
        """Of all tensors that `piece` reads, but for scales."""
        return self.dense.piece_bytes(piece)

    def piece(self, piece: str, advance: Callable[[int], None]) -> dict[str, np.ndarray]:
        """The arrays of one of `piece_names(config)`, by their names within it: "wqkv/values", "wqkv/scales"."""
        arrays = self.dense.piece(piece, advance)
        if piece in (EMBEDDING_PIECE, HEAD_PIECE):
            return arrays
        return self._quantized_layer(piece_names(self.config).index(piece) - 1, arrays)

    def _quantized_layer(self, layer: int, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        scales = self.scales[layer]
        for name in _WEIGHTS:
            arrays[f"{name}/values"] = self._values(name, arrays.pop(name))
            arrays[f"{name}/scales"] = self._weight_scales(layer, name)
            if self.form.quantization.has_input_scales:
                # What is fused was quantized apart, for one input: the largest scale cuts no module's.
                parts = [self._scalar(part) for part in scales[f"{name}/input_scale"]]
                arrays[f"{name}/input_scale"] = np.asarray(max(parts), np.float32)
        if self.form.has_kv_scales:
            for name in ("k_scale", "v_scale"):
                arrays[name] = np.asarray(self._scalar(scales[name][0]), np.float32)
        return arrays

    def _values(self, name: str, dense: np.ndarray) -> np.ndarray:
        """Float8 numbers [*outputs, *inputs], of an array [*inputs, *outputs] that holds them exactly."""
        num_inputs = 3 if name == "wo" else 1
        inputs, outputs = dense.shape[:num_inputs], dense.shape[num_inputs:]
        matrix = dense.astype(FLOAT8_E4M3, copy=False).reshape(math.prod(inputs), math.prod(outputs))
        return transposed(matrix).reshape(*outputs, *inputs)

    def _weight_scales(self, layer: int, name: str) -> np.ndarray:
        """Float32 [*outputs]: a module with one scale gives it to each of its outputs."""
        config, sizes = self.config, self._output_sizes(name)
        tensors = [
            self.source.read(part).astype(np.float32).reshape(-1) for part in self.scales[layer][f"{name}/scales"]
        ]
        if len(tensors) == 1 and len(sizes) > 1 and tensors[0].size > 1:  # fused in the file too
            tensors = np.split(tensors[0], np.cumsum(sizes)[:-1])
        elif len(tensors) == 1:
            tensors = tensors * len(sizes)
        parts = [np.broadcast_to(tensor, (size,)) for tensor, size in zip(tensors, sizes, strict=True)]
        if name == "wqkv":
            return np.concatenate([part.reshape(config.num_kv_heads, -1, config.head_dim) for part in parts], axis=1)
        return np.stack(parts) if name == "w_gate_up" else np.ascontiguousarray(parts[0])

    def _output_sizes(self, name: str) -> tuple[int, ...]:
        config = self.config
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return {
            "wqkv": (q, kv, kv),
            "wo": (config.hidden_size,),
            "w_gate_up": (config.intermediate_size, config.intermediate_size),
            "w_down": (config.hidden_size,),
        }[name]

    def _scalar(self, name: str) -> float:
        return float(self.source.read(name).astype(np.float32).reshape(()))


def _scale_names(
    names: TensorNames, layer: int, form: Float8Form, present: frozenset[str], where: str
) -> dict[str, tuple[str, ...]]:
    """A layer's scale tensors by what they become: "wqkv/scales", "wqkv/input_scale", "k_scale"."""
    found: dict[str, tuple[str, ...]] = {}
    for weight, modules in _WEIGHTS.items():
        fused = names.fused(modules) if len(modules) > 1 else None
        held = modules if fused is None else (fused,)
        found[f"{weight}/scales"] = tuple(names.in_layer(layer, module, "weight_scale") for module in held)
        if form.quantization.has_input_scales:
            found[f"{weight}/input_scale"] = tuple(names.in_layer(layer, module, "input_scale") for module in held)
    if form.has_kv_scales:
        prefix = names.layer.format(layer=layer)
        for letter in ("k", "v"):
            ends = [end.replace("k_", f"{letter}_") for end in _KV_SCALE_ENDS]
            candidates = [prefix + end for end in ends]
            found[f"{letter}_scale"] = (next((name for name in candidates if name in present), candidates[0]),)
    for group in found.values():
        for name in group:
            if name not in present:
                raise CheckpointError(f"{where}: tensor {name!r} is missing: fetch the checkpoint again")
    return found


def _check_layer(
    source: TensorSource,
    names: TensorNames,
    layer: int,
    scales: dict[str, tuple[str, ...]],
    dense: Assembler,
    where: str,
) -> None:
    for what, group in scales.items():
        for name in group:
            shape, size = source.shape(name), math.prod(source.shape(name))
            if not what.endswith("/scales"):
                if size != 1:
                    raise CheckpointError(f"{where}: tensor {name!r} has shape {shape}, and must be one number")
                continue
            weight = name.removesuffix("weight_scale") + "weight"
            if source.dtype(weight) != FLOAT8_E4M3:
                raise CheckpointError(
                    f"{where}: tensor {weight!r} is {source.dtype(weight)}, but the config says that it is float8 (e4m3)"
                )
            outputs = dense.expected[weight][0]
            if size not in (1, outputs):
                raise CheckpointError(
                    f"{where}: tensor {name!r} has shape {shape}, and must have one number, or one for each of the "
                    f"{outputs} outputs"
                )
