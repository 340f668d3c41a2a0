"""Hugging Face folders: every weight arrives in its place, to the bit; what is missing or hostile is refused."""

from __future__ import annotations

import json
import logging
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.manifest import read_manifest
from jaxserve.checkpoint.open_model import open_model
from jaxserve.checkpoint.store import load_checkpoint
from jaxserve.models.params import LlamaParams
from jaxserve.progress import NoProgress
from tests.checkpoint.files import converted, edit_config, edit_tensors, shard, stored, write_index
from tests.tiny_model import write_tiny_llama

Q0 = "model.layers.0.self_attn.q_proj.weight"
GOLDENS = Path(__file__).parents[1] / "goldens" / "tiny"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "source")


def assert_refused(source: Path, *, match: str) -> None:
    """Refused on one line that says what is wrong, and nothing is left that passes for a checkpoint."""
    destination = source.parent / "refused"
    with pytest.raises(CheckpointError, match=match) as caught:
        convert(source, destination, progress=NoProgress())
    assert "\n" not in str(caught.value)
    assert not [path for path in source.parent.iterdir() if "refused" in path.name]


def apart(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Phi-3's tensors under the names and in the pieces that the others have."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    q, kv = (config[key] * head_dim for key in ("num_attention_heads", "num_key_value_heads"))
    found: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        if name.endswith("qkv_proj.weight"):
            for module, rows in (("q", value[:q]), ("k", value[q : q + kv]), ("v", value[q + kv :])):
                found[name.replace("qkv_proj", f"{module}_proj")] = rows
        elif name.endswith("gate_up_proj.weight"):
            half = len(value) // 2
            found[name.replace("gate_up", "gate")] = value[:half]
            found[name.replace("gate_up", "up")] = value[half:]
        else:
            found[name] = value
    return found


def assert_same_weights(params: LlamaParams, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    """Each array against the tensors it was made of, element for element, by the layout's definition."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    group = heads // kv_heads

    def same(ours: Any, theirs: np.ndarray) -> None:
        np.testing.assert_array_equal(np.asarray(ours), theirs.astype(np.float32))

    same(params.embedding, tensors["model.embed_tokens.weight"])
    same(params.final_norm, tensors["model.norm.weight"])
    assert (params.lm_head is None) == ("lm_head.weight" not in tensors)
    if params.lm_head is not None:
        same(params.lm_head, tensors["lm_head.weight"].T)
    for number, layer in enumerate(params.layers):
        tensor = {
            name.removeprefix(f"model.layers.{number}."): value
            for name, value in tensors.items()
            if name.startswith(f"model.layers.{number}.")
        }
        for kv_head in range(kv_heads):
            for member in range(group):
                head = kv_head * group + member
                rows = slice(head * head_dim, (head + 1) * head_dim)
                same(layer.wqkv[:, kv_head, member], tensor["self_attn.q_proj.weight"][rows].T)
                same(layer.wo[kv_head, member], tensor["self_attn.o_proj.weight"][:, rows].T)
                if layer.bqkv is not None:
                    same(layer.bqkv[kv_head, member], tensor["self_attn.q_proj.bias"][rows])
            rows = slice(kv_head * head_dim, (kv_head + 1) * head_dim)
            for place, module in ((group, "k_proj"), (group + 1, "v_proj")):
                same(layer.wqkv[:, kv_head, place], tensor[f"self_attn.{module}.weight"][rows].T)
                if layer.bqkv is not None:
                    same(layer.bqkv[kv_head, place], tensor[f"self_attn.{module}.bias"][rows])
        for place, module in enumerate(("gate_proj", "up_proj")):
            same(layer.w_gate_up[:, place], tensor[f"mlp.{module}.weight"].T)
            if layer.b_gate_up is not None:
                same(layer.b_gate_up[place], tensor[f"mlp.{module}.bias"])
        same(layer.w_down, tensor["mlp.down_proj.weight"].T)
        for ours, name in (
            (layer.attention_norm, "input_layernorm.weight"),
            (layer.mlp_norm, "post_attention_layernorm.weight"),
            (layer.q_norm, "self_attn.q_norm.weight"),
            (layer.k_norm, "self_attn.k_norm.weight"),
            (layer.bo, "self_attn.o_proj.bias"),
            (layer.b_down, "mlp.down_proj.bias"),
        ):
            assert (ours is None) == (name not in tensor), name
            if ours is not None:
                same(ours, tensor[name])


@pytest.mark.parametrize(
    "name",
    [
        "attention_bias", "bfloat16", "grouped_query", "head_dim", "mistral_sliding_window", "mlp_bias", "multi_head",
        "multi_query", "phi3", "qwen2", "qwen3", "sharded", "tied_head",
    ],
)  # fmt: skip
def test_checkpoints_that_transformers_wrote(tmp_path: Path, name: str) -> None:
    source = GOLDENS / name
    tensors = {key: value for file in source.glob("*.safetensors") for key, value in load_file(file).items()}
    config = json.loads((source / "config.json").read_text())
    assert_same_weights(converted(source, tmp_path / "converted"), apart(tensors, config), config)


def test_shards_give_the_same_as_one_file(folder: Path, tmp_path: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    shard(folder)
    config = json.loads((folder / "config.json").read_text())
    assert_same_weights(converted(folder, tmp_path / "converted"), whole, config)
    named = {path.name for path in folder.iterdir()}
    assert set(read_manifest(tmp_path / "converted").source_files) == named  # the index among them


def test_one_file_counts_beside_the_shards_of_an_index(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers; which of the two is told."""
    tensors = load_file(folder / "model.safetensors")
    shard(folder)
    single = {name: value + np.float32(1) for name, value in tensors.items()}
    save_file(single, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    assert_same_weights(converted(folder, tmp_path / "converted"), single, config)
    assert "those of model.safetensors, not of the files of model.safetensors.index.json" in caplog.text
    assert not any("index" in name or "-of-" in name for name in read_manifest(tmp_path / "converted").source_files)


def test_an_index_that_names_the_one_file_counts(folder: Path, tmp_path: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    write_index(folder, dict.fromkeys(whole, "model.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    assert_same_weights(converted(folder, tmp_path / "converted"), whole, config)
    write_index(folder, dict.fromkeys([*whole, "more"], "model.safetensors"))
    assert_refused(folder, match=r"model\.safetensors lacks tensor 'more'")


# --- sizes of heads


def test_head_size_of_the_config_counts(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "source", head_dim=32)
    params = converted(folder, tmp_path / "converted")
    assert params.layers[0].wqkv.shape == (64, 2, 4, 32)
    assert params.layers[0].wo.shape == (2, 2, 32, 64)


@pytest.mark.parametrize("head_dim", [None, ...], ids=["null", "absent"])
def test_head_size_that_is_not_said_is_hidden_over_heads(folder: Path, tmp_path: Path, head_dim: Any) -> None:
    edit_config(folder, head_dim=head_dim)
    assert converted(folder, tmp_path / "converted").layers[0].wqkv.shape == (64, 2, 4, 16)


def test_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit_config(folder, head_dim=32)
    assert_refused(folder, match=rf"{Q0}.*\(64, 64\).*\(128, 64\)")


# --- heads tied to the embedding


def test_tied_head_is_stored_once(folder: Path, tmp_path: Path) -> None:
    assert converted(folder, tmp_path / "converted").lm_head is None


def test_tied_config_with_an_equal_head_is_tied(folder: Path, tmp_path: Path) -> None:
    edit_tensors(folder, {"lm_head.weight": load_file(folder / "model.safetensors")["model.embed_tokens.weight"]})
    assert converted(folder, tmp_path / "converted").lm_head is None
    assert read_manifest(tmp_path / "converted").model_config.tie_word_embeddings


def test_tied_config_with_another_head_uses_that_and_warns(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"] + 1
    edit_tensors(folder, {"lm_head.weight": head})
    with caplog.at_level(logging.WARNING):
        params = converted(folder, tmp_path / "converted")
    np.testing.assert_array_equal(np.asarray(params.lm_head), head.T)
    assert not read_manifest(tmp_path / "converted").model_config.tie_word_embeddings
    assert "different head" in caplog.text


@pytest.mark.parametrize("flag", [False, ...], ids=["false", "absent"])
def test_untied_config_without_a_head_is_refused(folder: Path, flag: Any) -> None:
    edit_config(folder, tie_word_embeddings=flag)
    assert_refused(folder, match=r"lm_head.weight.*missing")


# --- damaged and incomplete


def test_missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert_refused(folder, match=r"model-00002-of-00002\.safetensors is missing")


def test_tensor_that_only_the_index_has(folder: Path) -> None:
    file = shard(folder)[Q0]
    tensors = load_file(folder / file)
    del tensors[Q0]
    save_file(tensors, folder / file)
    assert_refused(folder, match=rf"{file} lacks.*{Q0}")


def test_tensor_that_nobody_has(folder: Path) -> None:
    edit_tensors(folder, {Q0: None})
    assert_refused(folder, match=rf"{Q0}.*missing")


def test_tensor_that_the_architecture_lacks(folder: Path) -> None:
    edit_tensors(folder, {"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)})
    assert_refused(folder, match=r"q_proj\.bias.*not part of")


def test_short_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert_refused(folder, match=r"model\.safetensors is damaged")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b"\xff", b'{"a": "\\ud800"}', b'{"a": ' + b"1" * 5000 + b"}", b"[" * 100_000],
    ids=["cut", "list", "binary", "half a character", "digits", "nested"],
)
def test_damaged_json(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    assert_refused(folder, match=name)


@pytest.mark.parametrize("key", ["bos_token", "eos_token"])
@pytest.mark.parametrize("token", [5, {"content": 5}, ["</s>"]])
def test_special_token_that_is_no_text(folder: Path, key: str, token: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: token}))
    assert_refused(folder, match=rf"tokenizer_config\.json: {key}=.*must be a text")


def test_what_a_file_says_does_not_fill_the_screen(folder: Path) -> None:
    edit_config(folder, hidden_size="x" * 1_000_000)
    with pytest.raises(CheckpointError, match=r"config.json: hidden_size='xxx") as caught:
        convert(folder, folder.parent / "refused", progress=NoProgress())
    assert len(str(caught.value)) < 3000


def test_folder_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    assert_refused(tmp_path / "source", match="is no model")


def test_source_that_is_not_there(tmp_path: Path) -> None:
    assert_refused(tmp_path / "source", match="does not exist")


def test_interrupted_conversion_leaves_nothing_that_passes_for_whole(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxserve.checkpoint.convert.write_manifest", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(folder, tmp_path / "converted", progress=NoProgress())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_folder_of_a_killed_conversion_is_not_served(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "converted", progress=NoProgress())
    (tmp_path / "converted" / "jaxserve.json").unlink()
    with pytest.raises(CheckpointError, match="is no model"):
        load_checkpoint(tmp_path / "converted", "float32", NoProgress())


def test_destination_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(CheckpointError, match=r"taken exists: remove it"):
        convert(folder, tmp_path / "taken", progress=NoProgress())


def test_destination_that_is_a_link_to_nothing_is_not_written_through(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"link exists: remove it"):
        convert(folder, tmp_path / "link", progress=NoProgress())
    assert not (tmp_path / "elsewhere").exists()


def test_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    assert_refused(folder, match=r"no space.*0 MB free.*free some")


# --- hostile


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/tmp/model.safetensors", "a/b.safetensors", "", ".."])
def test_shard_outside_the_folder(folder: Path, name: str) -> None:
    weight_map = shard(folder)
    write_index(folder, {**weight_map, Q0: name})
    assert_refused(folder, match="refuses the file name")


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
        "chat_template.jinja", "hf_quant_config.json", "special_tokens_map.json", "added_tokens.json",
    ],
)  # fmt: skip
def test_link_that_leaves_the_folder(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    if not (folder / name).exists():
        (folder / name).write_text("{}")
    (folder / name).rename(tmp_path / "elsewhere" / name)
    (folder / name).symlink_to(tmp_path / "elsewhere" / name)
    assert_refused(folder, match=rf"refuses {name}: it is a link")


def test_links_of_a_hub_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "repository" / "blobs", tmp_path / "repository" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", file.name))
    assert converted(snapshot, tmp_path / "converted").lm_head is None


class _Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_pickled_weights_are_never_opened(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Marker(tmp_path / "marker")))
    assert_refused(folder, match=r"pickled weights|more than tensors")  # without torch, and with it
    assert not (tmp_path / "marker").exists()


# --- dtypes


def test_bfloat16_and_float8_keep_their_bits(tmp_path: Path) -> None:
    source = tmp_path / "source"
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    write_tiny_llama(source, hidden_size=8, intermediate_size=4, num_hidden_layers=1, **heads)
    tensors = load_file(source / "model.safetensors")
    odd = [1.5, -2.0, -0.0, 2.0**-130, 3.3895e38, float("nan"), float("inf"), 1e-3]
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    tensors[Q0][0] = np.array(odd, ml_dtypes.bfloat16)
    down = "model.layers.0.mlp.down_proj.weight"
    tensors[down] = np.linspace(-448, 448, 32, dtype=np.float32).reshape(8, 4).astype(ml_dtypes.float8_e4m3fn)
    save_file(tensors, source / "model.safetensors")

    with open_model(source) as model:
        read = dict(model.assembler.arrays("layer_000", lambda amount: None))
    assert read["wqkv"].dtype == ml_dtypes.bfloat16
    assert read["w_down"].dtype == ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(read["w_down"].view(np.uint8), tensors[down].T.copy().view(np.uint8))

    convert(source, tmp_path / "converted", progress=NoProgress())
    bits = np.asarray(load_checkpoint(tmp_path / "converted", "bfloat16", NoProgress()).params.layers[0].wqkv)
    np.testing.assert_array_equal(bits[:, 0, 0, 0].view(np.uint16), tensors[Q0][0].view(np.uint16))
    np.testing.assert_array_equal(
        np.asarray(stored(tmp_path / "converted").layers[0].w_down), tensors[down].T.astype(np.float32)
    )


def test_dtype_at_conversion_spares_the_norms(folder: Path, tmp_path: Path) -> None:
    edit_tensors(folder, {"model.norm.weight": np.full(64, 1.001, np.float32)})
    params = converted(folder, tmp_path / "converted", dtype="bfloat16")
    original = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(np.asarray(params.embedding), original.astype(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_array_equal(np.asarray(params.final_norm), np.full(64, 1.001, np.float32))


@pytest.mark.parametrize(
    ("dtypes", "common"),
    [
        (("float32", "bfloat16", "float32"), "float32"),
        (("float16", "bfloat16", "bfloat16"), "float32"),
        (("bfloat16", "float16", "float64"), "float64"),
        (("bfloat16", "float8_e4m3fn", "bfloat16"), "float32"),
        (("float8_e5m2", "float8_e4m3fn", "float8_e4m3fn"), "float32"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
def test_parts_of_unlike_dtypes_are_joined_without_loss(tmp_path: Path, dtypes: tuple[str, ...], common: str) -> None:
    folder = write_tiny_llama(tmp_path / "source", attention_bias=True)
    tensors = load_file(folder / "model.safetensors")
    for part in ("weight", "bias"):
        for module, dtype in zip("qkv", dtypes, strict=True):
            key = f"model.layers.0.self_attn.{module}_proj.{part}"
            tensors[key] = tensors[key].astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    edit_tensors(folder, dict(tensors))
    config = json.loads((folder / "config.json").read_text())
    params = converted(folder, tmp_path / "converted")
    exact = {name: value.astype(np.float32) for name, value in tensors.items()}
    assert_same_weights(params, exact, config)
    arrays = read_manifest(tmp_path / "converted").arrays
    assert arrays["layer_000/wqkv"].dtype == arrays["layer_000/bqkv"].dtype == common


def test_manifest_tells_the_source(folder: Path, tmp_path: Path) -> None:
    converted(folder, tmp_path / "converted")
    manifest = read_manifest(tmp_path / "converted")
    assert (manifest.name, manifest.source, manifest.dtype) == ("source", "huggingface", "auto")
    assert set(manifest.source_files) == {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert all(len(digest) == 64 for digest in manifest.source_files.values())
    assert {"jax", "orbax-checkpoint"} <= set(manifest.versions)
