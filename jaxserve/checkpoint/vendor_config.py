"""What the `quantization_config` of a Hugging Face checkpoint says: the quantized forms that vendors publish."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.tensor_source import FLOAT8_E4M3
from jaxserve.checkpoint.vendor_modules import ALL_LINEAR, ModulePatterns
from jaxserve.config import QuantizationConfig

logger = logging.getLogger(__name__)

_SUPPORTED = (
    "supported are float8 weights with one scale for each tensor or output channel (compressed-tensors, fp8, fbgemm_fp8, "
    "modelopt), and of compressed-tensors 8-bit integers with such scales and 4-bit ones in groups, both symmetric; others: "
    "use the checkpoint that is not quantized, with --quantization"
)


@dataclass(frozen=True)
class VendorForm:
    """How a checkpoint's quantized weights are meant.

    Attributes:
        quantization: of what is quantized.
        has_kv_scales: it brings scales for keys and values.
        modules: which modules are quantized.
        is_packed: numbers are packed into words of 32 bits.
        unused_ends: of names of tensors that say nothing more, behind the weight's own name.
    """

    quantization: QuantizationConfig
    has_kv_scales: bool
    modules: ModulePatterns
    is_packed: bool = False
    unused_ends: tuple[str, ...] = ()

    @property
    def number_bits(self) -> int:
        """Of one weight without its scale."""
        return 4 if self.quantization.format == "int4" else 8

    @property
    def number_dtype(self) -> np.dtype:
        """Of weights without their scales, once unpacked."""
        return FLOAT8_E4M3 if self.quantization.format in ("fp8", "fp8-weight-only") else np.dtype(np.int8)

    @property
    def number_name(self) -> str:
        """For people."""
        return "float8 (e4m3)" if self.number_dtype == FLOAT8_E4M3 else f"{self.number_bits}-bit integers"


def vendor_form(config: Mapping[str, Any], where: str) -> VendorForm | None:
    """The quantized form of a checkpoint; None: it is not quantized.

    Args:
        config: of config.json.
        where: the file's name, for messages.

    Raises:
        CheckpointError: it is quantized in a way that is not supported.
    """
    given = config.get("quantization_config", config.get("compression_config"))
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{where}: quantization_config={given!r} must be an object")
    method = given.get("quant_method")
    readers = {
        "compressed-tensors": _compressed_tensors, "fp8": _fp8, "fbgemm_fp8": _fbgemm_fp8, "modelopt": _modelopt,
    }  # fmt: skip
    if not isinstance(method, str) or method not in readers:
        raise CheckpointError(
            f"{where}: weights quantized with quant_method={method!r} are not supported; {_SUPPORTED}"
        )
    return readers[method](given, where)


def _compressed_tensors(given: Mapping[str, Any], where: str) -> VendorForm:
    for key, meaning in (("sparsity_config", "sparse weights"), ("transform_config", "rotated activations")):
        asked = given.get(key) or {}
        if not isinstance(asked, Mapping) or asked.get("config_groups") or asked.get("format", "dense") != "dense":
            raise CheckpointError(f"{where}: compressed-tensors with {key}={asked!r}: {meaning} are not supported")
    group = _group_of_all(given, where)
    weights, activations = group.get("weights") or {}, group.get("input_activations")
    if group.get("output_activations"):
        raise CheckpointError(f"{where}: output_activations={_brief(group['output_activations'])!r} are not supported")
    stored_as = group.get("format") or given.get("format")
    modules = ModulePatterns.checked(group["targets"], given.get("ignore") or [], where)
    has_kv_scales = given.get("kv_cache_scheme") is not None
    kind = (weights.get("type"), weights.get("num_bits"))
    if weights.get("dynamic") or kind not in (("float", 8), ("int", 8), ("int", 4)):
        raise CheckpointError(
            f"{where}: compressed-tensors with format={stored_as!r}, weights={_brief(weights)} is not supported; "
            f"{_SUPPORTED}"
        )
    strategies = ("group",) if kind == ("int", 4) else ("channel", "tensor")
    if weights.get("strategy") not in strategies:
        raise CheckpointError(
            f"{where}: scales for each {weights.get('strategy')!r} of weights={_brief(weights)} are not supported; "
            f"{_SUPPORTED}"
        )
    if kind != ("float", 8):
        quantization = _integers(weights, activations, where)
        is_packed = stored_as == "pack-quantized"
        return VendorForm(quantization, has_kv_scales, modules, is_packed, ("_shape",) if is_packed else ())
    if activations is None:
        return VendorForm(QuantizationConfig("fp8-weight-only"), has_kv_scales, modules)
    if not _is_float8(activations) or activations.get("strategy") not in ("token", "tensor"):
        raise CheckpointError(f"{where}: input_activations={_brief(activations)!r} is not supported; {_SUPPORTED}")
    quantization = QuantizationConfig("fp8", has_input_scales=not activations.get("dynamic"))
    return VendorForm(quantization, has_kv_scales, modules)


def _integers(weights: Mapping[str, Any], activations: Any, where: str) -> QuantizationConfig:
    """Of weights that are whole numbers, whose activations stay as they are here."""
    if not weights.get("symmetric", True):
        raise CheckpointError(f"{where}: weights={_brief(weights)} with zero points are not supported; {_SUPPORTED}")
    if weights.get("actorder") not in (None, False, "weight", "static"):  # the others reorder the inputs
        raise CheckpointError(f"{where}: weights with actorder={weights['actorder']!r} are not supported; {_SUPPORTED}")
    if activations is not None:
        if not isinstance(activations, Mapping) or not activations.get("dynamic"):
            raise CheckpointError(f"{where}: input_activations={_brief(activations)!r} is not supported; {_SUPPORTED}")
        logger.warning(
            "%s: activations are not quantized beside weights that are integers: input_activations=%s is not used, and "
            "the model is a little more exact",
            where,
            _brief(activations),
        )
    if weights.get("num_bits") == 8:
        return QuantizationConfig("int8")
    size = weights.get("group_size")
    if not isinstance(size, int) or size < 2 or size % 2:
        raise CheckpointError(f"{where}: group_size={size!r} is not supported: it must be an even number")
    return QuantizationConfig("int4", size)


def _group_of_all(given: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The one group that there is, or several alike as one with the targets of all."""
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        groups = {}
    if not all(isinstance(group.get("weights") or {}, Mapping) for group in groups.values()):
        groups = {}
    schemes = [(group.get("weights"), group.get("input_activations")) for group in groups.values()]
    if not schemes or any(scheme != schemes[0] for scheme in schemes):
        found = {name: _brief(group.get("weights")) for name, group in groups.items()} or given.get("config_groups")
        raise CheckpointError(
            f"{where}: compressed-tensors with config_groups={found!r} is not supported: there must be one, or "
            f"several alike; {_SUPPORTED}"
        )
    targets: list[Any] = []
    for name, group in groups.items():
        own = group.get("targets") or []
        if not isinstance(own, list):
            raise CheckpointError(f"{where}: targets={own!r} of {name} must be a list of modules")
        targets += own
    return {**next(iter(groups.values())), "targets": targets}


def _fp8(given: Mapping[str, Any], where: str) -> VendorForm:
    if given.get("weight_block_size") is not None:
        raise CheckpointError(
            f"{where}: a scale for each block of weight_block_size={given['weight_block_size']} is not supported; "
            f"{_SUPPORTED}"
        )
    scheme = given.get("activation_scheme", "dynamic")
    if scheme not in ("static", "dynamic"):
        raise CheckpointError(f"{where}: activation_scheme={scheme!r} must be static or dynamic")
    modules = _all_but(given, ("ignored_layers", "modules_to_not_convert"), where)
    has_kv_scales = given.get("kv_cache_scheme") is not None
    return VendorForm(QuantizationConfig("fp8", has_input_scales=scheme == "static"), has_kv_scales, modules)


def _fbgemm_fp8(given: Mapping[str, Any], where: str) -> VendorForm:
    bound = given.get("activation_scale_ub")
    if bound is not None:
        logger.warning(
            "%s: activation_scale_ub=%s is not used: activations beyond it are not cut, but have larger steps",
            where,
            bound,
        )
    return VendorForm(QuantizationConfig("fp8"), False, _all_but(given, ("modules_to_not_convert",), where))


def _modelopt(given: Mapping[str, Any], where: str) -> VendorForm:
    inner = given.get("quantization")
    given = inner if isinstance(inner, Mapping) else given
    algorithm = given.get("quant_algo")
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        raise CheckpointError(f"{where}: modelopt with quant_algo={algorithm!r} is not supported; {_SUPPORTED}")
    modules = _all_but(given, ("ignore", "exclude_modules"), where)
    has_kv_scales = given.get("kv_cache_quant_algo") == "FP8" or given.get("kv_cache_scheme") is not None
    return VendorForm(QuantizationConfig("fp8", has_input_scales=algorithm == "FP8"), has_kv_scales, modules)


def _all_but(given: Mapping[str, Any], keys: tuple[str, ...], where: str) -> ModulePatterns:
    """All modules but those that the config lists under these keys."""
    left: list[Any] = []
    for key in keys:
        names = given.get(key) or []
        if not isinstance(names, list):
            raise CheckpointError(f"{where}: {key}={names!r} must be a list of modules")
        left += names
    return ModulePatterns.checked([ALL_LINEAR], left, where)


def _is_float8(scheme: Any) -> bool:
    return isinstance(scheme, Mapping) and scheme.get("type") == "float" and scheme.get("num_bits") == 8


def _brief(scheme: Any) -> Any:
    if not isinstance(scheme, Mapping):
        return scheme
    keys = ("num_bits", "type", "strategy", "group_size", "dynamic")
    return {key: scheme.get(key) for key in keys if key in scheme}
