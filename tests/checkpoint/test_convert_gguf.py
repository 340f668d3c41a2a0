"""GGUF files: the same weights as from Hugging Face, whatever the number of heads; quantized blocks; damage."""

from __future__ import annotations

import dataclasses
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.families import Family, family_of_architecture
from jaxserve.checkpoint.manifest import read_manifest
from jaxserve.checkpoint.open_model import open_model
from jaxserve.models.params import LlamaParams
from jaxserve.progress import NoProgress
from tests.checkpoint.files import converted, permuted, write_gguf
from tests.tiny_model import TINY_CONFIG, random_weights, write_tiny_llama

GOLDENS = Path(__file__).parents[1] / "goldens" / "tiny"
DOWN0 = "model.layers.0.mlp.down_proj.weight"
Type = gguf.GGMLQuantizationType


def weights(**overrides: Any) -> dict[str, np.ndarray]:
    return random_weights({**TINY_CONFIG, **overrides}, 0)


def assert_equal_params(left: LlamaParams, right: LlamaParams) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), left, right)


@pytest.mark.parametrize(
    "shape",
    [
        {"num_attention_heads": 4, "num_key_value_heads": 2},
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        {"num_attention_heads": 4, "num_key_value_heads": 1},
        {"head_dim": 32},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ],
    ids=["4/2", "4/4", "4/1", "head size", "biases and head"],
)
def test_same_weights_as_from_hugging_face(tmp_path: Path, shape: dict[str, Any]) -> None:
    direct = converted(write_tiny_llama(tmp_path / "huggingface", **shape), tmp_path / "direct")
    path = write_gguf(tmp_path / "model.gguf", weights(**shape), **shape)
    assert_equal_params(converted(path, tmp_path / "through-gguf"), direct)
    ours, theirs = (read_manifest(tmp_path / name).model_config for name in ("through-gguf", "direct"))
    assert ours == theirs


def test_gate_and_up_of_unlike_16_bit_types_are_joined_without_loss(tmp_path: Path) -> None:
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    tensors = weights()
    bfloat16 = tensors[gate].astype(ml_dtypes.bfloat16)
    tensors |= {gate: bfloat16.view(np.uint8), up: tensors[up].astype(np.float16)}
    path = write_gguf(tmp_path / "model.gguf", tensors, types={gate: Type.BF16})
    fused = np.asarray(converted(path, tmp_path / "converted").layers[0].w_gate_up)
    np.testing.assert_array_equal(fused[:, 0], bfloat16.astype(np.float32).T)
    np.testing.assert_array_equal(fused[:, 1], tensors[up].astype(np.float32).T)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1])
def test_quantized_blocks(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    tensors = weights()
    original = tensors[DOWN0]
    tensors[DOWN0] = gguf.quants.quantize(original, kind)
    path = write_gguf(tmp_path / "model.gguf", tensors, types={DOWN0: kind})
    read = np.asarray(converted(path, tmp_path / "converted").layers[0].w_down).T
    step = np.abs(original).max() / (100 if kind is Type.Q8_0 else 7)
    assert 0 < np.abs(read - original).max() <= step


def scales_of_k_block(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight offsets of six bits each, out of twelve bytes: the last four have their high bits elsewhere."""
    low, middle, high = packed[:4], packed[4:8], packed[8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)])
    offsets = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)])
    return scales.astype(np.float32), offsets.astype(np.float32)


def values_of_block(block: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The 256 numbers of one block, by the definition of the format."""
    if kind is Type.Q6_K:
        low, high = block[:128].reshape(2, 64), block[128:192].reshape(2, 32)
        scales, factor = block[192:208].view(np.int8).reshape(2, 8), block[208:].view(np.float16)[0]
        quarters = []
        for half in range(2):
            fours = (low[half, :32] & 15, low[half, 32:] & 15, low[half, :32] >> 4, low[half, 32:] >> 4)
            for quarter, four in enumerate(fours):
                numbers = (four | ((high[half] >> (2 * quarter) & 3) << 4)).astype(np.float32) - 32
                quarters.append(numbers * np.repeat(scales[half, 2 * quarter : 2 * quarter + 2], 16))
        return np.float32(factor) * np.concatenate(quarters)
    factor, offset_factor = block[:4].view(np.float16).astype(np.float32)
    scales, offsets = scales_of_k_block(block[4:16])
    fifth, fours = (block[16:48], block[48:]) if kind is Type.Q5_K else (np.zeros(32, np.uint8), block[16:])
    runs = []
    for run in range(8):
        pair = fours[32 * (run // 2) : 32 * (run // 2) + 32]
        numbers = ((pair >> 4 if run % 2 else pair & 15) | ((fifth >> run & 1) << 4)).astype(np.float32)
        runs.append(factor * scales[run] * numbers - offset_factor * offsets[run])
    return np.concatenate(runs)


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q5_K, Type.Q6_K])
def test_blocks_of_256_values(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Random quants, under factors of one half: every row is what its block says."""
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    shape: dict[str, Any] = {"intermediate_size": block_size}
    blocks = np.random.default_rng(0).integers(0, 256, (64, type_size), np.uint8)
    factor_at = (type_size - 2,) if kind is Type.Q6_K else (0, 2)
    for start in factor_at:
        blocks[:, start : start + 2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    path = write_gguf(tmp_path / "model.gguf", {**weights(**shape), DOWN0: blocks}, types={DOWN0: kind}, **shape)
    read = np.asarray(converted(path, tmp_path / "converted").layers[0].w_down)
    assert read.shape == (256, 64)
    for row, block in enumerate(blocks):
        np.testing.assert_allclose(read[:, row], values_of_block(block, kind), rtol=1e-6)


def write_family(path: Path, source: Path) -> Path:
    """A checkpoint that transformers wrote, as a GGUF of its family."""
    config = json.loads((source / "config.json").read_text())
    family = family_of_architecture(config["architectures"][0], "config.json")
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    prefix, head_dim = family.gguf_architecture, config.get("head_dim") or config["hidden_size"] // heads[0]
    writer = gguf.GGUFWriter(path, prefix)
    numbers = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads[0], "attention.head_count_kv": heads[1],
        "attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": head_dim,
        "attention.sliding_window": config.get("sliding_window") or 0,
    }  # fmt: skip
    for key, value in numbers.items():
        writer.add_uint32(f"{prefix}.{key}", value)
    writer.add_float32(f"{prefix}.rope.freq_base", config["rope_parameters"]["rope_theta"])
    writer.add_float32(f"{prefix}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    for name, value in load_file(source / "model.safetensors").items():
        theirs, rows = gguf_name(name, family), value
        if family.gguf_permuted and ".attn_q." in theirs:
            rows = permuted(value, heads[0])
        elif family.gguf_permuted and ".attn_k." in theirs:
            rows = permuted(value, heads[1])
        writer.add_tensor(theirs, np.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str, family: Family) -> str:
    ours, theirs = family.names, family.gguf_names
    if not name.startswith("model.layers."):
        return next(
            getattr(theirs, key) for key in ("embedding", "final_norm", "lm_head") if getattr(ours, key) == name
        )
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    module, _, part = rest.rpartition(".")
    field = next(field.name for field in dataclasses.fields(ours) if getattr(ours, field.name) == module)
    return theirs.in_layer(int(layer), field, part)


@pytest.mark.parametrize(
    "name", ["qwen2", "qwen2_tied", "qwen3", "phi3", "phi3_sliding_window", "mistral_sliding_window"]
)
def test_every_family_has_the_weights_that_it_has_from_hugging_face(tmp_path: Path, name: str) -> None:
    path = write_family(tmp_path / "model.gguf", GOLDENS / name)
    assert_equal_params(converted(path, tmp_path / "a"), converted(GOLDENS / name, tmp_path / "b"))
    ours, theirs = (read_manifest(tmp_path / folder).model_config for folder in "ab")
    assert dataclasses.replace(ours, bos_token_id=1, eos_token_ids=(2,)) == theirs


def test_quantized_rows_of_q_are_put_back_in_order(tmp_path: Path) -> None:
    """Quantizing goes by rows, so order and quantization may be undone one after the other."""
    tensors = weights()
    key = "model.layers.0.self_attn.q_proj.weight"
    exact = gguf.quants.dequantize(gguf.quants.quantize(tensors[key], Type.Q8_0), Type.Q8_0)
    direct = write_gguf(tmp_path / "direct.gguf", {**tensors, key: exact})
    packed = {**tensors, key: gguf.quants.quantize(tensors[key], Type.Q8_0)}
    quantized = write_gguf(tmp_path / "quantized.gguf", packed, types={key: Type.Q8_0})
    assert_equal_params(converted(quantized, tmp_path / "a"), converted(direct, tmp_path / "b"))


@pytest.mark.parametrize(("kind", "dtype"), [(Type.BF16, ml_dtypes.bfloat16), (Type.F16, np.float16)])
def test_half_floats_keep_their_bits(tmp_path: Path, kind: gguf.GGMLQuantizationType, dtype: Any) -> None:
    tensors = weights()
    values = tensors[DOWN0].astype(dtype)
    values[0, :6] = np.array([1.5, -2.0, -0.0, 6e-8, 65000.0, np.nan], dtype)
    stored = values.view(np.uint8) if kind is Type.BF16 else values
    path = write_gguf(tmp_path / "model.gguf", {**tensors, DOWN0: stored}, types={DOWN0: kind})
    with open_model(path) as model:
        read = dict(model.assembler.arrays("layer_000", lambda amount: None))["w_down"]
    assert read.dtype == dtype
    np.testing.assert_array_equal(read.view(np.uint16), values.T.copy().view(np.uint16))


def test_unsupported_type_is_named(tmp_path: Path) -> None:
    tensors = {**weights(), DOWN0: np.zeros((64, 128), np.int8)}
    path = write_gguf(tmp_path / "model.gguf", tensors)
    with pytest.raises(CheckpointError, match=r"ffn_down.*I8.*Q4_1"):
        convert(path, tmp_path / "converted", progress=NoProgress())


@pytest.mark.parametrize("keep", [0, 3, 100, 5_000, -1], ids=["empty", "magic", "header", "names", "last byte"])
def test_short_file(tmp_path: Path, keep: int) -> None:
    path = write_gguf(tmp_path / "model.gguf", weights())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.gguf.*fetch the file again") as caught:
        convert(path, tmp_path / "converted", progress=NoProgress())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "converted").exists()


def test_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04" + b"x" * 1000)
    with pytest.raises(CheckpointError, match=r"no GGUF file: give one, or the folder"):
        convert(tmp_path / "model.gguf", tmp_path / "converted", progress=NoProgress())


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "pth"])
def test_one_file_of_a_folder(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(b"PK\x03\x04" + b"x" * 1000)
    with pytest.raises(CheckpointError, match=rf"is one file of a model: give the folder that it lies in, {tmp_path}$"):
        convert(path, tmp_path / "converted", progress=NoProgress())
    convert(write_gguf(path, weights()), tmp_path / "converted", progress=NoProgress())  # whatever it is called


def test_sound_files_that_are_not_supported(tmp_path: Path) -> None:
    big_endian = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    big_endian.write_header_to_file()
    big_endian.write_kv_data_to_file()
    big_endian.close()
    path = write_gguf(tmp_path / "nested.gguf", weights(), metadata={"our.lists": [[1, 2], [3]]})
    old = write_gguf(tmp_path / "old.gguf", weights())
    old.write_bytes(header_with(old.read_bytes(), "version", 1))
    for file, told in (
        (tmp_path / "big.gguf", r"big-endian.*gguf-convert-endian"),
        (path, r"'our\.lists' is a list of lists.*gguf-new-metadata --remove-metadata our\.lists"),
        (old, r"version 1 of GGUF is not supported, only 2 and 3"),
    ):
        with pytest.raises(CheckpointError, match=told):
            convert(file, tmp_path / "converted", progress=NoProgress())


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = weights()
    del tensors[DOWN0]
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_down\.weight.*missing"):
        convert(write_gguf(tmp_path / "model.gguf", tensors), tmp_path / "converted", progress=NoProgress())


@pytest.mark.parametrize(("place", "number"), [(20, 2), (20, 8), (20, 30), (4, 32), (24, 0), (24, 1)])
def test_a_tensor_that_is_not_what_its_header_says(tmp_path: Path, place: int, number: int) -> None:
    """Another type (Q4_0, Q8_0, BF16), fewer values, another place: all would be read as numbers."""
    path = write_gguf(tmp_path / "model.gguf", weights())
    content = bytearray(path.read_bytes())
    start = content.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + place
    content[start : start + 4] = number.to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.gguf.*fetch the file again"):
        convert(path, tmp_path / "converted", progress=NoProgress())
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.gguf"]


def test_heads_that_differ_by_layer_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", weights(), metadata={"llama.attention.head_count": [4, 2]})
    with pytest.raises(CheckpointError, match="head_count"):
        convert(path, tmp_path / "converted", progress=NoProgress())


def test_one_part_of_several_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", weights(), metadata={"split.count": 3, "split.no": 0})
    with pytest.raises(CheckpointError, match=r"one part of 3: join them first"):
        convert(path, tmp_path / "converted", progress=NoProgress())


def header_with(content: bytes, name: str, number: int) -> bytes:
    """A file whose header claims `number` of something."""
    if name in ("tensors", "entries"):
        place, size = (8, 8) if name == "tensors" else (16, 8)
    elif name == "bytes of a name":
        place, size = content.index(b"general.architecture") - 8, 8
    elif name == "bytes of a text":
        place, size = content.index(b"general.architecture") + len("general.architecture") + 4, 8
    elif name in ("tokens", "token types"):
        key = b"tokenizer.ggml.tokens" if name == "tokens" else b"tokenizer.ggml.token_type"
        place, size = content.index(key) + len(key) + 8, 8
    elif name == "layers":
        place, size = content.index(b"llama.block_count") + len("llama.block_count") + 4, 4
    elif name == "version":
        place, size = 4, 4
    elif name == "axes":
        place, size = content.index(b"token_embd.weight") + len("token_embd.weight"), 4
    else:
        place, size = content.index(b"token_embd.weight") + len("token_embd.weight") + (4 if name == "rows" else 24), 8
    return content[:place] + number.to_bytes(size, "little") + content[place + size :]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("tensors", 2**60), ("tensors", 2**16 + 1), ("entries", 2**60), ("entries", 2**31),
        ("bytes of a name", 2**60), ("bytes of a text", 2**39),
        ("bytes of a text", 2**63), ("tokens", 2**60), ("token types", 2**60), ("token types", 2**33),
        ("layers", 2**31 - 1), ("axes", 2**31), ("rows", 2**60), ("offset", 2**62),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [None, 2**40], ids=["small file", "file of holes"])
def test_a_header_that_claims_too_much(tmp_path: Path, name: str, number: int, size: int | None) -> None:
    path = write_gguf(tmp_path / "model.gguf", weights())
    path.write_bytes(header_with(path.read_bytes(), name, number))
    if size is not None:
        os.truncate(path, size)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"model\.gguf") as caught:
            convert(path, tmp_path / "converted", progress=NoProgress())
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.gguf"]
