"""Scalings of rotary embeddings as Hugging Face's config.json writes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from jaxserve.checkpoint.config_values import flag, number, numbers, whole_number
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.families import Family
from jaxserve.config import RopeScaling, RopeScalingKind

_ORIGINAL_LENGTH = "original_max_position_embeddings"
# What may be said where nothing is scaled: transformers notes the model's own length there too.
_KEYS_WITHOUT_SCALING = {"rope_type", "type", "rope_theta", "partial_rotary_factor", _ORIGINAL_LENGTH}


def rope_from_hf(config: Mapping[str, Any], family: Family, where: str) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, from `rope_parameters` (newer) or `rope_theta` and `rope_scaling` (older).

    Where both are there they must say the same. transformers 5 takes `rope_scaling` alone then, without the base that
    the other has, and transformers 4 knows no other: neither can be what a config with both means for certain.

    Raises:
        CheckpointError: for a scaling that is not known, or one with a missing or malformed number; if the two differ.
    """
    said = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key) not in (None, {})}
    read = [_read_rope(given, config, family, where) for given in said.values()]
    if len(read) > 1 and read[0] != read[1]:
        both = " and ".join(f"{key}={given!r}" for key, given in said.items())
        raise CheckpointError(
            f"{where}: {both} differ: put all of it, the base too, into rope_parameters, and remove rope_scaling"
        )
    return read[0] if read else _read_rope({}, config, family, where)


def _read_rope(given: Any, config: Mapping[str, Any], family: Family, where: str) -> tuple[float, RopeScaling | None]:
    """What one of the two says."""
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{where}: rope scaling {given!r} must be an object")
    if given.get("partial_rotary_factor") not in (None, 1.0):
        raise CheckpointError(
            f"{where}: partial_rotary_factor={given['partial_rotary_factor']!r}: rotary embeddings over a part of each head "
            "are not supported"
        )
    theta = number(given if "rope_theta" in given else config, "rope_theta", where, family.default_rope_theta)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        unread = sorted(given.keys() - _KEYS_WITHOUT_SCALING)
        if unread:  # a scaling without its kind, or one for each kind of layer
            raise CheckpointError(f"{where}: rope scaling {given!r} has {unread} and no rope_type that they belong to")
        return theta, None
    kind = family.rope_kinds.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in get_args(RopeScalingKind):
        known = ", ".join(("default", *get_args(RopeScalingKind)))
        raise CheckpointError(f"{where}: rope scaling {kind!r} is not supported; supported are {known}")
    try:
        return theta, _scaling(kind, given, config, family, where)  # pyright: ignore[reportArgumentType] - it is one of them
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _scaling(
    kind: RopeScalingKind, given: Mapping[str, Any], config: Mapping[str, Any], family: Family, where: str
) -> RopeScaling:
    if kind == "longrope":
        return _longrope(given, config, family, where)
    factor = number(given, "factor", where)
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "dynamic":
        length = whole_number(config, "max_position_embeddings", where, family.default_max_position_embeddings)
        return RopeScaling("dynamic", factor, original_max_position_embeddings=length)
    if kind == "yarn":
        return _yarn(factor, given, config, where)
    return RopeScaling(
        "llama3",
        factor,
        number(given, "low_freq_factor", where),
        number(given, "high_freq_factor", where),
        whole_number(given, _ORIGINAL_LENGTH, where),
    )


def _yarn(factor: float, given: Mapping[str, Any], config: Mapping[str, Any], where: str) -> RopeScaling:
    holder = config if _ORIGINAL_LENGTH in config else given
    truncate = flag(given, "truncate", where, True)
    attention_factor = yarn_attention_factor(factor)
    if given.get("mscale") and given.get("mscale_all_dim"):
        parts = [yarn_attention_factor(factor, number(given, key, where)) for key in ("mscale", "mscale_all_dim")]
        attention_factor = parts[0] / parts[1]
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=whole_number(holder, _ORIGINAL_LENGTH, where),
        attention_factor=number(given, "attention_factor", where, attention_factor),
        fast_turns=number(given, "beta_fast", where, 32.0),
        slow_turns=number(given, "beta_slow", where, 1.0),
        whole_pairs=truncate,
    )


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies cosines and sines with where nothing else is said (https://arxiv.org/abs/2309.00071)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(given: Mapping[str, Any], config: Mapping[str, Any], family: Family, where: str) -> RopeScaling:
    for key in ("short_mscale", "long_mscale"):
        if given.get(key) is not None:
            raise CheckpointError(f"{where}: {key}={given[key]!r}: attention factors of their own are not supported")
    length = whole_number(config, "max_position_embeddings", where, family.default_max_position_embeddings)
    holder = config if _ORIGINAL_LENGTH in config else given
    original = whole_number(holder, _ORIGINAL_LENGTH, where, family.default_original_max_position_embeddings)
    factor = number(given, "factor", where, length / max(1, original))
    # https://arxiv.org/abs/2402.13753
    attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(max(2, original)))
    return RopeScaling(
        "longrope",
        original_max_position_embeddings=original,
        attention_factor=number(given, "attention_factor", where, attention_factor),
        short_factors=numbers(given, "short_factor", where),
        long_factors=numbers(given, "long_factor", where),
    )


def rope_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    """What `rope_from_hf` reads the same scaling from, as `rope_scaling`."""
    written: dict[str, Any] = {"rope_type": scaling.kind}
    if scaling.kind != "longrope":
        written["factor"] = scaling.factor
    if scaling.kind in ("llama3", "yarn", "longrope"):
        written[_ORIGINAL_LENGTH] = scaling.original_max_position_embeddings
    if scaling.kind in ("yarn", "longrope"):
        written["attention_factor"] = scaling.attention_factor
    if scaling.kind == "llama3":
        written |= {"low_freq_factor": scaling.low_frequency_factor, "high_freq_factor": scaling.high_frequency_factor}
    if scaling.kind == "yarn":
        written |= {"beta_fast": scaling.fast_turns, "beta_slow": scaling.slow_turns, "truncate": scaling.whole_pairs}
    if scaling.kind == "longrope":
        written |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    return written
