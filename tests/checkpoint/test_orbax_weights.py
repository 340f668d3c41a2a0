"""Weights go straight to the devices and dtype that are asked for; damage is told."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.type_handlers import NumpyHandler

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.export import export
from jaxserve.checkpoint.inspection import inspect_checkpoint
from jaxserve.checkpoint.manifest import MANIFEST_FILE, WEIGHTS_FOLDER, read_manifest
from jaxserve.checkpoint.orbax_weights import all_ended, restore_weights
from jaxserve.checkpoint.store import load_checkpoint
from jaxserve.models.params import ParamSpec, param_specs
from jaxserve.progress import NoProgress
from tests.tiny_model import write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("orbax")
    source = write_tiny_llama(root / "source", vocab_size=260, tie_word_embeddings=False, attention_bias=True)
    return convert(source, root / "converted", progress=NoProgress())


def test_an_orbax_that_always_copies_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As versions before 0.12.8, whose handler has no switch for it."""
    known = NumpyHandler.__init__
    monkeypatch.setattr(NumpyHandler, "__init__", lambda self, metadata_key=None: known(self, metadata_key))
    source = write_tiny_llama(tmp_path / "source", num_hidden_layers=1)
    folder = convert(source, tmp_path / "converted", progress=NoProgress())
    load_checkpoint(folder, "float32", NoProgress())


def test_an_interrupt_waits_for_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays are written by threads, and a folder cannot be removed while they make files in it."""
    begin, open_store = NumpyHandler.serialize, tensorstore.open
    left: list[str] = []

    async def begin_and_interrupt(self: NumpyHandler, *arguments: Any) -> Any:
        begun = await begin(self, *arguments)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.1)
        return begun

    async def open_late(*arguments: Any, **options: Any) -> Any:
        left.append("a write")
        await asyncio.sleep(0.5)
        store = await open_store(*arguments, **options)
        left.remove("a write")
        return store

    source = write_tiny_llama(tmp_path / "source", num_hidden_layers=1)
    monkeypatch.setattr(NumpyHandler, "serialize", begin_and_interrupt)
    monkeypatch.setattr(tensorstore, "open", open_late)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "converted", progress=NoProgress())
    assert not left
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_dtype_that_is_asked_for_spares_the_norms(folder: Path) -> None:
    params = load_checkpoint(folder, "bfloat16", NoProgress()).params
    exact = load_checkpoint(folder, "float32", NoProgress()).params
    assert params.embedding.dtype == params.layers[1].bqkv.dtype == jnp.bfloat16
    assert params.final_norm.dtype == params.layers[1].mlp_norm.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(params.embedding), np.asarray(exact.embedding.astype(jnp.bfloat16)))


def test_auto_is_float32_on_the_cpu(folder: Path) -> None:
    assert load_checkpoint(folder, "auto", NoProgress()).params.embedding.dtype == jnp.float32


def test_arrays_are_restored_into_their_shards(folder: Path) -> None:
    exact = load_checkpoint(folder, "float32", NoProgress()).params
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    cut = {"kv_heads", "ffn", "vocab"}

    def sharding(spec: ParamSpec) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*("tp" if axis in cut else None for axis in spec.logical_axes)))

    params = load_checkpoint(folder, "float32", NoProgress(), mesh=mesh).params
    shardings = jax.tree.map(sharding, param_specs(read_manifest(folder).model_config))
    assert jax.tree.map(lambda array: array.sharding, params) == shardings
    for name in ("wqkv", "w_gate_up"):
        second = getattr(params.layers[0], name).addressable_shards[1]
        whole = np.asarray(getattr(exact.layers[0], name))
        np.testing.assert_array_equal(np.asarray(second.data), whole[second.index])
        assert second.data.size == whole.size // 2
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), params, exact)


def test_model_that_does_not_divide_over_the_mesh(folder: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:3]), ("tp",))
    with pytest.raises(ValueError, match="tensor_parallel_size=3"):
        load_checkpoint(folder, "float32", NoProgress(), mesh=mesh)


def test_huggingface_folder_is_converted_into_the_cache_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_HOME", str(tmp_path / "home"))
    source = write_tiny_llama(tmp_path / "source")
    loaded = load_checkpoint(source, "float32", NoProgress())
    assert loaded.name == "source"
    assert loaded.tokenizer_dir.is_relative_to(tmp_path / "home")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "home").rglob("*")}
    load_checkpoint(source, "float32", NoProgress())
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "home").rglob("*")}


def test_changed_source_is_converted_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_HOME", str(tmp_path / "home"))
    source = write_tiny_llama(tmp_path / "source")
    first = load_checkpoint(source, "float32", NoProgress())
    (source / "generation_config.json").write_text('{"eos_token_id": [7]}')
    second = load_checkpoint(source, "float32", NoProgress())
    assert 7 not in first.model_config.eos_token_ids
    assert 7 in second.model_config.eos_token_ids


def copied(folder: Path, destination: Path) -> Path:
    for path in folder.rglob("*"):
        target = destination / path.relative_to(folder)
        if path.is_dir():
            target.mkdir(parents=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return destination


def test_short_file_is_named(folder: Path, tmp_path: Path) -> None:
    """Every file, the weights' own among them, whether or not their format would notice."""
    copy = copied(folder, tmp_path / "copy")
    files = [path for path in copy.rglob("*") if path.is_file() and path.name != MANIFEST_FILE]
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        with pytest.raises(CheckpointError, match=rf"damaged: .*{path.name} has .*convert the model again") as caught:
            load_checkpoint(copy, "float32", NoProgress())
        assert "\n" not in str(caught.value)
        path.write_bytes(content)
    assert load_checkpoint(copy, "float32", NoProgress()).name == "source"


def test_missing_file_is_named(folder: Path, tmp_path: Path) -> None:
    copy = copied(folder, tmp_path / "copy")
    (copy / "weights" / "layer_001" / "manifest.ocdbt").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.ocdbt is missing"):
        load_checkpoint(copy, "float32", NoProgress())


def test_sharding_that_does_not_divide_is_the_callers_mistake(folder: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]), ("tp",))
    config = read_manifest(folder).model_config
    everywhere = NamedSharding(mesh, PartitionSpec("tp"))
    shardings = jax.tree.map(lambda _: everywhere, param_specs(config))
    with pytest.raises(ValueError, match="evenly divide"):
        restore_weights(folder / WEIGHTS_FOLDER, config, jnp.dtype(jnp.float32), shardings)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"hidden_size": 64', '"hidden_size": 128', "shape"),
        ('"num_layers": 2', '"num_layers": 3', "layer_002"),
        ('"num_layers": 2', '"num_layers": 1000000000000', "num_layers=1000000000000 must be"),
        ('"num_layers": 2', '"num_layers": 2000000000', "num_layers=2000000000 of"),
        ('"num_layers": 2', '"num_layers": 1', "layer_001"),
        ('"num_layers": 2', '"num_layers": NaN', "num_layers=nan must be"),
        ('"format_version": 3', '"format_version": 99', "format_version=99, .* reads 2 and 3: convert the model again"),
        ('"format_version": 3', '"format_version": 1', "format_version=1"),
        ('"vocab_size"', '"vocabulary"', "vocabulary"),
        ('"name"', '"title"', "title"),
        ('"layer_001/mlp_norm"', '"layer_001/nothing"', "'layer_001/mlp_norm' has shape None, its config says"),
        ('"dtype": "float32"', '"dtype": "float33"', "float33"),
        ('"files": {', '"files": [], "others": {', "damaged"),
        ('"architecture": "LlamaForCausalLM"', '"architecture": null', "architecture=None must be a text"),
    ],
)
def test_manifest_that_does_not_fit(folder: Path, tmp_path: Path, old: str, new: str, named: str) -> None:
    copy = copied(folder, tmp_path / "copy")
    text = (copy / MANIFEST_FILE).read_text()
    assert old in text
    (copy / MANIFEST_FILE).write_text(text.replace(old, new))
    with pytest.raises(CheckpointError, match=named):
        load_checkpoint(copy, "float32", NoProgress())
    for use in (inspect_checkpoint, lambda path: export(path, tmp_path / "out", progress=NoProgress())):
        with pytest.raises(CheckpointError, match=named):
            use(copy)
    assert not (tmp_path / "out").exists()


def test_unknown_dtype(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="dtype='int3'"):
        load_checkpoint(folder, "int3", NoProgress())


def test_a_failed_read_waits_for_the_others() -> None:
    """Reads that go on after their event loop is closed end in an error of a thread that nobody can catch."""
    ended = []

    async def read(name: str, turns: int) -> list[str]:
        for _ in range(turns):
            await asyncio.sleep(0)
        ended.append(name)
        if name == "damaged":
            raise ValueError("damaged")
        return [name]

    async def all_of(*names: str) -> list[str]:
        return await all_ended(read(name, 1 + 10 * index) for index, name in enumerate(names))

    with pytest.raises(ValueError, match="damaged"):
        asyncio.run(all_of("damaged", "a", "b"))
    assert ended == ["damaged", "a", "b"]
    assert asyncio.run(all_of("a", "b")) == ["a", "b"]
