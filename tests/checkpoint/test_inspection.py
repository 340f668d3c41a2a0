"""What headers tell of a checkpoint is what loading it shows."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.inspection import device_memory, inspect_checkpoint
from jaxserve.checkpoint.manifest import WEIGHTS_FOLDER
from jaxserve.checkpoint.orbax_weights import restore_weights
from jaxserve.models.kv_cache import kv_bytes_per_token
from jaxserve.models.params import param_specs
from jaxserve.progress import NoProgress
from jaxserve.sharding.mesh import make_mesh
from jaxserve.sharding.placement import named_shardings
from tests.checkpoint.files import write_gguf
from tests.tiny_model import TINY_CONFIG, random_weights, write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inspected")
    shape = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16, "vocab_size": 264}
    source = write_tiny_llama(root / "source", tie_word_embeddings=False, attention_bias=True, **shape)
    return convert(source, root / "converted", dtype="bfloat16", progress=NoProgress())


@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 4, 8])
def test_memory_and_weights_under_every_tensor_parallel_size(folder: Path, tensor_parallel_size: int) -> None:
    inspection = inspect_checkpoint(folder)
    mesh = make_mesh(jax.devices(), tensor_parallel_size)
    shardings = named_shardings(param_specs(inspection.config), mesh)
    weights = folder / WEIGHTS_FOLDER
    params = restore_weights(weights, inspection.config, jnp.dtype(jnp.bfloat16), shardings)
    assert jax.tree.map(lambda array: array.sharding, params) == shardings
    first = jax.devices()[0]
    held = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(params)
        for shard in leaf.addressable_shards
        if shard.device == first
    )
    memory = device_memory(inspection.config, tensor_parallel_size, "bfloat16")
    assert memory.weights == held
    per_token = kv_bytes_per_token(inspection.config, jnp.dtype(jnp.bfloat16))
    assert memory.kv_cache_per_token == per_token // tensor_parallel_size
    whole = restore_weights(weights, inspection.config, jnp.dtype(jnp.bfloat16))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), params, whole)


def test_size_that_does_not_divide_names_those_that_do(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size=3.*\[1, 2, 4, 8\]"):
        device_memory(inspect_checkpoint(folder).config, 3, "bfloat16")


def test_bytes_by_dtype(folder: Path) -> None:
    inspection = inspect_checkpoint(folder)
    sizes = inspection.bytes_by_dtype()
    assert set(sizes) == {"bfloat16", "float32"}  # the norms stay as they were
    assert sizes["float32"] == 5 * 64 * 4
    assert inspection.arrays["layer_001/wqkv"].shape == (64, 8, 3, 16)
    assert (inspection.form, inspection.source, inspection.architecture) == (
        "converted", "huggingface", "LlamaForCausalLM",
    )  # fmt: skip


def test_models_in_their_own_formats(tmp_path: Path) -> None:
    huggingface = inspect_checkpoint(write_tiny_llama(tmp_path / "source"))
    gguf = inspect_checkpoint(write_gguf(tmp_path / "model.gguf", random_weights(TINY_CONFIG, 0)))
    assert (huggingface.form, gguf.form) == ("huggingface", "gguf")
    assert huggingface.config == gguf.config
    assert huggingface.bytes_by_dtype() == gguf.bytes_by_dtype()
    assert huggingface.arrays["model.layers.1.self_attn.q_proj.weight"].shape == (64, 64)


def test_nothing_to_inspect(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no model"):
        inspect_checkpoint(tmp_path)
