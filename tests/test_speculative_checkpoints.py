"""Models and heads that draft, from their folders to answers: a published head of few tokens, a model padded otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve import Engine, EngineConfig
from jaxserve.speculative_config import SpeculativeConfig
from tests.tiny_model import TINY_CONFIG, random_weights, write_tiny_llama

VOCAB_SIZE = 280  # with padding: the tokenizer has 259
DRAFT_TOKENS = 90
LAYERS = 6
USER = {"role": "user", "content": "aa bb aa bb"}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["one", "other"]}, "sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}


def write_eagle3_head(folder: Path) -> Path:
    """Random, in the published layout; its tokens are every other one of the model's."""
    config = TINY_CONFIG | {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "tie_word_embeddings": False,
        "vocab_size": VOCAB_SIZE, "draft_vocab_size": DRAFT_TOKENS,
    }  # fmt: skip
    hidden, rng = config["hidden_size"], np.random.default_rng(1)
    layer = random_weights(config, 3)
    tensors = {
        name.removeprefix("model.layers.0.").join(("midlayer.", "")): array
        for name, array in layer.items()
        if name.startswith("model.layers.0.")
    }
    for name in ("q", "k", "v"):
        rows = tensors[f"midlayer.self_attn.{name}_proj.weight"].shape[0]
        wide = rng.standard_normal((rows, 2 * hidden)) * (2 * hidden) ** -0.5
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = wide.astype(np.float32)
    tensors["midlayer.hidden_norm.weight"] = np.ones(hidden, np.float32)
    tensors["fc.weight"] = (rng.standard_normal((hidden, 3 * hidden)) * (3 * hidden) ** -0.5).astype(np.float32)
    tensors["norm.weight"] = layer["model.norm.weight"]
    tensors["lm_head.weight"] = layer["lm_head.weight"][:DRAFT_TOKENS]
    tensors["d2t"] = np.arange(DRAFT_TOKENS, dtype=np.int64)  # token i stands for 2 i
    tensors["t2d"] = np.isin(np.arange(config["vocab_size"]), 2 * np.arange(DRAFT_TOKENS))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def answers(model: Path, speculative: SpeculativeConfig | None) -> tuple[list[Any], int]:
    """Greedy ones, and how many tokens were drafted for them."""
    config = EngineConfig(
        device="cpu", max_num_seqs=2, max_num_batched_tokens=64, max_model_len=256, speculative_config=speculative
    )
    formats = [{"type": "text"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}]
    with Engine(str(model), config) as engine:
        said = [
            engine.chat.completions.create(
                messages=[USER], temperature=0.0, max_tokens=60, response_format=each, logit_bias={"44": 3}
            )
            for each in formats
        ]
        stats = engine.stats().speculative
    return [(one.choices[0].message.content, one.usage) for one in said], 0 if stats is None else stats.num_draft_tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "model", num_hidden_layers=LAYERS, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def plain(model: Path) -> list[Any]:
    return answers(model, None)[0]


@pytest.mark.long
def test_a_published_head_with_fewer_tokens_drafts(model: Path, plain: list[Any], tmp_path: Path) -> None:
    head = write_eagle3_head(tmp_path / "head")
    said, num_drafted = answers(model, SpeculativeConfig("eagle3", 3, model=str(head), adaptive=False))
    assert said == plain and num_drafted > 0


@pytest.mark.long
@pytest.mark.parametrize("size", [259, 300])
def test_a_model_with_a_vocabulary_of_another_size_drafts(
    model: Path, plain: list[Any], tmp_path: Path, size: int
) -> None:
    draft = write_tiny_llama(tmp_path / "draft", seed=5, vocab_size=size)
    said, num_drafted = answers(model, SpeculativeConfig("draft_model", 3, model=str(draft), adaptive=False))
    assert said == plain and num_drafted > 0
