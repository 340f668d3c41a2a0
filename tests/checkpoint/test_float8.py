"""Float8 checkpoints as vendors publish them: their numbers and scales come through as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.float8_config import float8_form
from jaxserve.checkpoint.quantize import quantization_step
from jaxserve.checkpoint.safetensors_source import SafetensorsSource
from jaxserve.checkpoint.store import LoadedCheckpoint, load_checkpoint
from jaxserve.config import QuantizationConfig
from jaxserve.models.quantization import dequantize
from jaxserve.progress import NoProgress
from tests.checkpoint.files import edit_config
from tests.tiny_model import write_tiny_llama

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
MODULES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    with SafetensorsSource(folder) as source:
        return {name: source.read(name) for name in source.names()}


def compressed_tensors(strategy: str, activations: dict[str, Any] | None, **others: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head"], **others,
    }  # fmt: skip


PER_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
PER_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
CHANNELS = compressed_tensors("channel", PER_TOKEN)
FP8_STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def write_float8(folder: Path, form: dict[str, Any], *, per_channel: bool, inputs: bool, keys: bool = False) -> Path:
    """A tiny Llama whose layers' weights are float8 with scales, as a vendor would have made it."""
    write_tiny_llama(folder)
    edit_config(folder, quantization_config=form)
    tensors = {name: values.astype(ml_dtypes.bfloat16) for name, values in tensors_of(folder).items()}
    rng = np.random.default_rng(1)
    for layer in range(2):
        for module in MODULES:
            name = f"model.layers.{layer}.{module}"
            wide = tensors[f"{name}.weight"].astype(np.float32)
            largest = np.abs(wide).max(axis=1, keepdims=True) if per_channel else np.abs(wide).max(keepdims=True)[0]
            scale = (largest / 448).astype(ml_dtypes.bfloat16 if per_channel else np.float32)
            tensors[f"{name}.weight"] = (wide / scale.astype(np.float32)).astype(FLOAT8)
            tensors[f"{name}.weight_scale"] = scale
            if inputs:
                tensors[f"{name}.input_scale"] = rng.uniform(0.01, 0.02, ()).astype(np.float32)
        if keys:
            tensors[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = np.float32([0.5 + layer])
            tensors[f"model.layers.{layer}.self_attn.v_proj.v_scale"] = np.float32([0.25])
    save_file(tensors, folder / "model.safetensors")
    return folder


def weights_of(folder: Path, layer: int, modules: tuple[str, ...]) -> list[np.ndarray]:
    """What the file says that the weights are: float32 [out, in]."""
    tensors = tensors_of(folder)
    return [
        tensors[f"model.layers.{layer}.{module}.weight"].astype(np.float32)
        * tensors[f"model.layers.{layer}.{module}.weight_scale"].astype(np.float32)
        for module in modules
    ]


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., tuple[Path, LoadedCheckpoint]]:
    def write_and_load(form: dict[str, Any], **options: Any) -> tuple[Path, LoadedCheckpoint]:
        source = write_float8(tmp_path / "model", form, **options)
        return source, load_checkpoint(
            convert(source, tmp_path / "out", progress=NoProgress()), "float32", NoProgress()
        )

    return write_and_load


FORMS = {
    "scales for channels": (CHANNELS, {"per_channel": True, "inputs": False}),
    "one scale, dynamic": (compressed_tensors("tensor", PER_TOKEN), {"per_channel": False, "inputs": False}),
    "weights only": (compressed_tensors("channel", None), {"per_channel": True, "inputs": False}),
    "fp8, static": (FP8_STATIC, {"per_channel": False, "inputs": True}),
    "fp8, dynamic": ({"quant_method": "fp8"}, {"per_channel": False, "inputs": False}),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, {"per_channel": False, "inputs": True}),
}


@pytest.mark.parametrize("name", FORMS)
def test_weights_are_the_vendors(name: str, load: Callable[..., tuple[Path, LoadedCheckpoint]]) -> None:
    form, options = FORMS[name]
    source, loaded = load(form, **options)
    quantization = loaded.model_config.quantization
    assert quantization == QuantizationConfig(
        "fp8-weight-only" if name == "weights only" else "fp8", has_input_scales=options["inputs"]
    )
    for number, layer in enumerate(loaded.params.layers):
        assert layer.wqkv.values.dtype == jnp.float8_e4m3fn
        q, k, v, o, gate, up, down = weights_of(source, number, MODULES)
        by_head = [part.reshape(2, -1, 16, 64) for part in (q, k, v)]
        np.testing.assert_array_equal(dequantize(layer.wqkv), np.concatenate(by_head, axis=1).transpose(3, 0, 1, 2))
        np.testing.assert_array_equal(dequantize(layer.wo), o.T.reshape(2, 2, 16, 64))
        np.testing.assert_array_equal(dequantize(layer.w_gate_up), np.stack([gate, up]).transpose(2, 0, 1))
        np.testing.assert_array_equal(dequantize(layer.w_down), down.T)


def test_input_scales_of_what_is_fused_are_the_largest(load: Callable[..., tuple[Path, LoadedCheckpoint]]) -> None:
    source, loaded = load(FP8_STATIC, per_channel=False, inputs=True)
    tensors = tensors_of(source)
    layer = loaded.params.layers[1]
    for weight, modules in ((layer.wqkv, MODULES[:3]), (layer.wo, MODULES[3:4]), (layer.w_gate_up, MODULES[4:6])):
        scales = [float(tensors[f"model.layers.1.{module}.input_scale"]) for module in modules]
        assert float(weight.input_scale) == max(scales)
        assert weight.input_scale.shape == ()


def test_scales_of_keys_and_values(load: Callable[..., tuple[Path, LoadedCheckpoint]]) -> None:
    form = compressed_tensors("channel", PER_TOKEN, kv_cache_scheme=PER_TENSOR)
    _, loaded = load(form, per_channel=True, inputs=False, keys=True)
    assert loaded.model_config.kv_cache_scales
    assert [float(layer.k_scale) for layer in loaded.params.layers] == [0.5, 1.5]
    assert [float(layer.v_scale) for layer in loaded.params.layers] == [0.25, 0.25]


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
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, name: str, values: np.ndarray | None, message: str) -> None:
    source = write_float8(tmp_path / "model", CHANNELS, per_channel=True, inputs=False)
    tensors = tensors_of(source) | {f"model.layers.1.{name}": values}
    save_file({key: value for key, value in tensors.items() if value is not None}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "out", progress=NoProgress())
    assert not (tmp_path / "out").exists()


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
PACKED = compressed_tensors("group", None, format="pack-quantized")
PACKED["config_groups"]["group_0"]["weights"] |= {"num_bits": 4, "type": "int"}
INT8 = compressed_tensors("channel", PER_TOKEN, format="int-quantized")
INT8["config_groups"]["group_0"]["weights"] |= {"type": "int"}


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method='awq' are not supported"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq' are not supported"),
        ({"quant_method": "mxfp4"}, "quant_method='mxfp4' are not supported"),
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' are not supported"),
        ({}, "quant_method=None are not supported"),
        ("fp8", "must be an object"),
        (BLOCKS, r"weight_block_size=\[128, 128\] is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4' is not supported"),
        (PACKED, "format='pack-quantized'.*'num_bits': 4.* is not supported"),
        (INT8, "format='int-quantized'.*'type': 'int'.* is not supported"),
        ({**CHANNELS, "config_groups": {}}, "config_groups={} is not supported"),
        (compressed_tensors("block", PER_TOKEN), "scales for each 'block'"),
        (compressed_tensors("channel", {**PER_TOKEN, "type": "int"}), "input_activations=.*not supported"),
        ({**CHANNELS, "ignore": ["lm_head", "model.layers.0.mlp.down_proj"]}, "leaves 'model.layers.0.mlp.down_proj'"),
        ({**FP8_STATIC, "activation_scheme": "odd"}, "activation_scheme='odd' must be"),
    ],
)
def test_other_quantized_forms_are_refused_with_one_line(form: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as refusal:
        float8_form({"quantization_config": form}, "config.json")
    assert "\n" not in str(refusal.value) and str(refusal.value).startswith("config.json: ")


def test_a_config_without_quantization() -> None:
    assert float8_form({}, "config.json") is None
    assert float8_form({"quantization_config": None}, "config.json") is None
