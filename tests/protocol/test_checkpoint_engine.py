"""From a converted folder to the weights that an engine is built with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Never

import jax
import numpy as np
import pytest

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.quantize import quantization_step
from jaxserve.checkpoint.store import load_checkpoint
from jaxserve.config import EngineConfig, ModelConfig, SpeculativeConfig
from jaxserve.engine.build import make_engine_mesh
from jaxserve.models.params import LlamaParams
from jaxserve.progress import NoProgress
from jaxserve.protocol.checkpoint_engine import load_draft, start_checkpoint_engine
from tests.tiny_engine import MODEL_CONFIG


@pytest.mark.parametrize("drafts", [False, True], ids=["served", "drafting"])
def test_quantizing_at_the_start_gives_what_converting_gives(
    drafts: bool, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From float32 weights, whatever the engine computes in."""
    given: list[LlamaParams] = []

    def build_engine(config: ModelConfig, params: LlamaParams, *others: object) -> Never:
        given.append(params)
        raise RuntimeError("built")

    monkeypatch.setattr("jaxserve.protocol.checkpoint_engine.build_engine", build_engine)
    dense = convert(tiny_model_dir, tmp_path / "dense", progress=NoProgress())
    config = EngineConfig(device="cpu", dtype="bfloat16")
    if drafts:
        speculative = SpeculativeConfig("draft_model", 2, model=str(dense), quantization="int8")
        config = dataclasses.replace(config, speculative_config=speculative)
        draft = load_draft(dense, config, MODEL_CONFIG, NoProgress(), make_engine_mesh(config))
        given.append(draft.params)
    else:
        with pytest.raises(RuntimeError, match="built"):
            start_checkpoint_engine(dense, None, dataclasses.replace(config, quantization="int8"), NoProgress())
    step = quantization_step("int8")
    folder = convert(tiny_model_dir, tmp_path / "quantized", step=step, progress=NoProgress())
    stored = load_checkpoint(folder, "bfloat16", NoProgress()).params
    assert jax.tree.structure(given[0]) == jax.tree.structure(stored)
    for one, other in zip(jax.tree.leaves(given[0]), jax.tree.leaves(stored), strict=True):
        np.testing.assert_array_equal(*(np.asarray(array).astype(np.float32) for array in (one, other)))
