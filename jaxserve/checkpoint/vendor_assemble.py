"""From a vendor's quantized checkpoint to quantized weights: its numbers and scales as they are, in the fused layout."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np

from jaxserve.checkpoint.assemble import Assembler, check_number_of_layers, transposed
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.pieces import EMBEDDING_PIECE, HEAD_PIECE, piece_names
from jaxserve.checkpoint.tensor_names import TensorNames
from jaxserve.checkpoint.tensor_source import BFLOAT16, TensorSource
from jaxserve.checkpoint.vendor_config import VendorForm
from jaxserve.checkpoint.vendor_source import VendorSource
from jaxserve.checkpoint.vendor_tensors import LayerTensors, check_layer, check_left, layer_tensors
from jaxserve.config import ModelConfig, QuantizationConfig
from jaxserve.kernels.int4 import pack_int4
from jaxserve.models.params import QUANTIZABLE
from jaxserve.models.quantization import int4_groups

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VendorAssembler:
    """Reads one quantized model, a piece at a time, as `Assembler` does a dense one. `checked` makes one.

    Attributes:
        dense: reads the weights' numbers, and all that is not quantized.
        layers: of each layer, the tensors that its quantized weights have beside their numbers.
        where: the file's or folder's name, for messages.
    """

    dense: Assembler
    source: TensorSource
    form: VendorForm
    config: ModelConfig
    layers: tuple[LayerTensors, ...]
    where: str

    @staticmethod
    def checked(
        source: TensorSource,
        names: TensorNames,
        config: ModelConfig,
        dtype: np.dtype | None,
        where: str,
        form: VendorForm,
    ) -> VendorAssembler:
        """Compare what the file holds with what the config says; arguments as of `Assembler.checked`.

        Raises:
            CheckpointError: as `Assembler.checked`; or if a weight is quantized where the config says that it is not, or
                the other way round, or a scale is missing or misshaped.
        """
        present = frozenset(source.names())
        check_number_of_layers(config, len(present), where)
        layers = tuple(layer_tensors(names, layer, form, present, where) for layer in range(config.num_layers))
        check_left(source, names, layers, form, where)
        hidden = frozenset(name for layer in layers for name in layer.beside)
        packed = {name: held for layer in layers for name, held in layer.packed.items()}
        view = VendorSource(source, hidden, packed, form.number_bits)
        dense = Assembler.checked(view, names, config, dtype, where)
        for layer in layers:
            check_layer(source, layer, form, dense, where)
        if form.quantization.format == "int4":
            _warn_of_rounded_scales(source, layers, where)
        quantized = dataclasses.replace(
            dense.config, quantization=_quantization(form, layers), kv_cache_scales=form.has_kv_scales
        )
        return VendorAssembler(dense, source, form, quantized, layers, where)

    def stored_bytes(self, piece: str, without: Collection[str]) -> int:
        """As `Assembler.stored_bytes`."""
        return self.dense.stored_bytes(piece, without)

    def piece_bytes(self, piece: str) -> int:
        """Of all tensors that `piece` reads, but for scales."""
        return self.dense.piece_bytes(piece)

    def arrays(self, piece: str, advance: Callable[[int], None]) -> Iterator[tuple[str, np.ndarray]]:
        """As `Assembler.arrays`; names of parts of a quantized weight are such as "wqkv/values", "wqkv/scales"."""
        arrays = self.dense.arrays(piece, advance)
        if piece in (EMBEDDING_PIECE, HEAD_PIECE):
            yield from arrays
            return
        layer = self.layers[piece_names(self.config).index(piece) - 1]
        for name, array in arrays:
            if name not in layer.scales:
                yield name, array
                continue
            yield f"{name}/values", self._values(name, array)
            inputs = array.shape[: QUANTIZABLE[name]]
            del array  # before the next one is made
            yield f"{name}/scales", self._weight_scales(name, layer.scales[name], inputs)
            if self.form.quantization.has_input_scales:
                # What is fused was quantized apart, for one input: the largest scale cuts no module's.
                parts = [self._positive(part) for part in layer.input_scales[name]]
                yield f"{name}/input_scale", np.asarray(max(parts), np.float32)
        for name, tensor in layer.kv_scales.items():
            yield name, np.asarray(self._positive(tensor), np.float32)

    def _values(self, name: str, dense: np.ndarray) -> np.ndarray:
        """The vendor's numbers [*outputs, *inputs], of an array [*inputs, *outputs] that holds them exactly."""
        num_inputs = QUANTIZABLE[name]
        inputs, outputs = dense.shape[:num_inputs], dense.shape[num_inputs:]
        matrix = dense.astype(self.form.number_dtype, copy=False).reshape(math.prod(inputs), math.prod(outputs))
        values = transposed(matrix).reshape(*outputs, *inputs)
        if self.form.number_bits == 8:
            return values
        groups = int4_groups(inputs, self.form.quantization.group_size)
        return pack_int4(values, math.prod(inputs) // math.prod(groups))

    def _weight_scales(self, name: str, tensors: tuple[str, ...], inputs: tuple[int, ...]) -> np.ndarray:
        """As `QuantizedWeight` has them: a module with one scale gives it to each of its outputs, a group to its parts."""
        config, sizes = self.config, self._output_sizes(name)
        is_grouped = self.form.quantization.format == "int4"
        held = [self._finite(tensor) for tensor in tensors]
        scales = [scale if is_grouped else scale.reshape(-1, 1) for scale in held]  # [outputs or 1, groups or 1]
        if len(scales) == 1 and len(sizes) > 1 and scales[0].shape[0] > 1:  # fused in the file too
            scales = np.split(scales[0], np.cumsum(sizes)[:-1])
        elif len(scales) == 1:
            scales = scales * len(sizes)
        groups = scales[0].shape[1]
        parts = [np.broadcast_to(scale, (size, groups)) for scale, size in zip(scales, sizes, strict=True)]
        if name == "wqkv":
            by_head = [part.reshape(config.num_kv_heads, -1, config.head_dim, groups) for part in parts]
            fused = np.concatenate(by_head, axis=1)
        else:
            fused = np.stack(parts) if name == "w_gate_up" else parts[0]
        if not is_grouped:
            return np.ascontiguousarray(fused[..., 0])
        group_axes = int4_groups(inputs, self.form.quantization.group_size)
        grouped = np.repeat(np.moveaxis(fused, -1, 0), math.prod(group_axes) // groups, axis=0)
        return grouped.reshape(*group_axes, *fused.shape[:-1]).astype(BFLOAT16)

    def _output_sizes(self, name: str) -> tuple[int, ...]:
        config = self.config
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return {
            "wqkv": (q, kv, kv),
            "wo": (config.hidden_size,),
            "w_gate_up": (config.intermediate_size, config.intermediate_size),
            "w_down": (config.hidden_size,),
        }[name]

    def _finite(self, name: str) -> np.ndarray:
        """Scales of weights as float32. Raises CheckpointError if one is no number, which all that it meets would become."""
        with np.errstate(over="ignore"):  # of float64: it is told below
            scales = self.source.read(name).astype(np.float32)
        if not np.isfinite(scales).all():
            raise CheckpointError(
                f"{self.where}: tensor {name!r} has scales that are no finite numbers: fetch it again"
            )
        return scales

    def _positive(self, name: str) -> float:
        """A scale that is divided by. Raises CheckpointError if that cannot be."""
        scale = float(self._finite(name).reshape(()))
        if scale <= 0:
            raise CheckpointError(f"{self.where}: tensor {name!r} is {scale}, and must be positive: fetch it again")
        return scale


def _warn_of_rounded_scales(source: TensorSource, layers: tuple[LayerTensors, ...], where: str) -> None:
    tensors = (name for layer in layers for group in layer.scales.values() for name in group)
    dtypes = sorted({source.dtype(name).name for name in tensors} - {BFLOAT16.name})
    if dtypes:
        logger.warning("%s: scales are %s, and rounded to bfloat16", where, " and ".join(dtypes))


def _quantization(form: VendorForm, layers: tuple[LayerTensors, ...]) -> QuantizationConfig | None:
    """The form's, with all that is left as it is; None: that is everything."""
    left = {(number, name) for number, layer in enumerate(layers) for name in QUANTIZABLE if name not in layer.scales}
    whole_layers = tuple(number for number in range(len(layers)) if all((number, name) in left for name in QUANTIZABLE))
    if len(whole_layers) == len(layers):
        return None
    others = [number for number in range(len(layers)) if number not in whole_layers]
    weights = tuple(name for name in QUANTIZABLE if all((number, name) in left for number in others))
    parts = tuple(sorted((number, name) for number, name in left if number in others and name not in weights))
    return dataclasses.replace(form.quantization, dense_layers=whole_layers, dense_weights=weights, dense_parts=parts)
