"""Quantization at conversion: what is stored, what is restored, what is refused."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.inspection import inspect_checkpoint
from jaxserve.checkpoint.manifest import MANIFEST_FILE, WEIGHTS_FOLDER, read_manifest
from jaxserve.checkpoint.orbax_weights import restore_weights
from jaxserve.checkpoint.quantize import QuantizationStep, quantization_step, quantize_tensor
from jaxserve.checkpoint.store import load_checkpoint
from jaxserve.config import QuantizationConfig
from jaxserve.models import quantization
from jaxserve.models.params import LlamaParams
from jaxserve.models.quantization import QuantizedWeight
from jaxserve.models.quantize_params import LayerQuantizer, quantize_params
from jaxserve.models.shard_layout import ShardLayout
from jaxserve.progress import NoProgress
from jaxserve.sharding.mesh import make_mesh
from tests.tiny_engine import MODEL_CONFIG
from tests.tiny_model import write_tiny_llama

NAMES = ("fp8", "fp8-weight-only", "int8", "int4", "int4-32")
# One program each: called as they are, every step of them would be compiled on its own.
quantize = jax.jit(quantization.quantize, static_argnames=("num_input_axes", "config"))
dequantize = jax.jit(quantization.dequantize)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("source") / "model", vocab_size=260, intermediate_size=256, tie_word_embeddings=False
    )


@pytest.fixture(scope="module")
def quantized(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("converted")
    return {
        str(name): convert(source, folder / str(name), step=quantization_step(name), progress=NoProgress())
        for name in (None, *NAMES)
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_same_weights_as_when_they_are_quantized_after_loading(name: str, quantized: dict[str, Path]) -> None:
    dense = load_checkpoint(quantized["None"], "float32", NoProgress())
    stored = load_checkpoint(quantized[name], "float32", NoProgress())
    expected = quantize_params(dense.params, dense.model_config, QuantizationConfig.named(name))
    assert stored.model_config.quantization == QuantizationConfig.named(name)
    assert_same_params(stored.params, expected)


def assert_same_params(found: LlamaParams, expected: LlamaParams) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, leaf), other in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == other.dtype, path
        np.testing.assert_array_equal(*(np.asarray(a).astype(np.float32) for a in (leaf, other)), err_msg=str(path))


@pytest.fixture(scope="module", params=["float32", "float16"])
def wide_source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(
        tmp_path_factory.mktemp(request.param) / "model", vocab_size=260, intermediate_size=256, num_hidden_layers=1
    )
    tensors = load_file(folder / "model.safetensors")
    save_file({name: value.astype(request.param) for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_loading_quantizes_the_sources_numbers_as_converting_does(name: str, wide_source: Path, tmp_path: Path) -> None:
    """Not those that bfloat16, which the engine computes in, would leave of them; on one device and on several."""
    step = quantization_step(name)
    stored = load_checkpoint(
        convert(wide_source, tmp_path / "quantized", step=step, progress=NoProgress()), "bfloat16", NoProgress()
    )
    dense = convert(wide_source, tmp_path / "dense", progress=NoProgress())
    for mesh in (None, make_mesh(jax.devices(), 2)):
        found = load_checkpoint(
            dense, "bfloat16", NoProgress(), mesh=mesh, quantization=lambda config: QuantizationConfig.named(name)
        )
        assert found.model_config == stored.model_config
        assert_same_params(found.params, stored.params)
        if mesh is not None:
            shardings = ShardLayout(found.model_config, 2).source_shardings(mesh)
            assert jax.tree.map(lambda array: array.sharding, found.params) == shardings


def test_few_layers_wait_to_be_quantized(tmp_path: Path) -> None:
    """On the devices, where there is room for one model."""
    source = write_tiny_llama(tmp_path / "model", num_hidden_layers=8)
    folder = convert(source, tmp_path / "converted", progress=NoProgress())
    config = read_manifest(folder).model_config
    read: list[int] = []
    waiting: list[int] = []

    class Watched(LayerQuantizer):
        def quantized(self, layer: int, dense: Mapping[str, Any], *, donate: bool) -> dict[str, QuantizedWeight]:
            time.sleep(0.05)  # for readers that would run ahead
            waiting.append(len(read) - len(waiting))
            made = super().quantized(layer, dense, donate=donate)
            assert all(dense[name].is_deleted() for name in made)
            return made

    restore_weights(
        folder / WEIGHTS_FOLDER, config, jnp.dtype(jnp.float32), advance=read.append,
        quantizer=Watched(QuantizationConfig("int8")), pieces_at_once=2,
    )  # fmt: skip
    assert len(waiting) == 8
    assert max(waiting) <= 4  # two, and the embedding and the head, which are not quantized


@pytest.mark.parametrize(
    ("shape", "num_input_axes"), [((128, 2, 75), 1), ((2, 4, 32, 150), 3)], ids=["gate and up", "heads"]
)
@pytest.mark.parametrize("name", ["fp8", "int8", "int4-32"])
def test_some_outputs_at_a_time_are_the_same_as_all(
    name: str, shape: tuple[int, ...], num_input_axes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = QuantizationConfig.named(name)
    values = np.random.default_rng(0).standard_normal(shape).astype(jnp.bfloat16)
    expected = quantize(jnp.asarray(values), num_input_axes, config)
    monkeypatch.setattr("jaxserve.checkpoint.quantize._NUMBERS_AT_ONCE", 1)  # then 64 outputs, and 22 at last
    found = quantize_tensor(values, num_input_axes, config)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(*(np.asarray(a).astype(np.float32) for a in (one, other)))


@pytest.mark.parametrize("name", NAMES)
def test_restored_into_the_shards_of_a_mesh(name: str, quantized: dict[str, Path]) -> None:
    mesh = make_mesh(jax.devices(), 2)
    whole = load_checkpoint(quantized[name], "bfloat16", NoProgress()).params
    cut = load_checkpoint(quantized[name], "bfloat16", NoProgress(), mesh=mesh).params
    for weight in ("wqkv", "wo", "w_gate_up", "w_down"):
        one, other = getattr(whole.layers[1], weight), getattr(cut.layers[1], weight)
        np.testing.assert_array_equal(dequantize(one), dequantize(other))
        assert other.values.addressable_shards[0].data.size == one.values.size // 2
    assert whole.embedding.dtype == jnp.bfloat16


def test_the_manifest_and_the_disk_tell(quantized: dict[str, Path]) -> None:
    manifest = read_manifest(quantized["int4-32"])
    assert manifest.quantization == "int4-32"
    values = manifest.arrays["layer_000/w_down/values"]
    assert (values.dtype, values.shape) == ("uint8", (64, 128))
    assert manifest.arrays["layer_000/w_down/scales"].dtype == "bfloat16"
    assert read_manifest(quantized["None"]).quantization == "none"
    sizes = {name: sum(read_manifest(folder).files.values()) for name, folder in quantized.items()}
    assert sizes["int4"] < sizes["int8"] < sizes["None"]


def of_format_2(folder: Path, destination: Path) -> Path:
    """A copy whose manifest says that it was written before 4-bit numbers were interleaved."""
    manifest = shutil.copytree(folder, destination) / MANIFEST_FILE
    text = manifest.read_text()
    assert '"format_version": 3' in text
    manifest.write_text(text.replace('"format_version": 3', '"format_version": 2'))
    return destination


@pytest.mark.parametrize("name", ["None", "fp8", "int8"])
def test_folders_of_the_older_format_are_read(name: str, quantized: dict[str, Path], tmp_path: Path) -> None:
    folder = of_format_2(quantized[name], tmp_path / "older")
    older, newer = (load_checkpoint(path, "float32", NoProgress()) for path in (folder, quantized[name]))
    assert jax.tree.structure(older.params) == jax.tree.structure(newer.params)
    for one, other in zip(jax.tree.leaves(older.params), jax.tree.leaves(newer.params), strict=True):
        np.testing.assert_array_equal(np.asarray(one).astype(np.float32), np.asarray(other).astype(np.float32))
    assert inspect_checkpoint(folder).arrays == inspect_checkpoint(quantized[name]).arrays


@pytest.mark.parametrize("name", ["int4", "int4-32"])
def test_4_bit_numbers_in_the_older_order_are_refused(name: str, quantized: dict[str, Path], tmp_path: Path) -> None:
    folder = of_format_2(quantized[name], tmp_path / "older")
    for use in (lambda path: load_checkpoint(path, "float32", NoProgress()), inspect_checkpoint):
        with pytest.raises(
            CheckpointError, match=r"format_version=2 with int4 weights, .* in an older order: convert the model again"
        ) as refusal:
            use(folder)
        assert "\n" not in str(refusal.value)


def test_a_quantized_model_is_not_quantized_again() -> None:
    config = QuantizationStep(QuantizationConfig("int8")).config(MODEL_CONFIG)
    with pytest.raises(CheckpointError, match="cannot quantize to fp8: the model is quantized already, as int8"):
        QuantizationStep(QuantizationConfig("fp8")).config(config)


def test_sizes_that_do_not_fit_leave_nothing_behind(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "model", intermediate_size=99)
    with pytest.raises(CheckpointError, match="cannot quantize to int4: 99 inputs"):
        convert(source, tmp_path / "out", step=quantization_step("int4"), progress=NoProgress())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="quantization='awq' must be one of fp8"):
        quantization_step("awq")


def test_small_models_keep_some_weights_on_the_disk_too(tmp_path: Path) -> None:
    """And a conversion says in the manifest which."""
    source = write_tiny_llama(tmp_path / "model", vocab_size=260, num_hidden_layers=8, tie_word_embeddings=False)
    folder = convert(source, tmp_path / "converted", step=quantization_step("fp8"), progress=NoProgress())
    manifest = read_manifest(folder)
    expected = QuantizationConfig("fp8", dense_layers=(0, 7), dense_weights=("wqkv", "w_down"))
    assert manifest.model_config.quantization == expected
    assert manifest.arrays["layer_000/w_gate_up"].dtype == "float32"
    assert manifest.arrays["layer_001/w_gate_up/values"].dtype == "float8_e4m3fn"
    assert manifest.arrays["layer_001/w_down"].dtype == "float32"
    dense = load_checkpoint(convert(source, tmp_path / "dense", progress=NoProgress()), "float32", NoProgress())
    made = quantize_params(dense.params, dense.model_config, expected)
    stored = load_checkpoint(folder, "float32", NoProgress())
    assert jax.tree.structure(stored.params) == jax.tree.structure(made)
    for one, other in zip(jax.tree.leaves(stored.params), jax.tree.leaves(made), strict=True):
        np.testing.assert_array_equal(*(np.asarray(a).astype(np.float32) for a in (one, other)))
