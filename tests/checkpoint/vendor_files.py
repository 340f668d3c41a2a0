"""Quantized checkpoints in the forms that vendors publish, made on the spot."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.safetensors_source import SafetensorsSource
from jaxserve.checkpoint.store import LoadedCheckpoint, load_checkpoint
from jaxserve.models.quantization import QuantizedWeight, dequantize
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


def compressed_tensors(
    strategy: str, activations: dict[str, Any] | None, targets: Sequence[str] = ("Linear",), **others: Any
) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    group = {"targets": list(targets), "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head"], **others,
    }  # fmt: skip


PER_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
PER_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
CHANNELS = compressed_tensors("channel", PER_TOKEN)
FP8_STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def write_float8(
    folder: Path,
    form: dict[str, Any],
    *,
    per_channel: bool,
    inputs: bool,
    keys: bool = False,
    num_layers: int = 2,
    left: Collection[str] = (),
) -> Path:
    """A tiny Llama whose layers' weights, but for the modules `left`, are float8 with scales, as a vendor would make it."""
    write_tiny_llama(folder, num_hidden_layers=num_layers)
    edit_config(folder, quantization_config=form)
    tensors = {name: values.astype(ml_dtypes.bfloat16) for name, values in tensors_of(folder).items()}
    rng = np.random.default_rng(1)
    for layer in range(num_layers):
        for module in MODULES:
            name = f"model.layers.{layer}.{module}"
            if name in left:
                continue
            wide = tensors[f"{name}.weight"].astype(np.float32)
            largest = np.abs(wide).max(axis=1, keepdims=True) if per_channel else np.abs(wide).max(keepdims=True)[0]
            scale = (largest / 448).astype(ml_dtypes.bfloat16 if per_channel else np.float32)
            tensors[f"{name}.weight"] = (wide / scale.astype(np.float32)).astype(FLOAT8)
            tensors[f"{name}.weight_scale"] = scale
            if inputs:
                tensors[f"{name}.input_scale"] = rng.uniform(0.01, 0.02, ()).astype(np.float32)
        if keys:
            tensors[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = np.asarray([0.5 + layer], np.float32)
            tensors[f"model.layers.{layer}.self_attn.v_proj.v_scale"] = np.asarray([0.25], np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def weights_of(folder: Path, layer: int, modules: tuple[str, ...]) -> list[np.ndarray]:
    """What the file says that the weights are: float32 [out, in]."""
    tensors = tensors_of(folder)
    one = np.ones(1, np.float32)
    return [
        tensors[f"model.layers.{layer}.{module}.weight"].astype(np.float32)
        * tensors.get(f"model.layers.{layer}.{module}.weight_scale", one).astype(np.float32)
        for module in modules
    ]


def assert_weights_are_those_of(source: Path, loaded: LoadedCheckpoint) -> None:
    for number, layer in enumerate(loaded.params.layers):
        q, k, v, o, gate, up, down = weights_of(source, number, MODULES)
        by_head = [part.reshape(2, -1, 16, 64) for part in (q, k, v)]
        expected = {
            "wqkv": np.concatenate(by_head, axis=1).transpose(3, 0, 1, 2),
            "wo": o.T.reshape(2, 2, 16, 64),
            "w_gate_up": np.stack([gate, up]).transpose(2, 0, 1),
            "w_down": down.T,
        }
        for name, values in expected.items():
            weight = getattr(layer, name)
            quantization = loaded.model_config.quantization
            is_quantized = quantization is not None and quantization.quantizes(number, name)
            assert isinstance(weight, QuantizedWeight) == is_quantized
            found = dequantize(weight) if isinstance(weight, QuantizedWeight) else weight
            np.testing.assert_array_equal(found, values, f"layer {number}: {name}")


def write_and_load(root: Path, form: dict[str, Any], **options: Any) -> tuple[Path, LoadedCheckpoint]:
    """As `write_float8`, and what is loaded of it, converted."""
    source = write_float8(root / "model", form, **options)
    return source, load_checkpoint(convert(source, root / "out", progress=NoProgress()), "float32", NoProgress())
