"""Large tensors are read some rows at a time, in every format: the arrays are those of tensors that are read whole."""

from __future__ import annotations

from pathlib import Path

import gguf
import gguf.quants
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.checkpoint.open_model import open_model
from jaxserve.checkpoint.pieces import piece_names
from tests.checkpoint.files import edit_tensors, write_gguf
from tests.checkpoint.test_convert_torch import SHAPE, meta_folder
from tests.tiny_model import TINY_CONFIG, random_weights, write_tiny_llama

GOLDENS = Path(__file__).parents[1] / "goldens"


def arrays_of(source: Path, dtype: str = "auto") -> dict[str, np.ndarray]:
    with open_model(source, dtype) as model:
        return {
            f"{piece}/{name}": array
            for piece in piece_names(model.assembler.config)
            for name, array in model.assembler.arrays(piece, lambda amount: None)
        }


def assert_the_same_in_slabs(source: Path, monkeypatch: pytest.MonkeyPatch, dtype: str = "auto") -> None:
    whole = arrays_of(source, dtype)
    for num_bytes in (1, 1500):  # a row at a time, and some rows that divide neither heads nor ranks
        monkeypatch.setattr("jaxserve.checkpoint.tensor_source._SLAB_BYTES", num_bytes)
        cut = arrays_of(source, dtype)
        assert cut.keys() == whole.keys()
        for name, array in whole.items():
            assert cut[name].dtype == array.dtype, name
            assert cut[name].shape == array.shape, name
            assert cut[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize(
    "name",
    [
        "tiny/grouped_query", "tiny/attention_bias", "tiny/phi3", "tiny/sharded", "quantized/w4a16_int4_phi3",
        "quantized/w8a16_int8", "quantized/fp8_weight_only",
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_hugging_face(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_the_same_in_slabs(GOLDENS / name, monkeypatch, dtype)


def test_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its q and k have rows in another order, of blocks or of plain numbers."""
    tensors = random_weights({**TINY_CONFIG, "attention_bias": True}, 0)
    packed = [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.embed_tokens.weight",
    ]
    types = dict.fromkeys(packed, gguf.GGMLQuantizationType.Q8_0)
    for name, kind in types.items():
        tensors[name] = gguf.quants.quantize(tensors[name], kind)
    path = write_gguf(tmp_path / "model.gguf", tensors, types=types)
    assert_the_same_in_slabs(path, monkeypatch)


@pytest.mark.parametrize("ranks", [1, 2])
def test_meta(tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    folder = write_tiny_llama(tmp_path / "source", vocab_size=260, **SHAPE)
    assert_the_same_in_slabs(meta_folder(folder, tmp_path / "meta", torch, ranks=ranks), monkeypatch)


def test_a_mapped_file_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    folder = write_tiny_llama(tmp_path / "source", vocab_size=260, **SHAPE)
    expected = arrays_of(folder)
    tensors = {name: torch.from_numpy(value) for name, value in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    monkeypatch.setattr("jaxserve.checkpoint.torch_source._MAPPED_BYTES", 20_000)
    for name, array in arrays_of(folder).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    assert_the_same_in_slabs(folder, monkeypatch)


@pytest.mark.parametrize("row", [0, 131, 258])
def test_a_head_that_differs_from_the_embedding_in_one_row(
    tmp_path: Path, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_llama(tmp_path / "source", tie_word_embeddings=True)
    head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    monkeypatch.setattr("jaxserve.checkpoint.tensor_source._SLAB_BYTES", 1500)
    edit_tensors(folder, {"lm_head.weight": head})
    assert "head/lm_head" not in arrays_of(folder)
    head[row, 5] += 1
    edit_tensors(folder, {"lm_head.weight": head})
    np.testing.assert_array_equal(arrays_of(folder)["head/lm_head"], head.T)
