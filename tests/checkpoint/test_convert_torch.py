"""PyTorch's own files: Hugging Face's `.bin`, Meta's `consolidated.NN.pth`, opened by torch's weights-only loader alone."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.manifest import read_manifest
from jaxserve.checkpoint.tensor_names import HUGGING_FACE, META
from jaxserve.config import RopeScaling
from jaxserve.models.params import LlamaParams
from jaxserve.progress import NoProgress
from tests.checkpoint.files import MODULES, converted, permuted
from tests.tiny_model import write_tiny_llama

TOKENIZERS = Path(__file__).parents[1] / "goldens" / "tokenizers"
SHAPE = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "source", vocab_size=260, **SHAPE)


class Marker:
    """Makes a folder when it is unpickled plainly."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def assert_refused(source: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        convert(source, source.parent / "refused", progress=NoProgress())
    assert "\n" not in str(caught.value)
    assert not [path for path in source.parent.iterdir() if "refused" in path.name]


def assert_equal_params(left: LlamaParams, right: LlamaParams) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), left, right)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth"])
def test_without_torch_the_extra_is_named_and_nothing_opened(
    folder: Path, tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(pickle.dumps(Marker(tmp_path / "marker")))
    if file.endswith(".pth"):
        (folder / "config.json").unlink()
        write_params(folder)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert_refused(folder, match=r"pickled weights.*pip install torch")
    assert not (tmp_path / "marker").exists()


def test_safetensors_count_where_both_are_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Marker(tmp_path / "marker")))
    monkeypatch.setitem(sys.modules, "torch", None)
    convert(folder, tmp_path / "converted", progress=NoProgress())
    assert "ignored" in caplog.text
    assert "pytorch_model.bin" in caplog.text
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", ["params.json", "consolidated.00.pth", "tokenizer.model"])
def test_link_that_leaves_metas_folder(folder: Path, tmp_path: Path, name: str) -> None:
    for file in folder.iterdir():
        file.unlink()
    write_params(folder)
    (folder / "consolidated.00.pth").write_bytes(pickle.dumps(Marker(tmp_path / "marker")))
    shutil.copy(TOKENIZERS / "tiktoken" / "tokenizer.model", folder)
    (tmp_path / "elsewhere").mkdir()
    (folder / name).rename(tmp_path / "elsewhere" / name)
    (folder / name).symlink_to(tmp_path / "elsewhere" / name)
    assert_refused(folder, match=rf"refuses {name}: it is a link")
    assert not (tmp_path / "marker").exists()


class TestWithTorch:
    """Needs the extra `torch`."""

    @pytest.fixture
    def torch(self) -> Any:
        return pytest.importorskip("torch")

    def test_code_in_a_pickle_is_not_run(self, folder: Path, tmp_path: Path, torch: Any) -> None:
        (folder / "model.safetensors").unlink()
        torch.save({"model.norm.weight": Marker(tmp_path / "marker")}, folder / "pytorch_model.bin")
        assert_refused(folder, match=r"pytorch_model\.bin.*more than tensors")
        assert not (tmp_path / "marker").exists()

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04" + b"x" * 100, pickle.dumps([1, 2])])
    def test_damaged(self, folder: Path, content: bytes, torch: Any) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(content)
        assert_refused(folder, match=r"pytorch_model\.bin")

    def test_cut_short(self, folder: Path, torch: Any) -> None:
        tensors = {name: torch.from_numpy(value) for name, value in load_file(folder / "model.safetensors").items()}
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
        content = (folder / "pytorch_model.bin").read_bytes()
        (folder / "pytorch_model.bin").write_bytes(content[:-100])
        assert_refused(folder, match=r"pytorch_model\.bin is damaged")

    def test_a_tensor_that_is_larger_than_its_file(self, folder: Path, torch: Any) -> None:
        tensors = {name: torch.from_numpy(value) for name, value in load_file(folder / "model.safetensors").items()}
        (folder / "model.safetensors").unlink()
        tensors["lm_head.weight"] = torch.zeros(1, 1).expand(260, 10**9)
        torch.save(tensors, folder / "pytorch_model.bin")
        assert_refused(folder, match=r"'lm_head.weight' of shape \(260, 1000000000\) has more bytes than the file")

    @pytest.mark.parametrize("kind", ["sparse", "meta"])
    def test_what_is_no_plain_array(self, folder: Path, kind: str, torch: Any) -> None:
        tensors = {name: torch.from_numpy(value) for name, value in load_file(folder / "model.safetensors").items()}
        (folder / "model.safetensors").unlink()
        norm = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = norm.to_sparse() if kind == "sparse" else norm.to("meta")
        torch.save(tensors, folder / "pytorch_model.bin")
        assert_refused(folder, match=r"'model.norm.weight' is no plain array of numbers")

    def test_parameters_of_a_model(self, folder: Path, tmp_path: Path, torch: Any) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        parameters = {name: torch.nn.Parameter(torch.from_numpy(value)) for name, value in tensors.items()}
        torch.save(parameters, folder / "pytorch_model.bin")
        params = converted(folder, tmp_path / "converted")
        np.testing.assert_array_equal(np.asarray(params.final_norm), tensors["model.norm.weight"])

    def test_an_index_that_promises_more_than_its_files_hold(self, folder: Path, torch: Any) -> None:
        tensors = {name: torch.from_numpy(value) for name, value in load_file(folder / "model.safetensors").items()}
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
        weight_map = dict.fromkeys([*tensors, "more"], "pytorch_model.bin")
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert_refused(folder, match=r"pytorch_model\.bin lacks tensor 'more', which pytorch_model\.bin\.index\.json")

    def test_metas_vocabulary_is_of_the_size_that_is_said(self, folder: Path, tmp_path: Path, torch: Any) -> None:
        meta = meta_folder(folder, tmp_path / "meta", torch, vocab_size=3)
        assert_refused(meta, match=r"vocab_size=3, but 'tok_embeddings\.weight' has shape")

    @pytest.mark.parametrize("shards", [1, 2])
    def test_same_as_from_safetensors(self, folder: Path, tmp_path: Path, shards: int, torch: Any) -> None:
        direct = converted(folder, tmp_path / "direct", dtype="bfloat16")
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        files = ["pytorch_model.bin"] if shards == 1 else [f"pytorch_model-{i}.bin" for i in range(shards)]
        place = {name: files[index % shards] for index, name in enumerate(tensors)}
        for file in files:
            members = {name: torch.from_numpy(tensors[name]) for name in tensors if place[name] == file}
            torch.save({name: value.to(torch.bfloat16) for name, value in members.items()}, folder / file)
        if shards > 1:
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": place}))
        params = converted(folder, tmp_path / "converted", dtype="bfloat16")
        np.testing.assert_array_equal(np.asarray(params.layers[1].wqkv), np.asarray(direct.layers[1].wqkv))
        np.testing.assert_array_equal(np.asarray(params.lm_head), np.asarray(direct.lm_head))
        named = {path.name for path in folder.iterdir()}
        assert set(read_manifest(tmp_path / "converted").source_files) == named  # an index among them

    def test_one_file_counts_beside_those_of_an_index(self, folder: Path, tmp_path: Path, torch: Any) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        torch.save({name: torch.from_numpy(value) for name, value in tensors.items()}, folder / "pytorch_model.bin")
        torch.save({name: torch.from_numpy(value + 1) for name, value in tensors.items()}, folder / "part.bin")
        weight_map = dict.fromkeys(tensors, "part.bin")
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
        params = converted(folder, tmp_path / "converted")
        np.testing.assert_array_equal(np.asarray(params.final_norm), tensors["model.norm.weight"])

    def test_file_of_the_index_outside_the_folder(self, folder: Path, torch: Any) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "../other/model.bin"}}')
        assert_refused(folder, match="refuses the file name")

    # --- Meta's layout

    @pytest.mark.parametrize("cut_embedding", ["vocabulary", "hidden"])
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_metas_parts_are_joined(
        self, folder: Path, tmp_path: Path, ranks: int, cut_embedding: str, torch: Any
    ) -> None:
        direct = converted(folder, tmp_path / "direct")
        meta = meta_folder(folder, tmp_path / "meta", torch, ranks=ranks, embedding_axis=int(cut_embedding == "hidden"))
        assert_equal_params(converted(meta, tmp_path / "converted"), direct)
        manifest = read_manifest(tmp_path / "converted")
        assert (manifest.source, manifest.architecture) == ("meta", "LlamaForCausalLM")

    def test_metas_tokenizer_and_its_ends(self, tmp_path: Path, torch: Any) -> None:
        folder = write_tiny_llama(tmp_path / "source", vocab_size=600 + 256, **SHAPE)
        meta = meta_folder(folder, tmp_path / "meta", torch)
        shutil.copy(TOKENIZERS / "tiktoken" / "tokenizer.model", meta)
        convert(meta, tmp_path / "converted", progress=NoProgress())
        config = read_manifest(tmp_path / "converted").model_config
        assert (config.bos_token_id, config.eos_token_ids) == (600, (601, 608, 609))

    def test_what_params_json_leaves_unsaid(
        self, folder: Path, tmp_path: Path, torch: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        meta = meta_folder(folder, tmp_path / "meta", torch, rope_theta=500000.0, use_scaled_rope=True)
        convert(meta, tmp_path / "converted", progress=NoProgress())
        config = read_manifest(tmp_path / "converted").model_config
        assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
        assert (config.rope_theta, config.max_position_embeddings) == (500000.0, 131072)
        assert "131072 tokens of Llama 3.1" in caplog.text

    def test_missing_rank(self, folder: Path, tmp_path: Path, torch: Any) -> None:
        meta = meta_folder(folder, tmp_path / "meta", torch, ranks=2)
        (meta / "consolidated.00.pth").unlink()
        assert_refused(meta, match=r"consolidated\.00\.pth is missing")

    def test_ranks_of_unlike_shape(self, folder: Path, tmp_path: Path, torch: Any) -> None:
        meta = meta_folder(folder, tmp_path / "meta", torch, ranks=2)
        shutil.copy(
            meta_folder(folder, tmp_path / "other", torch) / "consolidated.00.pth", meta / "consolidated.01.pth"
        )
        assert_refused(meta, match=r"consolidated\.01\.pth has other tensors")

    @pytest.mark.parametrize("embedding_axis", [0, 1])
    @pytest.mark.parametrize(
        ("dtypes", "common"),
        [
            (("bfloat16", "float32"), "float32"),
            (("float32", "bfloat16"), "float32"),
            (("float16", "bfloat16"), "float32"),
            (("bfloat16", "bfloat16"), "bfloat16"),
        ],
    )
    def test_ranks_of_unlike_dtypes_are_joined_without_loss(
        self, tmp_path: Path, dtypes: tuple[str, str], common: str, embedding_axis: int, torch: Any
    ) -> None:
        folder = write_tiny_llama(tmp_path / "source", vocab_size=260, **SHAPE)
        tensors = load_file(folder / "model.safetensors")  # rounded so that norms are the same in every dtype
        tensors = {
            name: value.astype(np.float16) if value.ndim > 1 else np.round(value) for name, value in tensors.items()
        }
        save_file({name: value.astype(np.float32) for name, value in tensors.items()}, folder / "model.safetensors")
        meta = meta_folder(folder, tmp_path / "meta", torch, ranks=2, embedding_axis=embedding_axis)
        exact: dict[str, list[np.ndarray]] = {}
        for rank, dtype in enumerate(dtypes):
            path = meta / f"consolidated.{rank:02d}.pth"
            part = {
                name: value.to(getattr(torch, dtype)) for name, value in torch.load(path, weights_only=True).items()
            }
            torch.save(part, path)
            for name, value in part.items():
                exact.setdefault(name, []).append(value.float().numpy())
        params = converted(meta, tmp_path / "converted")
        embedding = np.concatenate(exact["tok_embeddings.weight"], axis=embedding_axis)
        np.testing.assert_array_equal(np.asarray(params.embedding), embedding)
        down = np.concatenate(exact["layers.1.feed_forward.w2.weight"], axis=1)
        np.testing.assert_array_equal(np.asarray(params.layers[1].w_down), down.T)
        arrays = read_manifest(tmp_path / "converted").arrays
        assert {arrays[f"layer_000/{name}"].dtype for name in ("wqkv", "wo", "w_gate_up", "w_down")} == {common}

    def test_ranks_with_unlike_norms(self, folder: Path, tmp_path: Path, torch: Any) -> None:
        meta = meta_folder(folder, tmp_path / "meta", torch, ranks=2)
        part = torch.load(meta / "consolidated.01.pth", weights_only=True)
        part["layers.1.ffn_norm.weight"][3] += 1
        torch.save(part, meta / "consolidated.01.pth")
        assert_refused(
            meta,
            match=r"consolidated\.01\.pth: tensor 'layers\.1\.ffn_norm\.weight' is not the same as in consolidated\.00",
        )


def write_params(folder: Path, **changes: Any) -> None:
    params = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5, "vocab_size": -1, **changes}
    (folder / "params.json").write_text(json.dumps(params))


def meta_folder(
    folder: Path, destination: Path, torch: Any, *, ranks: int = 1, embedding_axis: int = 0, **params: Any
) -> Path:
    """A Hugging Face folder's weights in Meta's layout."""
    destination.mkdir()
    write_params(destination, **params)
    parts: list[dict[str, Any]] = [{} for _ in range(ranks)]
    for name, value in load_file(folder / "model.safetensors").items():
        own_name, rows, axis = meta_tensor(name, value)
        axis = embedding_axis if own_name == META.embedding else axis
        pieces = [rows] * ranks if axis is None else np.split(rows, ranks, axis=axis)
        for part, piece in zip(parts, pieces, strict=True):
            part[own_name] = torch.from_numpy(np.ascontiguousarray(piece))
    for rank, part in enumerate(parts):
        part["rope.freqs"] = torch.zeros(8)
        torch.save(part, destination / f"consolidated.{rank:02d}.pth")
    return destination


def meta_tensor(name: str, value: np.ndarray) -> tuple[str, np.ndarray, int | None]:
    """A tensor's name in Meta's layout, its rows in that order, and the axis that ranks cut."""
    for part, axis in (("embedding", 0), ("final_norm", None), ("lm_head", 0)):
        if name == getattr(HUGGING_FACE, part):
            return getattr(META, part), value, axis
    for layer in range(2):
        for module in MODULES:
            if name == HUGGING_FACE.in_layer(layer, module):
                if module in ("q", "k"):
                    value = permuted(value, 4 if module == "q" else 2)
                axis = None if module.endswith("norm") else 1 if module in ("o", "down") else 0
                return META.in_layer(layer, module), value, axis
    raise AssertionError(name)
