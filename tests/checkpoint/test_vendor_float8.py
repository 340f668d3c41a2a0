"""Float8 checkpoints as vendors publish them: their numbers and scales come through as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.quantize import quantization_step
from jaxserve.checkpoint.store import load_checkpoint
from jaxserve.checkpoint.vendor_config import vendor_form
from jaxserve.config import QuantizationConfig
from jaxserve.progress import NoProgress
from tests.checkpoint.files import edit_config
from tests.checkpoint.vendor_files import (
    CHANNELS,
    FP8_STATIC,
    MODULES,
    PER_TENSOR,
    PER_TOKEN,
    assert_weights_are_those_of,
    compressed_tensors,
    tensors_of,
    write_and_load,
    write_float8,
)

FORMS = {
    "scales for channels": (CHANNELS, {"per_channel": True, "inputs": False}),
    "one scale, dynamic": (compressed_tensors("tensor", PER_TOKEN), {"per_channel": False, "inputs": False}),
    "weights only": (compressed_tensors("channel", None), {"per_channel": True, "inputs": False}),
    "fp8, static": (FP8_STATIC, {"per_channel": False, "inputs": True}),
    "fp8, dynamic": ({"quant_method": "fp8"}, {"per_channel": False, "inputs": False}),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, {"per_channel": False, "inputs": True}),
    "modelopt, scales for channels": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        {"per_channel": True, "inputs": False},
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, {"per_channel": True, "inputs": False}),
}


@pytest.mark.parametrize("name", FORMS)
def test_weights_are_the_vendors(name: str, tmp_path: Path) -> None:
    form, options = FORMS[name]
    source, loaded = write_and_load(tmp_path, form, **options)
    quantization = loaded.model_config.quantization
    assert quantization == QuantizationConfig(
        "fp8-weight-only" if name == "weights only" else "fp8", has_input_scales=options["inputs"]
    )
    assert loaded.params.layers[0].wqkv.values.dtype == jnp.float8_e4m3fn
    assert_weights_are_those_of(source, loaded)


def test_input_scales_of_what_is_fused_are_the_largest(tmp_path: Path) -> None:
    source, loaded = write_and_load(tmp_path, FP8_STATIC, per_channel=False, inputs=True)
    tensors = tensors_of(source)
    layer = loaded.params.layers[1]
    for weight, modules in ((layer.wqkv, MODULES[:3]), (layer.wo, MODULES[3:4]), (layer.w_gate_up, MODULES[4:6])):
        scales = [float(tensors[f"model.layers.1.{module}.input_scale"]) for module in modules]
        assert float(weight.input_scale) == max(scales)
        assert weight.input_scale.shape == ()


def test_scales_of_keys_and_values(tmp_path: Path) -> None:
    form = compressed_tensors("channel", PER_TOKEN, kv_cache_scheme=PER_TENSOR)
    _, loaded = write_and_load(tmp_path, form, per_channel=True, inputs=False, keys=True)
    assert loaded.model_config.kv_cache_scales
    assert [float(layer.k_scale) for layer in loaded.params.layers] == [0.5, 1.5]
    assert [float(layer.v_scale) for layer in loaded.params.layers] == [0.25, 0.25]


def test_the_quantization_in_a_file_of_its_own(tmp_path: Path) -> None:
    """As modelopt's first versions wrote it."""
    form = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    source = write_float8(tmp_path / "model", {}, per_channel=False, inputs=True, keys=True)
    edit_config(source, quantization_config=...)
    (source / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": form}))
    folder = convert(source, tmp_path / "out", progress=NoProgress())
    loaded = load_checkpoint(folder, "float32", NoProgress())
    assert loaded.model_config.quantization == QuantizationConfig("fp8", has_input_scales=True)
    assert loaded.model_config.kv_cache_scales
    assert_weights_are_those_of(source, loaded)


def test_a_float8_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    source = write_float8(tmp_path / "model", CHANNELS, per_channel=True, inputs=False)
    with pytest.raises(CheckpointError, match="cannot quantize to int4: the model is quantized already, as fp8"):
        convert(source, tmp_path / "out", step=quantization_step("int4"), progress=NoProgress())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("self_attn.k_proj.weight_scale", None, "k_proj.weight_scale' is missing"),
        ("mlp.up_proj.weight_scale", np.ones((7, 1), np.float32), r"shape \(7, 1\), and must have one number"),
        ("mlp.up_proj.weight", np.ones((128, 64), np.float32), "is float32, but the config says that it is float8"),
        ("self_attn.o_proj.weight_shape", np.ones(2, np.float32), "not part of this architecture"),
        ("self_attn.o_proj.weight_scale", np.ones((64, 2), np.float32), r"shape \(64, 2\), and must have one number"),
        (
            "mlp.up_proj.weight_scale",
            np.full((128, 1), np.nan, np.float32),
            "up_proj.weight_scale' has scales that are no",
        ),
        (
            "mlp.down_proj.weight_scale",
            np.full((64, 1), 1e300),
            "down_proj.weight_scale' has scales that are no finite",
        ),
        ("mlp.up_proj.weight_scale", np.ones((128, 1), np.int32), "up_proj.weight_scale' is int32, and must be one of"),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, name: str, values: np.ndarray | None, message: str) -> None:
    source = write_float8(tmp_path / "model", CHANNELS, per_channel=True, inputs=False)
    tensors = tensors_of(source) | {f"model.layers.1.{name}": values}
    save_file({key: value for key, value in tensors.items() if value is not None}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "out", progress=NoProgress())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["self_attn.k_proj.input_scale", "self_attn.k_proj.k_scale"])
def test_scales_that_nothing_can_be_divided_by(tmp_path: Path, name: str, scale: float) -> None:
    form = FP8_STATIC if "input" in name else compressed_tensors("channel", PER_TOKEN, kv_cache_scheme=PER_TENSOR)
    of_input = "input" in name
    source = write_float8(tmp_path / "model", form, per_channel=not of_input, inputs=of_input, keys=not of_input)
    tensors = tensors_of(source)
    assert f"model.layers.1.{name}" in tensors
    save_file(tensors | {f"model.layers.1.{name}": np.asarray([scale], np.float32)}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}' (is .*, and must be positive|has scales that are no finite)"):
        convert(source, tmp_path / "out", progress=NoProgress())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NVFP4 = compressed_tensors("tensor_group", None, format="nvfp4-pack-quantized")
NVFP4["config_groups"]["group_0"]["weights"] |= {"num_bits": 4}
CHANNEL_GROUP = CHANNELS["config_groups"]["group_0"]
TENSOR_GROUP = compressed_tensors("tensor", PER_TOKEN)["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method='awq' are not supported"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq' are not supported"),
        ({"quant_method": "mxfp4"}, "quant_method='mxfp4' are not supported"),
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' are not supported"),
        ({}, "quant_method=None are not supported"),
        ({"quant_method": ["fp8"]}, r"quant_method=\['fp8'\] are not supported"),
        ("fp8", "must be an object"),
        (BLOCKS, r"weight_block_size=\[128, 128\] is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4' is not supported"),
        ({**CHANNELS, "config_groups": {}}, "config_groups={} is not supported"),
        (compressed_tensors("block", PER_TOKEN), "scales for each 'block'"),
        (compressed_tensors("channel", {**PER_TOKEN, "type": "int"}), "input_activations=.*not supported"),
        (NVFP4, "format='nvfp4-pack-quantized'.*'num_bits': 4.* is not supported"),
        ({**CHANNELS, "config_groups": {"a": CHANNEL_GROUP, "b": TENSOR_GROUP}}, "there must be one, or several alike"),
        ({**CHANNELS, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights are not supported"),
        ({**CHANNELS, "transform_config": {"config_groups": {"R1": {}}}}, "rotated activations are not supported"),
        (
            {"quant_method": "fp8", "modules_to_not_convert": "lm_head"},
            "modules_to_not_convert='lm_head' must be a list",
        ),
        ({**FP8_STATIC, "activation_scheme": "odd"}, "activation_scheme='odd' must be"),
    ],
)
def test_other_quantized_forms_are_refused_with_one_line(form: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as refusal:
        vendor_form({"quantization_config": form}, "config.json")
    assert "\n" not in str(refusal.value) and str(refusal.value).startswith("config.json: ")


def test_a_config_without_quantization() -> None:
    assert vendor_form({}, "config.json") is None
    assert vendor_form({"quantization_config": None}, "config.json") is None
