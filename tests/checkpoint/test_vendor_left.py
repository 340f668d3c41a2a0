"""What vendors leave as it is in a quantized checkpoint, in each of the ways to say so."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.export import export
from jaxserve.checkpoint.inspection import device_memory, inspect_checkpoint
from jaxserve.checkpoint.store import load_checkpoint
from jaxserve.config import EngineConfig, QuantizationConfig
from jaxserve.engine.build import make_engine_mesh
from jaxserve.progress import NoProgress
from jaxserve.sampling_params import SamplingParams
from tests.checkpoint.vendor_files import (
    CHANNELS,
    FLOAT8,
    FP8_STATIC,
    MODULES,
    PER_TOKEN,
    assert_weights_are_those_of,
    compressed_tensors,
    tensors_of,
    write_and_load,
    write_float8,
)
from tests.models.paged_model import PagedModel
from tests.tiny_engine import ask, tiny_engine
from tests.tiny_model import write_tiny_llama

PROMPT = [5, 9, 2, 33, 17, 60, 8]
ENGINE_CONFIG = EngineConfig(max_model_len=16, max_num_seqs=1, max_num_batched_tokens=16, dtype="float32")
SAMPLING = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
FIRST_LAYER = [f"model.layers.0.{module}" for module in MODULES]
ALL_ATTENTION = [f"model.layers.{layer}.{module}" for layer in range(3) for module in MODULES[:4]]
# What vendors leave, how they say so in each form, and what becomes of it.
LEFT: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    "modules by name": (
        {**CHANNELS, "ignore": ["lm_head", *FIRST_LAYER, "model.layers.2.mlp.down_proj"]},
        [*FIRST_LAYER, "model.layers.2.mlp.down_proj"],
        {"dense_layers": (0,), "dense_parts": ((2, "w_down"),)},
    ),
    "a layer by pattern": (
        {**CHANNELS, "ignore": ["re:.*lm_head", r"re:.*layers\.0\..*"]}, FIRST_LAYER, {"dense_layers": (0,)},
    ),
    "targets by pattern": (
        compressed_tensors("channel", PER_TOKEN, targets=["re:.*mlp.*"]),
        ALL_ATTENTION,
        {"dense_weights": ("wqkv", "wo")},
    ),
    "a kind of module": (
        {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "mlp.down_proj"]},
        [f"model.layers.{layer}.mlp.down_proj" for layer in range(3)],
        {"dense_weights": ("w_down",)},
    ),
    "a layer by what it lies in": (
        {"quant_method": "fp8", "ignored_layers": ["model.layers.0"]}, FIRST_LAYER, {"dense_layers": (0,)},
    ),
    "stars": (
        {
            "quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN",
            "exclude_modules": ["lm_head", "model.layers.0*"],
        },
        FIRST_LAYER,
        {"dense_layers": (0,)},
    ),
    "attention and a layer": (
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": [*ALL_ATTENTION, *FIRST_LAYER]},
        [*ALL_ATTENTION, *FIRST_LAYER],
        {"dense_layers": (0,), "dense_weights": ("wqkv", "wo")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_a_vendor_leaves_stays_as_it_is(name: str, tmp_path: Path) -> None:
    form, left, expected = LEFT[name]
    source, loaded = write_and_load(tmp_path, form, per_channel=True, inputs=False, num_layers=3, left=left)
    assert loaded.model_config.quantization == QuantizationConfig("fp8", **expected)
    assert_weights_are_those_of(source, loaded)


def test_everything_left_is_not_quantized(tmp_path: Path) -> None:
    everything = [f"model.layers.{layer}.{module}" for layer in range(2) for module in MODULES]
    source, loaded = write_and_load(
        tmp_path, {**CHANNELS, "ignore": ["re:.*"]}, per_channel=True, inputs=False, left=everything
    )
    assert loaded.model_config.quantization is None
    assert_weights_are_those_of(source, loaded)


def test_fixed_input_scales_beside_what_is_left(tmp_path: Path) -> None:
    form = {**FP8_STATIC, "ignored_layers": ["lm_head", *FIRST_LAYER]}
    source, loaded = write_and_load(tmp_path, form, per_channel=False, inputs=True, left=FIRST_LAYER)
    assert loaded.model_config.quantization == QuantizationConfig("fp8", has_input_scales=True, dense_layers=(0,))
    assert_weights_are_those_of(source, loaded)


@pytest.fixture(scope="module")
def partly(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A converted model that leaves a layer and a weight, and what the dense model of the same weights answers to PROMPT."""
    root = tmp_path_factory.mktemp("partly")
    form = compressed_tensors("channel", None, ignore=["lm_head", *FIRST_LAYER, "model.layers.2.mlp.down_proj"])
    source = write_float8(root / "model", form, per_channel=True, inputs=False, num_layers=3, left=form["ignore"])
    dense = write_tiny_llama(root / "dense", num_hidden_layers=3)
    tensors = {name: values.astype(np.float32) for name, values in tensors_of(source).items()}
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        tensors[name.removesuffix("_scale")] *= tensors.pop(name)
    save_file(tensors, dense / "model.safetensors")
    loaded = load_checkpoint(convert(dense, root / "wide", progress=NoProgress()), "float32", NoProgress())
    model = PagedModel(loaded.model_config, loaded.params, capacity=16)
    tokens, _ = model.greedy(int(model.prefill(PROMPT)[-1].argmax()), 7)
    return convert(source, root / "out", progress=NoProgress()), tokens


@pytest.mark.parametrize("devices", [2, pytest.param(1, marks=pytest.mark.long)])
def test_answers_are_those_of_the_dense_model(devices: int, partly: tuple[Path, list[int]]) -> None:
    folder, expected = partly
    config = dataclasses.replace(ENGINE_CONFIG, tensor_parallel_size=devices)
    loaded = load_checkpoint(folder, "float32", NoProgress(), mesh=make_engine_mesh(config))
    assert loaded.model_config.quantization is not None and loaded.model_config.quantization.leaves_some
    with tiny_engine(config, loaded.model_config, loaded.params, mode="greedy") as engine:
        assert ask(engine, PROMPT, SAMPLING) == expected


def test_export_says_where_the_tensors_still_are(tmp_path: Path) -> None:
    source = write_float8(tmp_path / "model", CHANNELS, per_channel=True, inputs=False)
    folder = convert(source, tmp_path / "out", progress=NoProgress())
    with pytest.raises(
        CheckpointError, match=r"came quantized \(fp8\): .* are in the checkpoint that it was made from"
    ):
        export(folder, tmp_path / "exported", progress=NoProgress())
    assert not (tmp_path / "exported").exists()


def test_inspection_tells_what_is_left(tmp_path: Path) -> None:
    form = {**CHANNELS, "ignore": ["lm_head", *FIRST_LAYER]}
    source = write_float8(tmp_path / "model", form, per_channel=True, inputs=False, left=FIRST_LAYER)
    folder = convert(source, tmp_path / "out", progress=NoProgress())
    for inspection in (inspect_checkpoint(source), inspect_checkpoint(folder)):
        assert inspection.config.quantization == QuantizationConfig("fp8", dense_layers=(0,))
        weights = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128  # of a layer's products
        assert inspection.bytes_by_dtype()["float8_e4m3fn"] == weights
        memory = [device_memory(inspection.config, size, "bfloat16").weights for size in (1, 2)]
        assert memory[0] > memory[1] > memory[0] / 2


@pytest.mark.parametrize(
    ("ignored", "message"),
    [
        (["mlp.down_proj"], r"'model.layers.0.mlp.down_proj.weight' is float8 \(e4m3\), but the config leaves it"),
        (["self_attn.v_proj"], "'model.layers.0.self_attn.q_proj' is quantized and '.*v_proj' is not"),
        ("lm_head", "ignored modules='lm_head' must be a list"),
        ([7], r"ignored modules=\[7\] must be a list"),
        (["re:("], r"'re:\(' is no regular expression"),
        (["re:(.+)+x"], "could take forever"),
        (["re:.*.*.*.*.*.*x"], "could take forever: list the modules' names, or use at most 4 repeats"),
    ],
)
def test_lists_that_cannot_be_right_are_refused(tmp_path: Path, ignored: Any, message: str) -> None:
    source = write_float8(tmp_path / "model", {**CHANNELS, "ignore": ignored}, per_channel=True, inputs=False)
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "out", progress=NoProgress())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("targets", ["Linear", 7])
def test_targets_that_are_no_list_are_refused(tmp_path: Path, targets: Any) -> None:
    form = {**CHANNELS, "config_groups": {"group_0": {**CHANNELS["config_groups"]["group_0"], "targets": targets}}}
    source = write_float8(tmp_path / "model", form, per_channel=True, inputs=False)
    with pytest.raises(CheckpointError, match=f"targets={targets!r} of group_0 must be a list"):
        convert(source, tmp_path / "out", progress=NoProgress())


def test_a_quantized_output_head_is_refused(tmp_path: Path) -> None:
    source = write_float8(tmp_path / "model", CHANNELS, per_channel=True, inputs=False)
    tensors = tensors_of(source) | {"lm_head.weight": np.zeros((259, 64), FLOAT8), "lm_head.weight_scale": np.ones(1)}
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"'lm_head.weight' is quantized \(float8 \(e4m3\)\), .* layers alone: use"
    ):
        convert(source, tmp_path / "out", progress=NoProgress())
