"""Small checkpoints made on the spot, in each format that can be read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.manifest import WEIGHTS_FOLDER, read_manifest
from jaxserve.checkpoint.orbax_weights import restore_weights
from jaxserve.checkpoint.tensor_names import GGUF, HUGGING_FACE
from jaxserve.models.params import LlamaParams
from jaxserve.progress import NoProgress
from tests.tiny_model import SPECIAL_TOKENS, TINY_CONFIG

MODULES = ("attention_norm", "q", "k", "v", "o", "q_norm", "k_norm", "mlp_norm", "gate", "up", "down")


def converted(source: Path, destination: Path, *, dtype: str = "auto") -> LlamaParams:
    """Convert, and read back in the stored dtype."""
    convert(source, destination, dtype=dtype, progress=NoProgress())
    return stored(destination)


def stored(folder: Path) -> LlamaParams:
    """What lies in a converted folder, in float32 (which is exact for everything narrower)."""
    return restore_weights(folder / WEIGHTS_FOLDER, read_manifest(folder).model_config, np.dtype(np.float32))


def python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    command = [sys.executable, "-c", program, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; a value of `...` removes the key."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_tensors(folder: Path, changes: dict[str, np.ndarray | None]) -> None:
    """Set tensors of model.safetensors; None removes one."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / "model.safetensors")


def shard(folder: Path) -> dict[str, str]:
    """Split model.safetensors in two with an index; returns the index's weight map."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in files.items() for name in members}
    write_index(folder, weight_map)
    (folder / "model.safetensors").unlink()
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Llama's q or k rows in the order that GGUF keeps them: the two halves of each head interleaved."""
    head_dim = rows.shape[0] // num_heads
    order = [
        head * head_dim + half * (head_dim // 2) + pair
        for head in range(num_heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    tokenizer: bool = True,
    metadata: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """A GGUF of a Llama, from Hugging Face's tensors.

    Args:
        types: of tensors (by Hugging Face's name) that are stored quantized; their values are `uint8` blocks then.
        metadata: further keys; None as value removes one that would be written.
        overrides: of TINY_CONFIG.
    """
    config = {**TINY_CONFIG, **overrides}
    writer = gguf.GGUFWriter(path, "llama")
    values: dict[str, Any] = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.value_length": config["head_dim"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.rope.freq_base": float(config["rope_theta"]),
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
    }
    if tokenizer:
        values |= byte_tokenizer_metadata()
    for key, value in (values | (metadata or {})).items():
        _add(writer, key, value)
    for name, value in tensors.items():
        own_name, rows = _gguf_tensor(name, value, config)
        writer.add_tensor(own_name, rows, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_tokenizer_metadata() -> dict[str, Any]:
    """A vocabulary of all bytes and the special tokens, in the manner of SmolLM2."""
    characters = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
    characters += [chr(256 + rank) for rank in range(256 - len(characters))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*characters, *SPECIAL_TOKENS],
        "tokenizer.ggml.token_type": [1] * len(characters) + [3] * len(SPECIAL_TOKENS),
        "tokenizer.ggml.merges": ["Ċ Ċ"][:0],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.chat_template": "{{ messages }}",
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif value:
        writer.add_array(key, value)


def _gguf_tensor(name: str, value: np.ndarray, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    for part in ("embedding", "final_norm", "lm_head"):
        if name == getattr(HUGGING_FACE, part):
            return getattr(GGUF, part), value
    for layer in range(config["num_hidden_layers"]):
        for module in MODULES:
            for part in ("weight", "bias"):
                if name == HUGGING_FACE.in_layer(layer, module, part):
                    if module in ("q", "k"):
                        heads = config["num_attention_heads" if module == "q" else "num_key_value_heads"]
                        value = permuted(value, heads)
                    return GGUF.in_layer(layer, module, part), value
    return name, value
