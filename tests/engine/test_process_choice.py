"""Whether an engine gets a process of its own, told without asking jax for its devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.process_choice import has_own_process


@pytest.mark.parametrize(
    ("choice", "device", "platforms", "has_plugin", "expected"),
    [
        ("on", "cpu", "cpu", False, True),
        ("off", "gpu", "cuda", True, False),
        ("auto", "cpu", "cuda,cpu", True, False),
        ("auto", "gpu", "", False, True),
        ("auto", "auto", "cuda,cpu", False, True),
        ("auto", "auto", "cpu", True, False),
        ("auto", "auto", "", False, False),
        ("auto", "auto", "", True, True),
    ],
)
def test_auto_is_on_where_jax_would_find_more_than_a_cpu(
    choice: Any, device: Any, platforms: str, has_plugin: bool, expected: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ())
    if has_plugin:
        (tmp_path / "jax_plugins" / "xla_cuda13").mkdir(parents=True)
        (tmp_path / "jax_plugins" / "xla_cuda13" / "__init__.py").touch()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert has_own_process(choice, EngineConfig(device=device)) == expected


def test_a_plugin_that_says_so_of_itself_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: ["xla_cuda13"] if group == "jax_plugins" else []
    )
    assert has_own_process("auto", EngineConfig())
