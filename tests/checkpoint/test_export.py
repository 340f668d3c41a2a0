"""What was converted comes back: the same bits, names, config and tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.checkpoint import export as export_module
from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.export import export
from jaxserve.checkpoint.manifest import read_manifest
from jaxserve.progress import NoProgress
from tests.checkpoint.files import converted, stored, write_gguf
from tests.tiny_model import TINY_CONFIG, random_weights, write_tiny_llama

GOLDENS = Path(__file__).parents[1] / "goldens" / "tiny"


def all_tensors(folder: Path) -> dict[str, np.ndarray]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def there_and_back(source: Path, tmp_path: Path, **options: Any) -> Path:
    convert(source, tmp_path / "converted", progress=NoProgress(), **options)
    return export(tmp_path / "converted", tmp_path / "exported", progress=NoProgress())


def assert_same_tensors(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        np.testing.assert_array_equal(value.view(np.uint8), right[name].view(np.uint8), err_msg=name)


@pytest.mark.parametrize(
    "name",
    [
        "attention_bias", "bfloat16", "head_dim", "mistral_sliding_window", "mlp_bias", "multi_query", "phi3",
        "phi3_sliding_window", "qwen2", "qwen2_tied", "qwen3", "rope_llama3", "sharded", "tied_head",
    ],
)  # fmt: skip
def test_every_family_comes_back_to_the_bit(tmp_path: Path, name: str) -> None:
    exported = there_and_back(GOLDENS / name, tmp_path)
    assert_same_tensors(all_tensors(exported), all_tensors(GOLDENS / name))
    for file in ("config.json", "generation_config.json"):
        assert (exported / file).read_bytes() == (GOLDENS / name / file).read_bytes()


def test_tokenizer_files_travel(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    exported = there_and_back(source, tmp_path)
    assert {path.name for path in exported.iterdir()} == {path.name for path in source.iterdir()}
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            assert (exported / path.name).read_bytes() == path.read_bytes()


def test_shards_and_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "_FILE_BYTES", 1)
    source = write_tiny_llama(tmp_path / "source")
    exported = there_and_back(source, tmp_path)
    assert len(list(exported.glob("*.safetensors"))) == 4
    assert_same_tensors(all_tensors(exported), all_tensors(source))
    again = convert(exported, tmp_path / "again", progress=NoProgress())
    assert read_manifest(again).model_config == read_manifest(tmp_path / "converted").model_config


def test_dtype_of_the_conversion_is_the_dtype_of_the_config(tmp_path: Path) -> None:
    exported = there_and_back(write_tiny_llama(tmp_path / "source"), tmp_path, dtype="bfloat16")
    assert all_tensors(exported)["model.embed_tokens.weight"].dtype == ml_dtypes.bfloat16
    assert json.loads((exported / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"head_dim": 32, "tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
    ],
    ids=["plain", "head size", "biases"],
)
def test_what_came_as_gguf_leaves_as_hugging_face(tmp_path: Path, shape: dict[str, Any]) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_weights({**TINY_CONFIG, **shape}, 0), **shape)
    exported = there_and_back(path, tmp_path)
    again = converted(exported, tmp_path / "again")
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)),
        again,
        converted(path, tmp_path / "direct"),
    )
    ours, theirs = (read_manifest(tmp_path / name).model_config for name in ("again", "direct"))
    assert ours == theirs
    tokenizer = [(tmp_path / name / "tokenizer" / "tokenizer.json").read_bytes() for name in ("again", "direct")]
    assert tokenizer[0] == tokenizer[1]


def test_it_does_not_overwrite(tmp_path: Path) -> None:
    convert(GOLDENS / "tied_head", tmp_path / "converted", progress=NoProgress())
    (tmp_path / "taken").mkdir()
    with pytest.raises(CheckpointError, match="taken exists"):
        export(tmp_path / "converted", tmp_path / "taken", progress=NoProgress())


def test_only_converted_checkpoints_can_be_exported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no converted checkpoint"):
        export(GOLDENS / "tied_head", tmp_path / "exported", progress=NoProgress())


def test_nothing_but_what_was_converted_is_given_back(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    source = write_tiny_llama(tmp_path / "source")
    folder = convert(source, tmp_path / "converted", progress=NoProgress())
    (folder / "original" / "added.json").symlink_to(tmp_path / "secret")
    (folder / "original" / "added.py").write_text("1 / 0")
    exported = export(folder, tmp_path / "exported", progress=NoProgress())
    assert {path.name for path in exported.iterdir()} == {path.name for path in source.iterdir()}

    config = folder / "original" / "config.json"
    config.rename(tmp_path / "config.json")
    config.symlink_to(tmp_path / "config.json")  # of the size that the manifest has
    with pytest.raises(CheckpointError, match=r"refuses config\.json: it is a link that leaves the folder"):
        export(folder, tmp_path / "again", progress=NoProgress())
    assert not (tmp_path / "again").exists()


def test_damage_that_orbax_logs_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = convert(GOLDENS / "tied_head", tmp_path / "converted", progress=NoProgress())
    for file in (folder / "weights" / "layer_001").rglob("*"):
        if file.is_file():
            file.write_bytes(b"\0" * file.stat().st_size)
    caplog.clear()
    with pytest.raises(CheckpointError, match="layer_001 is damaged"):
        export(folder, tmp_path / "exported", progress=NoProgress())
    with pytest.raises(CheckpointError, match="layer_001 is damaged"):
        stored(folder)
    assert not caplog.records


def test_damaged_weights_leave_no_folder(tmp_path: Path) -> None:
    folder = convert(GOLDENS / "tied_head", tmp_path / "converted", progress=NoProgress())
    file = max((folder / "weights" / "layer_001" / "d").iterdir(), key=lambda path: path.stat().st_size)
    file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(CheckpointError, match="layer_001 is damaged") as caught:
        export(folder, tmp_path / "exported", progress=NoProgress())
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted"]
