"""Disks that are full, or fill up on the way: one line, no folder; and room is asked for what will be stored."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.checkpoint import convert as convert_module
from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.export import export
from jaxserve.checkpoint.manifest import read_manifest
from jaxserve.checkpoint.quantize import quantization_step
from jaxserve.progress import NoProgress
from tests.checkpoint.files import edit_tensors
from tests.tiny_model import write_tiny_llama

GOLDENS = Path(__file__).parent.parent / "goldens"

# A command whose files may not grow beyond some bytes: the write fails in the middle, as on a full disk.
LIMITED = """
import resource, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from jaxserve.cli.main import main
main()
"""


def limited(limit: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", LIMITED, str(limit), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model at `source`, converted at `converted`: layers of 750 kB."""
    root = tmp_path_factory.mktemp("disk")
    write_tiny_llama(root / "source", hidden_size=256, intermediate_size=512, head_dim=32)
    convert(root / "source", root / "converted", progress=NoProgress())
    return root


@pytest.mark.skipif(sys.platform != "linux", reason="limits files as Linux does")
@pytest.mark.parametrize(("command", "source"), [("convert", "source"), ("export", "converted")])
def test_a_write_that_fails_is_one_line_and_no_folder(command: str, source: str, root: Path, tmp_path: Path) -> None:
    done = limited(600_000, command, str(root / source), str(tmp_path / "made"))
    assert (done.returncode, done.stdout) == (1, "")
    told = [line for line in done.stderr.splitlines() if not line.endswith("…") and ": done in " not in line]
    assert len(told) == 1, done.stderr
    assert told[0].startswith("jaxserve: error: cannot write ")
    assert "File too large" in told[0]
    assert not list(tmp_path.iterdir())


def test_a_disk_that_others_fill_meanwhile(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [10**12, 10**12, 10**12, 1000]  # before anything is read, and before each piece

    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=left.pop(0)))
    with pytest.raises(CheckpointError, match=r"no space.*0 MB free.*free some"):
        convert(root / "source", tmp_path / "made", progress=NoProgress())
    assert not left
    assert not list(tmp_path.iterdir())


def test_an_export_without_room(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"no space.*0 MB free.*free some"):
        export(root / "converted", tmp_path / "made", progress=NoProgress())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("", {}),
        ("", {"dtype": "bfloat16"}),
        ("tiny/phi3", {"step": quantization_step("fp8")}),
        ("quantized/fp8_weight_only", {}),
        ("quantized/w4a16_int4", {"dtype": "float32"}),
        ("quantized/w4a16_int4_phi3", {}),
    ],
)
def test_room_is_asked_for_what_will_be_stored(
    source: str, options: dict[str, Any], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(convert_module, "require_space", lambda folder, num_bytes, what: asked.append(num_bytes))
    monkeypatch.setattr(convert_module, "_ROOM_FOR_THE_REST", 0)
    folder = GOLDENS / source if source else root / "source"
    made = read_manifest(convert(folder, tmp_path / "made", progress=NoProgress(), **options))
    stored = sum(info.nbytes for info in made.arrays.values())
    assert stored <= asked[0] <= 1.03 * stored


def test_room_is_asked_for_what_parts_of_unlike_dtypes_become(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A float16 part and a bfloat16 one are stored in float32."""
    asked: list[int] = []
    monkeypatch.setattr(convert_module, "require_space", lambda folder, num_bytes, what: asked.append(num_bytes))
    monkeypatch.setattr(convert_module, "_ROOM_FOR_THE_REST", 0)
    source = write_tiny_llama(tmp_path / "source", attention_bias=True)
    edit_tensors(
        source,
        {
            name: value.astype(np.float16 if "k_proj" in name or "gate" in name else ml_dtypes.bfloat16)
            for name, value in load_file(source / "model.safetensors").items()
        },
    )
    made = read_manifest(convert(source, tmp_path / "made", progress=NoProgress()))
    stored = sum(info.nbytes for info in made.arrays.values())
    assert stored <= asked[0] <= 1.03 * stored


def test_what_is_there_already_needs_no_room(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(convert_module, "require_space", lambda folder, num_bytes, what: asked.append(num_bytes))
    monkeypatch.setattr(convert_module, "_ROOM_FOR_THE_REST", 0)
    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "write_manifest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(root / "source", tmp_path / "made", progress=NoProgress(), resume=True)
    asked.clear()
    convert(root / "source", tmp_path / "made", progress=NoProgress(), resume=True)
    assert asked[0] == 0
