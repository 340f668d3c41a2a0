"""Drafters that do not go with the model are refused before its weights are made or read, however the engine is started."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.bench.engine_run import start_engine
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.config import EngineConfig
from jaxserve.engine.build import build_dummy_engine
from jaxserve.progress import NoProgress
from jaxserve.protocol.launch import launch
from jaxserve.speculative_config import SpeculativeConfig
from tests.tiny_engine import MODEL_CONFIG, few_programs
from tests.tiny_model import TINY_CONFIG, write_tiny_llama

CONFIG = EngineConfig(device="cpu", max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64)

Start = Callable[[str, EngineConfig, NoProgress], Any]


@pytest.fixture(params=[launch, start_engine], ids=["launch", "bench"])
def start(request: pytest.FixtureRequest) -> Start:
    return request.param


@pytest.fixture
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise AssertionError("weights are made or read")

    monkeypatch.setattr("jaxserve.engine.build.init_params", refuse)
    monkeypatch.setattr("jaxserve.checkpoint.store.restore_weights", refuse)


def speculating(method: Any, **more: Any) -> EngineConfig:
    return dataclasses.replace(CONFIG, speculative_config=SpeculativeConfig(method, 3, **more))


def write_medusa_heads(folder: Path, count: int) -> Path:
    hidden, vocab = TINY_CONFIG["hidden_size"], TINY_CONFIG["vocab_size"]
    tensors = {}
    for head in range(count):
        tensors[f"{head}.0.linear.weight"] = np.zeros((hidden, hidden), np.float32)
        tensors[f"{head}.0.linear.bias"] = np.zeros(hidden, np.float32)
        tensors[f"{head}.1.weight"] = np.ones((vocab, hidden), np.float32)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": count, "medusa_num_layers": 1}))
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


@pytest.mark.usefixtures("_no_weights")
def test_an_early_exit_that_leaves_no_layer_out(tiny_model_dir: Path, start: Start) -> None:
    with pytest.raises(ValueError, match="num_layers=9 must be below the model's 2 layers"):
        start(str(tiny_model_dir), speculating("early_exit", num_layers=9), NoProgress())


@pytest.mark.usefixtures("_no_weights")
def test_fewer_heads_than_are_to_draft(tiny_model_dir: Path, tmp_path: Path, start: Start) -> None:
    config = speculating("medusa", model=str(write_medusa_heads(tmp_path / "heads", 2)))
    with pytest.raises(ValueError, match="num_speculative_tokens=3 must not be above the 2 Medusa heads"):
        start(str(tiny_model_dir), config, NoProgress())


@pytest.mark.usefixtures("_no_weights")
def test_a_draft_model_with_other_tokens(tiny_model_dir: Path, tmp_path: Path, start: Start) -> None:
    folder = write_tiny_llama(tmp_path / "draft")
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=r"has other tokens than the model: token \d+ is b'[ab]' in the one"):
        start(str(tiny_model_dir), speculating("draft_model", model=str(folder)), NoProgress())


@pytest.mark.usefixtures("_no_weights")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (speculating("early_exit", num_layers=2), "num_layers=2 must be below the model's 2 layers"),
        (speculating("draft_model", model="llama-9"), "no architecture is called 'llama-9'"),
        (speculating("draft_model", model="llama-3-8b"), "draft model has vocab_size=128256, the model 64"),
    ],
)
def test_random_weights_are_not_made_for_what_does_not_go_together(config: EngineConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_dummy_engine(MODEL_CONFIG, dataclasses.replace(config, load_format="dummy"), NoProgress())


def test_a_benchmark_takes_a_published_head(tiny_model_dir: Path, tmp_path: Path) -> None:
    speculative = SpeculativeConfig("medusa", 1, model=str(write_medusa_heads(tmp_path / "head", 1)))
    config = dataclasses.replace(CONFIG, max_num_seqs=1, max_num_batched_tokens=16, speculative_config=speculative)
    with few_programs("greedy"):
        engine = start_engine(str(tiny_model_dir), config, NoProgress())
    try:
        stats = engine.stats().speculative
        assert stats is not None
        assert stats.method == "medusa"
    finally:
        engine.shutdown()
