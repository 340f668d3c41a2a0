"""Draft heads as they are published: files written here in those layouts become the arrays that they were written from."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint.draft_heads import load_draft_head
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.models.eagle import EagleConfig, EagleParams, eagle_specs
from jaxserve.models.medusa import MedusaConfig, MedusaParams, medusa_specs
from tests.models.head_cases import LAYER, drawn

TARGET = dataclasses.replace(LAYER, num_layers=8)
EAGLE = EagleConfig(version=1, layer=LAYER, target_hidden_size=16, has_bias=True, has_embedding=True)
EAGLE3 = EagleConfig(version=3, layer=LAYER, target_hidden_size=16, tap_layers=(2, 4, 5), draft_vocab_size=10)
MEDUSA = MedusaConfig(num_heads=3, num_blocks=2, hidden_size=16, vocab_size=24)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 24, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip


def eagle_tensors(params: EagleParams, layer: str) -> dict[str, np.ndarray]:
    """Of a published file: matrices are [out, in], heads one after the other."""
    arrays, group = params.layer, LAYER.group_size
    width = arrays.wqkv.shape[0]
    by_name = {
        "self_attn.q_proj": arrays.wqkv[:, :, :group].reshape(width, -1).T,
        "self_attn.k_proj": arrays.wqkv[:, :, group].reshape(width, -1).T,
        "self_attn.v_proj": arrays.wqkv[:, :, group + 1].reshape(width, -1).T,
        "self_attn.o_proj": arrays.wo.reshape(-1, LAYER.hidden_size).T,
        "mlp.gate_proj": arrays.w_gate_up[:, 0].T,
        "mlp.up_proj": arrays.w_gate_up[:, 1].T,
        "mlp.down_proj": arrays.w_down.T,
        "post_attention_layernorm": arrays.mlp_norm,
    }
    tensors = {"fc.weight": params.fc.T}
    if params.embedding_norm is None:
        tensors |= {"fc.bias": params.fc_bias, "embed_tokens.weight": params.embedding}
    else:
        by_name |= {"hidden_norm": arrays.attention_norm, "input_layernorm": params.embedding_norm}
        known = np.isin(np.arange(LAYER.vocab_size), params.token_ids)
        tensors |= {
            "norm.weight": params.final_norm,
            "lm_head.weight": params.lm_head.T,
            "d2t": params.token_ids.astype(np.int64) - np.arange(len(params.token_ids)),
            "t2d": known,
        }
        if params.input_norm is not None:
            tensors["input_norm.weight"] = params.input_norm
    tensors |= {f"{layer}{name}.weight": array for name, array in by_name.items()}
    return {name: np.ascontiguousarray(array) for name, array in tensors.items()}


def medusa_tensors(params: MedusaParams) -> dict[str, np.ndarray]:
    tensors = {}
    for number, head in enumerate(params.heads):
        for block, (weight, bias) in enumerate(zip(head.blocks, head.biases, strict=True)):
            tensors |= {f"{number}.{block}.linear.weight": weight.T, f"{number}.{block}.linear.bias": bias}
        tensors[f"{number}.{len(head.blocks)}.weight"] = head.lm_head.T
    return {name: np.ascontiguousarray(array) for name, array in tensors.items()}


def write(
    folder: Path, tensors: dict[str, np.ndarray], file: str = "model.safetensors", config: dict[str, Any] = CONFIG
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
        return folder
    torch = pytest.importorskip("torch")
    torch.save({name: torch.from_numpy(array.copy()) for name, array in tensors.items()}, folder / file)
    return folder


def same(loaded: Any, wanted: Any) -> bool:
    assert jax.tree.structure(loaded) == jax.tree.structure(wanted)
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(wanted), strict=True))


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_an_eagle_head_is_read(tmp_path: Path, prefix: str, file: str) -> None:
    params = drawn(eagle_specs(EAGLE))
    tensors = {prefix + name: array for name, array in eagle_tensors(params, "layers.0.").items()}
    head = load_draft_head(write(tmp_path / "head", tensors, file), "eagle", TARGET)
    assert head.config == EAGLE
    assert same(head.params, params)


def test_parts_of_unlike_16_bit_dtypes_are_joined_without_loss(tmp_path: Path) -> None:
    tensors = eagle_tensors(drawn(eagle_specs(EAGLE)), "layers.0.")
    dtypes = {"k_proj": ml_dtypes.bfloat16, "gate_proj": ml_dtypes.bfloat16}
    tensors = {
        name: array.astype(next((dtype for part, dtype in dtypes.items() if part in name), np.float16))
        for name, array in tensors.items()
    }
    exact = {name: array.astype(np.float32) for name, array in tensors.items()}
    head, wide = (
        load_draft_head(write(tmp_path / name, held), "eagle", TARGET)
        for name, held in (("narrow", tensors), ("wide", exact))
    )
    for weight in ("wqkv", "w_gate_up"):
        np.testing.assert_array_equal(getattr(head.params.layer, weight), getattr(wide.params.layer, weight))


@pytest.mark.parametrize(
    ("layer", "file"),
    [("midlayer.", "model.safetensors"), ("layers.0.", "model.safetensors"), ("midlayer.", "pytorch_model.bin")],
)
def test_an_eagle3_head_is_read_with_its_own_vocabulary(tmp_path: Path, layer: str, file: str) -> None:
    params = drawn(eagle_specs(EAGLE3))
    folder = write(tmp_path / "head", eagle_tensors(params, layer), file, CONFIG | {"draft_vocab_size": 10})
    head = load_draft_head(folder, "eagle3", TARGET)
    assert head.config == EAGLE3
    assert same(head.params, params)


@pytest.mark.parametrize(
    ("told", "layers", "logged"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}, (1, 3, 8), ""),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}},
            (2, 4, 5),
            "[1, 3, 4] of eagle_config are taken for layers that hidden states come out of",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 6, 8]}}, (2, 6, 8), ""),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 4, 5), ""),
    ],
)
def test_a_config_may_name_the_layers_that_an_eagle3_head_looks_at(
    tmp_path: Path, told: dict[str, Any], layers: tuple[int, ...], logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "jaxserve.checkpoint.draft_heads")
    config = CONFIG | {"draft_vocab_size": 10, "norm_before_residual": True} | told
    folder = write(tmp_path / "head", eagle_tensors(drawn(eagle_specs(EAGLE3)), "midlayer."), config=config)
    loaded = load_draft_head(folder, "eagle3", TARGET).config
    assert loaded == dataclasses.replace(EAGLE3, tap_layers=layers, norms_residual=True)
    assert logged in caplog.text and bool(logged) == ("come out of" in caplog.text)


def test_an_eagle3_head_may_describe_its_layer_apart(tmp_path: Path) -> None:
    params = drawn(eagle_specs(EAGLE3))
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": 10,
        "target_hidden_size": None, "norm_before_fc": False, "transformer_layer_config": {**CONFIG, "model_type": "llama"},
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "speculators_config": {"algorithm": "eagle3"},
    }  # fmt: skip
    for told, is_normed in (({}, True), ({"norm_before_residual": False}, False)):
        folder = write(tmp_path / "head", eagle_tensors(params, "layers.0."), config=config | told)
        head = load_draft_head(folder, "eagle3", TARGET)
        assert head.config == dataclasses.replace(EAGLE3, norms_residual=is_normed)
        assert same(head.params, params)


@pytest.mark.parametrize("group", [False, True])
def test_an_eagle3_head_may_norm_what_it_takes_in(tmp_path: Path, group: bool) -> None:
    wanted = dataclasses.replace(EAGLE3, input_norm="together", norms_output=True)
    params = drawn(eagle_specs(wanted))
    told = {"norm_before_fc": True, "norm_output": True}
    config = CONFIG | {"draft_vocab_size": 10} | ({"eagle_config": told} if group else told)
    head = load_draft_head(
        write(tmp_path / "head", eagle_tensors(params, "midlayer."), config=config), "eagle3", TARGET
    )
    assert head.config == wanted and same(head.params, params)


def test_an_eagle3_head_may_norm_each_hidden_state_by_itself(tmp_path: Path) -> None:
    wanted = dataclasses.replace(EAGLE3, input_norm="each")
    params = drawn(eagle_specs(wanted))
    tensors = eagle_tensors(params, "midlayer.")
    norms = np.split(tensors.pop("input_norm.weight"), 3)
    tensors |= {f"fc_norm.{number}.weight": norm for number, norm in enumerate(norms)}
    config = CONFIG | {"draft_vocab_size": 10, "fc_norm": True}
    head = load_draft_head(write(tmp_path / "head", tensors, config=config), "eagle3", TARGET)
    assert head.config == wanted and same(head.params, params)


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
@pytest.mark.parametrize("told", [3, 2])
def test_medusa_heads_are_read_all_of_them(tmp_path: Path, file: str, told: int) -> None:
    params = drawn(medusa_specs(MEDUSA))
    config = {"medusa_num_heads": told, "medusa_num_layers": 2}
    head = load_draft_head(write(tmp_path / "head", medusa_tensors(params), file, config), "medusa", TARGET)
    assert head.config == MEDUSA
    assert same(head.params, params)


@pytest.mark.parametrize(
    ("config", "target", "tensors", "message"),
    [
        ({}, {"vocab_size": 32}, {}, "vocabulary of 24 tokens, the model one of 32"),
        ({}, {"hidden_size": 32}, {}, "hidden states of 16 elements, the model's have 32"),
        ({"target_hidden_size": 64}, {}, {}, "hidden states of 64 elements, the model's have 16"),
        ({"num_hidden_layers": 2}, {}, {}, "num_hidden_layers=2: only heads of 1 layer"),
        ({}, {"num_layers": 2}, {}, "the model has 2 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 9, 2]}, {}, {}, "must be layers from 0 to 8"),
        ({"eagle_aux_hidden_state_layer_ids": []}, {}, {}, "must be layers from 0 to 8"),
        ({"norm_before_fc": True, "fc_norm": True}, {}, {}, "exclude each other"),
        ({"norm_before_fc": True}, {}, {}, "'input_norm.weight' is missing"),
        ({}, {}, {"input_norm.weight": np.zeros(48, np.float32)}, r"tensors \['input_norm.weight'\] are not part"),
        (
            {},
            {},
            {"fc.weight": np.zeros((16, 32), np.float32)},
            r"'fc.weight' has shape \(16, 32\), must have \(16, 48\)",
        ),
        ({}, {}, {"norm.weight": None}, "'norm.weight' is missing"),
        ({}, {}, {"d2t": None}, "the head has 10 tokens of the model's 24, and no table 'd2t'"),
        ({}, {}, {"d2t": np.full(10, 20, np.int64)}, "leads to tokens 20 to 29"),
        ({}, {}, {"layers.1.x": np.zeros(1, np.float32)}, r"tensors \['layers.1.x'\] are not part"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, config: dict[str, Any], target: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    written = eagle_tensors(drawn(eagle_specs(EAGLE3)), "midlayer.") | tensors
    written = {name: array for name, array in written.items() if array is not None}
    folder = write(tmp_path / "head", written, config=CONFIG | {"draft_vocab_size": 10} | config)
    with pytest.raises(CheckpointError, match=message) as error:
        load_draft_head(folder, "eagle3", dataclasses.replace(TARGET, **target))
    assert "\n" not in str(error.value)


def two_medusa_heads(folder: Path) -> Path:
    tensors = medusa_tensors(drawn(medusa_specs(MEDUSA)))
    return write(folder / "medusa", tensors, "medusa_lm_head.safetensors", {"medusa_num_layers": 2})


def test_medusa_heads_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = two_medusa_heads(tmp_path)
    with pytest.raises(CheckpointError, match=r"'0.0.linear.weight' has shape \(16, 16\), must have \(32, 32\)"):
        load_draft_head(folder, "medusa", dataclasses.replace(TARGET, hidden_size=32))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds no Medusa heads"):
        load_draft_head(empty, "medusa", TARGET)


@pytest.mark.parametrize(("method", "kind"), [("eagle", "EAGLE"), ("eagle3", "EAGLE-3")])
def test_a_folder_without_an_eagle_head_is_refused_by_what_it_lacks(
    tmp_path: Path, method: Literal["eagle", "eagle3"], kind: str
) -> None:
    medusa = two_medusa_heads(tmp_path)
    with pytest.raises(CheckpointError, match=f"has no tensor 'fc.weight': it holds no {kind} head;"):
        load_draft_head(medusa, method, TARGET)
