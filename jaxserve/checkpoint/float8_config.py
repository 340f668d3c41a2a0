"""What the `quantization_config` of a Hugging Face checkpoint says: the float8 forms that vendors publish."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.config import QuantizationConfig

_SUPPORTED = (
    "supported are compressed-tensors, fp8 and modelopt checkpoints with float8 weights and one scale for each tensor or "
    "output channel; others: use the checkpoint that is not quantized, with --quantization"
)


@dataclass(frozen=True)
class Float8Form:
    """How a checkpoint's float8 weights are meant.

    Attributes:
        quantization: of the model.
        has_kv_scales: it brings scales for keys and values.
    """

    quantization: QuantizationConfig
    has_kv_scales: bool


def float8_form(config: Mapping[str, Any], where: str) -> Float8Form | None:
    """The float8 form of a checkpoint; None: it is not quantized.

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
    readers = {"compressed-tensors": _compressed_tensors, "fp8": _fp8, "modelopt": _modelopt}
    if method not in readers:
        raise CheckpointError(
            f"{where}: weights quantized with quant_method={method!r} are not supported; {_SUPPORTED}"
        )
    return readers[method](given, where)


def _compressed_tensors(given: Mapping[str, Any], where: str) -> Float8Form:
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise CheckpointError(
            f"{where}: compressed-tensors with config_groups={groups!r} is not supported; {_SUPPORTED}"
        )
    (group,) = groups.values()
    weights, activations = group.get("weights") or {}, group.get("input_activations")
    if group.get("targets") != ["Linear"] or not _is_float8(weights) or weights.get("dynamic"):
        raise CheckpointError(
            f"{where}: compressed-tensors with format={given.get('format')!r}, targets={group.get('targets')!r}, "
            f"weights={_brief(weights)} is not supported; {_SUPPORTED}"
        )
    if weights.get("strategy") not in ("channel", "tensor"):
        raise CheckpointError(
            f"{where}: scales for each {weights.get('strategy')!r} of the weights are not supported; {_SUPPORTED}"
        )
    _check_ignored(given.get("ignore"), where)
    has_kv_scales = given.get("kv_cache_scheme") is not None
    if activations is None:
        return Float8Form(QuantizationConfig("fp8-weight-only"), has_kv_scales)
    if not _is_float8(activations) or activations.get("strategy") not in ("token", "tensor"):
        raise CheckpointError(f"{where}: input_activations={_brief(activations)} is not supported; {_SUPPORTED}")
    return Float8Form(QuantizationConfig("fp8", has_input_scales=not activations.get("dynamic")), has_kv_scales)


def _fp8(given: Mapping[str, Any], where: str) -> Float8Form:
    if given.get("weight_block_size") is not None:
        raise CheckpointError(
            f"{where}: a scale for each block of weight_block_size={given['weight_block_size']} is not supported; "
            f"{_SUPPORTED}"
        )
    scheme = given.get("activation_scheme", "dynamic")
    if scheme not in ("static", "dynamic"):
        raise CheckpointError(f"{where}: activation_scheme={scheme!r} must be static or dynamic")
    for key in ("ignored_layers", "modules_to_not_convert"):
        _check_ignored(given.get(key), where)
    has_kv_scales = given.get("kv_cache_scheme") is not None
    return Float8Form(QuantizationConfig("fp8", has_input_scales=scheme == "static"), has_kv_scales)


def _modelopt(given: Mapping[str, Any], where: str) -> Float8Form:
    given = given.get("quantization") or given
    if given.get("quant_algo") != "FP8":
        raise CheckpointError(
            f"{where}: modelopt with quant_algo={given.get('quant_algo')!r} is not supported; {_SUPPORTED}"
        )
    for key in ("ignore", "exclude_modules"):
        _check_ignored(given.get(key), where)
    has_kv_scales = given.get("kv_cache_quant_algo") == "FP8" or given.get("kv_cache_scheme") is not None
    return Float8Form(QuantizationConfig("fp8", has_input_scales=True), has_kv_scales)


def _is_float8(scheme: Any) -> bool:
    return isinstance(scheme, Mapping) and scheme.get("type") == "float" and scheme.get("num_bits") == 8


def _brief(scheme: Any) -> Any:
    if not isinstance(scheme, Mapping):
        return scheme
    return {key: scheme.get(key) for key in ("num_bits", "type", "strategy", "dynamic")}


def _check_ignored(ignored: Any, where: str) -> None:
    """Every layer of a model has the same form here; the output head is never quantized."""
    others = [name for name in ignored or () if not str(name).removeprefix("re:").strip(".*").endswith("lm_head")]
    if others:
        raise CheckpointError(
            f"{where}: a checkpoint that leaves {others[0]!r} unquantized is not supported: use the one that is not "
            "quantized, with --quantization"
        )
