"""Whether an engine over several devices gets memory to exchange sums through. Its kernels are tested on their own."""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax.numpy as jnp
import pytest

from jaxserve.config import ModelConfig
from jaxserve.engine import build
from jaxserve.models.presets import preset_config
from jaxserve.sharding.mesh import make_mesh

BFLOAT16 = jnp.dtype(jnp.bfloat16)


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "platform_of", lambda mesh: "gpu")


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_memory_is_for_the_model_and_the_steps(num_devices: int) -> None:
    config = preset_config("llama-3-70b")
    peers = build.peer_memory(config, make_mesh(jax.devices(), num_devices), BFLOAT16, 300)
    assert peers is not None
    assert peers.layout.ranks == num_devices
    assert peers.layout.max_rows == 300
    assert peers.layout.slot_bytes >= 4 * config.hidden_size  # float32 sums as well


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize(
    ("num_devices", "change", "dtype", "reason"),
    [
        (3, {}, "bfloat16", "no power of two"),
        (2, {}, "float32", "neither bfloat16 nor float16"),
        (2, {"hidden_size": 1000}, "bfloat16", "size=1000"),
    ],
)
def test_what_cannot_be_exchanged_so_is_said_once_and_left_to_nccl(
    num_devices: int, change: dict[str, int], dtype: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    config: ModelConfig = dataclasses.replace(preset_config("llama-3-8b"), **change)
    with caplog.at_level(logging.WARNING):
        peers = build.peer_memory(config, make_mesh(jax.devices(), num_devices), jnp.dtype(dtype), 64)
    assert peers is None
    assert reason in caplog.text


def test_other_devices_have_none() -> None:
    assert build.peer_memory(preset_config("llama-3-8b"), make_mesh(jax.devices(), 2), BFLOAT16, 64) is None
