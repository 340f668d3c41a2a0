"""Quantized checkpoints that compressed-tensors wrote itself: logits are transformers' with the weights that they stand for.

Made by `scripts/make_vendor_goldens.py`, which tells what is in them.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.inspection import inspect_checkpoint
from jaxserve.checkpoint.store import load_checkpoint
from jaxserve.checkpoint.vendor_config import vendor_form
from jaxserve.config import QuantizationConfig
from jaxserve.progress import NoProgress
from tests.models.paged_model import PagedModel

FOLDER = Path(__file__).parent.parent / "goldens" / "quantized"
FORMS = {
    "fp8_weight_only": QuantizationConfig("fp8-weight-only", dense_parts=((1, "w_down"),)),
    "w8a8_int8": QuantizationConfig("int8"),
    "w8a16_int8": QuantizationConfig("int8", dense_layers=(0, 2)),
    "w4a16_int4": QuantizationConfig("int4", 32, dense_parts=((2, "wo"),)),
    "w4a16_int4_phi3": QuantizationConfig("int4", 16),
}
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", FORMS)
def test_logits_are_those_of_the_weights_that_the_file_stands_for(name: str, tmp_path: Path) -> None:
    golden = np.load(FOLDER / f"{name}.npz")
    folder = convert(FOLDER / name, tmp_path / "out", progress=NoProgress())
    loaded = load_checkpoint(folder, "float32", NoProgress())
    assert loaded.model_config.quantization == FORMS[name]
    prompt, steps = golden["prompt_ids"].tolist(), golden["decode_logits"]
    model = PagedModel(loaded.model_config, loaded.params, capacity=len(prompt) + len(steps) + 1)
    logits = model.prefill(prompt)
    np.testing.assert_allclose(logits, golden["prefill_logits"], rtol=0, atol=TOLERANCE)
    if name != "w4a16_int4":  # whose weights are held in the most peculiar way
        return
    tokens, decode_logits = model.greedy(int(logits[-1].argmax()), len(steps))
    assert tokens == golden["tokens"].tolist()
    np.testing.assert_allclose(decode_logits, steps, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["w4a16_int4", "w8a16_int8"])
def test_the_dtype_that_is_asked_for_is_of_what_is_not_quantized(name: str, tmp_path: Path) -> None:
    """Integers come through whatever it is."""
    layers = []
    for dtype in ("auto", "float16"):
        folder = convert(FOLDER / name, tmp_path / dtype, dtype=dtype, progress=NoProgress())
        assert inspect_checkpoint(folder).arrays["embedding/embedding"].dtype == {"auto": "bfloat16"}.get(dtype, dtype)
        layers.append(load_checkpoint(folder, "float32", NoProgress()).params.layers[1])
    for weight in ("wqkv", "wo", "w_gate_up", "w_down"):
        one, other = (getattr(layer, weight) for layer in layers)
        np.testing.assert_array_equal(one.values, other.values)
        np.testing.assert_array_equal(one.scales.astype(jnp.float32), other.scales.astype(jnp.float32))


def test_that_activations_stay_as_they_are_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        inspect_checkpoint(FOLDER / "w8a8_int8")
    assert "activations are not quantized beside weights that are integers" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        inspect_checkpoint(FOLDER / "w8a16_int8")
    assert "activations" not in caplog.text


def test_inspection_counts_the_tensors_of_the_file() -> None:
    inspection = inspect_checkpoint(FOLDER / "w4a16_int4")
    assert inspection.arrays["model.layers.0.mlp.down_proj.weight_packed"].dtype == "int32"
    assert sum(inspection.bytes_by_dtype().values()) == sum(
        values.nbytes for values in load_file(FOLDER / "w4a16_int4" / "model.safetensors").values()
    )


@pytest.mark.parametrize(
    ("name", "tensor", "values", "message"),
    [
        ("w4a16_int4", "mlp.up_proj.weight_packed", None, "mlp.up_proj.weight_packed' is missing"),
        ("w4a16_int4", "mlp.up_proj.weight_packed", np.zeros((96, 8), np.int64), "weight_packed' is int64, and must be"),
        ("w4a16_int4", "mlp.up_proj.weight_packed", np.zeros((96, 7), np.int32), r"shape \(96, 56\), but its config"),
        ("w4a16_int4", "mlp.up_proj.weight_packed", np.zeros((), np.int32), r"has shape \(0,\), but its config says"),
        ("w4a16_int4", "mlp.up_proj.weight_scale", np.ones((96, 1), np.float32), r"must have \(96, 2\): a number"),
        ("w4a16_int4", "mlp.up_proj.weight_g_idx", np.zeros(64, np.int32), "weight_g_idx'] are not part of"),
        ("w8a8_int8", "mlp.up_proj.weight", np.zeros((96, 64), np.float32), "is float32, .* says that it is 8-bit integers"),
        ("w8a8_int8", "mlp.up_proj.weight_scale", np.ones(3, np.float32), r"has shape \(3,\), and must have one number"),
        ("w8a16_int8", "mlp.up_proj.weight", np.zeros((96, 64), np.int8), "is there twice, packed and not"),
    ],
)  # fmt: skip
def test_damaged_checkpoints_are_refused(
    name: str, tensor: str, values: np.ndarray | None, message: str, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(FOLDER / name, tmp_path / "model"))
    tensors = load_file(source / "model.safetensors") | {f"model.layers.1.{tensor}": values}
    save_file({key: value for key, value in tensors.items() if value is not None}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "out", progress=NoProgress())
    assert not (tmp_path / "out").exists()


def test_an_integer_where_the_config_leaves_a_weight_is_refused(tmp_path: Path) -> None:
    source = Path(shutil.copytree(FOLDER / "w8a8_int8", tmp_path / "model"))
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["ignore"] += ["re:.*down_proj"]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"down_proj.weight' is 8-bit integers, but the config leaves it"):
        convert(source, tmp_path / "out", progress=NoProgress())


def test_groups_that_reach_over_kv_heads_are_refused(tmp_path: Path) -> None:
    """A KV head's query heads have 32 inputs of o together."""
    source = Path(shutil.copytree(FOLDER / "w4a16_int4", tmp_path / "model"))
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64
    (source / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    halved = {
        name: values[:, ::2] for name, values in tensors.items() if name.endswith("_scale") and "down" not in name
    }
    save_file(
        tensors | {name: np.ascontiguousarray(values) for name, values in halved.items()}, source / "model.safetensors"
    )
    with pytest.raises(
        CheckpointError, match="groups of 64 do not divide the 32 inputs of wo that belong to one KV head"
    ):
        convert(source, tmp_path / "out", progress=NoProgress())


def scheme(stored_as: str = "pack-quantized", activations: Any = None, **changes: Any) -> dict[str, Any]:
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True, **changes}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": stored_as, "config_groups": {"group_0": group}}


STATIC = {"type": "int", "num_bits": 8, "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (scheme(symmetric=False), "with zero points are not supported"),
        (scheme(actorder="group"), "actorder='group' are not supported"),
        (scheme(group_size=33), "group_size=33 is not supported: it must be an even number"),
        (scheme(group_size="big"), "group_size='big' is not supported"),
        (scheme(strategy="channel"), "scales for each 'channel' of weights=.*'num_bits': 4"),
        (scheme(num_bits=8), "scales for each 'group' of weights=.*'num_bits': 8"),
        (scheme(num_bits=3), "'num_bits': 3.* is not supported"),
        (
            scheme("int-quantized", STATIC, num_bits=8, strategy="channel"),
            "input_activations=.*'dynamic': False.* is not",
        ),
        (scheme(activations="all"), "input_activations='all' is not supported"),
    ],
)
def test_other_integers_are_refused_with_one_line(form: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as refusal:
        vendor_form({"quantization_config": form}, "config.json")
    assert "\n" not in str(refusal.value) and str(refusal.value).startswith("config.json: ")
    assert "use the checkpoint that is not quantized" in str(refusal.value) or "must be" in str(refusal.value)
