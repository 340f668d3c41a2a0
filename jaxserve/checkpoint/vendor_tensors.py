"""Which tensors a layer of a vendor's quantized checkpoint has beside its weights' numbers, checked before any is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxserve.checkpoint.assemble import WEIGHT_MODULES, Assembler
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.tensor_names import TensorNames
from jaxserve.checkpoint.tensor_source import BFLOAT16, TensorSource
from jaxserve.checkpoint.vendor_config import VendorForm
from jaxserve.config import ModelConfig

# Ends of the names that vendors give the scale of keys; that of values has v for k.
_KV_SCALE_ENDS = ("self_attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.k_proj.output_scale")
_PACKED_END = "_packed"
_SCALE_DTYPES = (np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)


@dataclass(frozen=True)
class LayerTensors:
    """Names of one layer's tensors, by the weights (fields of `LayerParams`) that are quantized.

    Attributes:
        scales, input_scales: one for each module that the file holds apart.
        kv_scales: by "k_scale" and "v_scale"; empty where there are none.
        weights: of the quantized numbers, as modules that are not quantized would call them.
        packed: of these, the names of those that are packed into words.
        unused: of tensors that say nothing more.
    """

    scales: Mapping[str, tuple[str, ...]]
    input_scales: Mapping[str, tuple[str, ...]]
    kv_scales: Mapping[str, str]
    weights: tuple[str, ...]
    packed: Mapping[str, str]
    unused: tuple[str, ...]

    @property
    def scale_tensors(self) -> list[str]:
        groups = (*self.scales.values(), *self.input_scales.values(), self.kv_scales.values())
        return [name for group in groups for name in group]

    @property
    def beside(self) -> list[str]:
        """All that are no weights."""
        return [*self.scale_tensors, *self.unused]


def layer_tensors(
    names: TensorNames, layer: int, form: VendorForm, present: frozenset[str], where: str
) -> LayerTensors:
    """Of one layer, as the form has them.

    Raises:
        CheckpointError: one is missing, or there twice; or of modules that are one weight here, some are quantized and some
            are not.
    """
    scales: dict[str, tuple[str, ...]] = {}
    input_scales: dict[str, tuple[str, ...]] = {}
    weights: list[str] = []
    for weight, modules in WEIGHT_MODULES.items():
        held = names.held_of(modules)
        own = [names.in_layer(layer, module) for module in held]
        if not _is_quantized(own, form, where):
            continue
        weights += own
        scales[weight] = tuple(names.in_layer(layer, module, "weight_scale") for module in held)
        if form.quantization.has_input_scales:
            input_scales[weight] = tuple(names.in_layer(layer, module, "input_scale") for module in held)
    kv_scales = _kv_scales(names.layer.format(layer=layer), present) if form.has_kv_scales else {}
    packed = {name: name + _PACKED_END for name in weights} if form.is_packed else {}
    unused = tuple(name + end for name in weights for end in form.unused_ends if name + end in present)
    for name in packed:
        if name in present:
            raise CheckpointError(
                f"{where}: tensor {name!r} is there twice, packed and not: fetch the checkpoint again"
            )
    found = LayerTensors(scales, input_scales, kv_scales, tuple(weights), packed, unused)
    for name in (*found.beside, *packed.values()):
        if name not in present:
            raise CheckpointError(f"{where}: tensor {name!r} is missing: fetch the checkpoint again")
    return found


def _is_quantized(weights: list[str], form: VendorForm, where: str) -> bool:
    modules = [name.removesuffix(".weight") for name in weights]
    quantized = [module for module in modules if form.modules.quantizes(module)]
    if 0 < len(quantized) < len(modules):
        others = [module for module in modules if module not in quantized]
        raise CheckpointError(
            f"{where}: {quantized[0]!r} is quantized and {others[0]!r} is not, but both are one weight here: use the "
            "checkpoint that is not quantized, with --quantization"
        )
    return bool(quantized)


def _kv_scales(prefix: str, present: frozenset[str]) -> dict[str, str]:
    found = {}
    for letter in ("k", "v"):
        candidates = [prefix + end.replace("k_", f"{letter}_") for end in _KV_SCALE_ENDS]
        found[f"{letter}_scale"] = next((name for name in candidates if name in present), candidates[0])
    return found


def check_left(
    source: TensorSource, names: TensorNames, layers: Iterable[LayerTensors], form: VendorForm, where: str
) -> None:
    """Raises CheckpointError if something is quantized that the config leaves, or that never is here."""
    quantized = {name for layer in layers for name in layer.weights}
    for name in source.names():
        weight = name.removesuffix(_PACKED_END)
        if weight in quantized or not weight.endswith(".weight"):
            continue
        if weight == name and source.dtype(name) != form.number_dtype:
            continue
        if weight in (names.lm_head, names.embedding):
            raise CheckpointError(
                f"{where}: {weight!r} is quantized ({form.number_name}), which is supported for layers alone: use the "
                "checkpoint that is not quantized, with --quantization"
            )
        raise CheckpointError(
            f"{where}: tensor {weight!r} is {form.number_name}, but the config leaves it as it was: fetch the "
            "checkpoint again"
        )


def check_layer(source: TensorSource, layer: LayerTensors, form: VendorForm, dense: Assembler, where: str) -> None:
    """Raises CheckpointError if dtypes or shapes of what a layer holds are not what the form says."""
    for name in layer.weights:
        if dense.source.dtype(name) != form.number_dtype:
            raise CheckpointError(
                f"{where}: tensor {name!r} is {dense.source.dtype(name)}, but the config says that it is "
                f"{form.number_name}"
            )
    for name in layer.packed.values():
        if source.dtype(name) != np.int32:
            raise CheckpointError(f"{where}: tensor {name!r} is {source.dtype(name)}, and must be int32")
    for name in layer.scale_tensors:
        if source.dtype(name) not in _SCALE_DTYPES:
            known = ", ".join(dtype.name for dtype in _SCALE_DTYPES)
            raise CheckpointError(f"{where}: tensor {name!r} is {source.dtype(name)}, and must be one of {known}")
    for weight, group in layer.scales.items():
        for name in group:
            outputs, inputs = dense.expected[name.removesuffix("weight_scale") + "weight"]
            if form.quantization.format == "int4":
                _check_groups(source, name, weight, (outputs, inputs), form, dense.config, where)
            elif math.prod(source.shape(name)) not in (1, outputs):
                raise CheckpointError(
                    f"{where}: tensor {name!r} has shape {source.shape(name)}, and must have one number, or one for "
                    f"each of the {outputs} outputs"
                )
    for name in (*(name for group in layer.input_scales.values() for name in group), *layer.kv_scales.values()):
        if math.prod(source.shape(name)) != 1:
            raise CheckpointError(f"{where}: tensor {name!r} has shape {source.shape(name)}, and must be one number")


def _check_groups(
    source: TensorSource,
    name: str,
    weight: str,
    shape: tuple[int, int],
    form: VendorForm,
    config: ModelConfig,
    where: str,
) -> None:
    (outputs, inputs), size = shape, form.quantization.group_size
    # No group may reach over two KV heads, along which devices share the inputs.
    together = config.group_size * config.head_dim if weight == "wo" else inputs
    if together % size:
        raise CheckpointError(
            f"{where}: groups of {size} do not divide the {together} inputs of {weight}"
            f"{' that belong to one KV head' if weight == 'wo' else ''}, which is not supported: use the checkpoint that is "
            "not quantized, with --quantization"
        )
    if source.shape(name) != (outputs, inputs // size):
        raise CheckpointError(
            f"{where}: tensor {name!r} has shape {source.shape(name)}, and must have {(outputs, inputs // size)}: a number "
            f"for each {size} inputs"
        )
