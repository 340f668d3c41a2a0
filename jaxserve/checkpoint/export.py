"""From a converted checkpoint back to a Hugging Face folder: the same bits under the names that they came with."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from jaxserve.checkpoint.assemble import transposed
from jaxserve.checkpoint.atomic import require_free_name, require_space
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.families import Family, family_of_architecture
from jaxserve.checkpoint.hf_config_write import hf_config_from_model
from jaxserve.checkpoint.manifest import (
    ORIGINAL_FOLDER,
    TOKENIZER_FOLDER,
    WEIGHTS_FOLDER,
    Manifest,
    check_files,
    is_converted,
    read_manifest,
)
from jaxserve.checkpoint.orbax_weights import read_piece
from jaxserve.checkpoint.pieces import EMBEDDING_PIECE, HEAD_PIECE, check_arrays, piece_names
from jaxserve.checkpoint.safetensors_source import INDEX_FILE, SINGLE_FILE
from jaxserve.checkpoint.tensor_names import TensorNames
from jaxserve.checkpoint.tokenizer_files import TOKENIZER_FILE, read_json, read_tokenizer
from jaxserve.checkpoint.trusted_files import checked_file
from jaxserve.checkpoint.unfinished import partial_folder
from jaxserve.config import ModelConfig
from jaxserve.progress import Progress

_FILE_BYTES = 2_000_000_000  # of a shard, at most, where a piece is not larger


def export(source: str | Path, destination: str | Path, *, progress: Progress) -> Path:
    """Write a converted checkpoint as a Hugging Face folder. The folder is whole, or not there.

    Tensors have the bits and dtypes that are stored: those of the source, unless conversion was asked for another dtype.

    Args:
        source: a folder that `convert` wrote.
        destination: the folder to make; it must not exist.

    Returns:
        The destination.

    Raises:
        CheckpointError: if the source is not usable or was quantized, the destination exists or is being made by another
            process, or the disk is full.
    """
    source, destination = Path(source), Path(destination)
    require_free_name(destination, source)
    if not is_converted(source):
        raise CheckpointError(f"{source} is no converted checkpoint: `jaxserve convert` makes one")
    manifest = read_manifest(source)
    check_files(source, manifest)
    check_arrays(manifest.model_config, manifest.arrays, str(source))
    if manifest.model_config.quantization is not None and manifest.quantization == "none":
        raise CheckpointError(
            f"{source} came quantized ({manifest.model_config.quantization.name}): its tensors, which are fused and stored "
            "with other scales here, are in the checkpoint that it was made from"
        )
    if manifest.model_config.quantization is not None:
        raise CheckpointError(
            f"{source} is quantized ({manifest.model_config.quantization.name}): what was rounded cannot be given back; "
            "export a checkpoint that was converted without --quantization"
        )
    family = family_of_architecture(manifest.architecture, str(source))
    _original_files(source, manifest)  # what is wrong with them is told before anything is written
    require_space(destination, int(1.02 * sum(info.nbytes for info in manifest.arrays.values())), str(destination))
    with partial_folder(destination, "export") as folder:
        _write_weights(source, manifest, family, folder, progress)
        _write_settings(source, manifest, family, folder)
    return destination


def _write_weights(source: Path, manifest: Manifest, family: Family, folder: Path, progress: Progress) -> None:
    files = _files(manifest)
    total = sum(info.nbytes for info in manifest.arrays.values())
    weight_map: dict[str, str] = {}
    with progress.task("Writing tensors", total, "B") as advance:
        for name, pieces in files.items():
            tensors: dict[str, np.ndarray] = {}
            for piece in pieces:
                tensors |= _tensors(source, manifest, family.names, piece)
            _save(tensors, folder / name)
            weight_map |= dict.fromkeys(tensors, name)
            advance(sum(tensor.nbytes for tensor in tensors.values()))
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _save(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """Raises OSError, as everything else that writes; the library has an error of its own, with the number in its text."""
    try:
        safetensors.numpy.save_file(dict(tensors), path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _files(manifest: Manifest) -> dict[str, list[str]]:
    """Which pieces go into which file: as many as `_FILE_BYTES` holds, and one at least."""
    groups: list[list[str]] = []
    room = 0
    for piece in piece_names(manifest.model_config):
        size = sum(info.nbytes for name, info in manifest.arrays.items() if name.startswith(f"{piece}/"))
        if not groups or size > room:
            groups.append([])
            room = _FILE_BYTES
        groups[-1].append(piece)
        room -= size
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups, start=1)
    }


def _tensors(source: Path, manifest: Manifest, names: TensorNames, piece: str) -> dict[str, np.ndarray]:
    """A piece's tensors under Hugging Face's names."""
    arrays = {
        name: array.reshape(manifest.arrays[f"{piece}/{name}"].shape)
        for name, array in read_piece(source / WEIGHTS_FOLDER / piece).items()
    }
    if piece == EMBEDDING_PIECE:
        return {names.embedding: arrays["embedding"]}
    if piece == HEAD_PIECE:
        tensors = {names.final_norm: arrays["final_norm"]}
        if "lm_head" in arrays:
            tensors[names.lm_head] = transposed(arrays["lm_head"])
        return tensors
    layer = piece_names(manifest.model_config).index(piece) - 1
    parts = _layer_tensors(arrays, manifest.model_config)
    tensors = {}
    for modules in (("q", "k", "v"), ("gate", "up")):
        fused = names.fused(modules)
        for part in ("weight", "bias"):
            if fused is not None and (modules[0], part) in parts:
                rows = [parts.pop((module, part)) for module in modules]
                tensors[names.in_layer(layer, fused, part)] = np.concatenate(rows)
    for (module, part), values in parts.items():
        tensors[names.in_layer(layer, module, part)] = np.ascontiguousarray(values)
    return tensors


def _layer_tensors(arrays: Mapping[str, np.ndarray], config: ModelConfig) -> dict[tuple[str, str], np.ndarray]:
    """By module and part, as they lie in a file of a family that fuses nothing: the inverse of `Assembler`."""
    hidden, group, head_dim = config.hidden_size, config.group_size, config.head_dim
    parts: dict[tuple[str, str], np.ndarray] = {}

    def add_qkv(part: str, values: np.ndarray) -> None:  # [kv_heads, group + 2, head_dim, ...]
        for module, heads in (("q", values[:, :group]), ("k", values[:, group]), ("v", values[:, group + 1])):
            parts[module, part] = heads.reshape(-1, *values.shape[3:])

    wqkv = transposed(arrays["wqkv"].reshape(hidden, -1))
    add_qkv("weight", wqkv.reshape(config.num_kv_heads, group + 2, head_dim, hidden))
    parts["o", "weight"] = transposed(arrays["wo"].reshape(-1, hidden))
    gate_up = transposed(arrays["w_gate_up"].reshape(hidden, -1)).reshape(2, -1, hidden)
    parts["gate", "weight"], parts["up", "weight"] = gate_up[0], gate_up[1]
    parts["down", "weight"] = transposed(arrays["w_down"])
    if "bqkv" in arrays:
        add_qkv("bias", arrays["bqkv"])
    if "bo" in arrays:
        parts["o", "bias"] = arrays["bo"]
    if "b_gate_up" in arrays:
        parts["gate", "bias"], parts["up", "bias"] = arrays["b_gate_up"][0], arrays["b_gate_up"][1]
        parts["down", "bias"] = arrays["b_down"]
    for norm in ("attention_norm", "mlp_norm", "q_norm", "k_norm"):
        if norm in arrays:
            parts[norm, "weight"] = arrays[norm]
    return parts


def _write_settings(source: Path, manifest: Manifest, family: Family, folder: Path) -> None:
    """The source's own config and tokenizer files, where it was a Hugging Face folder; else what says the same."""
    original = _original_files(source, manifest)
    if original:
        for path in original:
            shutil.copyfile(path, folder / path.name)
        config = read_json(source / ORIGINAL_FOLDER / "config.json")
        changed = _with_what_changed(config, manifest)
        if changed != config:
            _write_json(folder / "config.json", changed)
        return
    dtype = manifest.arrays[f"{EMBEDDING_PIECE}/embedding"].dtype
    _write_json(folder / "config.json", hf_config_from_model(manifest.model_config, family, dtype))
    _write_json(folder / "generation_config.json", _generation_config(manifest.model_config))
    if (source / TOKENIZER_FOLDER).is_dir():
        _write_tokenizer(source / TOKENIZER_FOLDER, folder)


def _original_files(source: Path, manifest: Manifest) -> list[Path]:
    """Those that conversion put there, and nothing else that a folder may hold or links may lead to.

    Raises:
        CheckpointError: if one is a link that leaves the folder, or no plain file.
    """
    listed = sorted(name for name in manifest.files if name.startswith(f"{ORIGINAL_FOLDER}/"))
    return [checked_file(source / ORIGINAL_FOLDER, name.removeprefix(f"{ORIGINAL_FOLDER}/")) for name in listed]


def _with_what_changed(config: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
    """A config that names the dtype that was asked for at conversion, and where the output head is."""
    changed = dict(config)
    if manifest.dtype != "auto":
        changed["dtype" if "dtype" in config else "torch_dtype"] = manifest.dtype
    if config.get("tie_word_embeddings") and not manifest.model_config.tie_word_embeddings:
        changed["tie_word_embeddings"] = False
    return changed


def _generation_config(config: ModelConfig) -> dict[str, Any]:
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids)}
    return {key: value for key, value in ids.items() if value not in (None, [])}


def _write_tokenizer(tokenizer: Path, folder: Path) -> None:
    settings = dataclasses.asdict(read_tokenizer(tokenizer).settings)
    shutil.copyfile(checked_file(tokenizer, TOKENIZER_FILE), folder / TOKENIZER_FILE)
    config = {key: settings[key] for key in ("bos_token", "eos_token", "chat_template") if settings[key]}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
