"""Conversion as a process: killed and resumed, what it starts before its input is checked, its one line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.manifest import is_converted, read_manifest
from jaxserve.checkpoint.quantize import quantization_step
from jaxserve.checkpoint.unfinished import unfinished_path
from jaxserve.cli.main import build_app
from jaxserve.progress import NoProgress
from tests.checkpoint.files import edit_config, python, stored
from tests.tiny_model import write_tiny_llama

LAYERS = 6

# Converts, and kills itself once so many bytes of weights were read.
KILLED = """
import os, signal, sys
from contextlib import contextmanager
from jaxserve.checkpoint.convert import convert

class Killing:
    @contextmanager
    def task(self, description, total, unit):
        left = total * 0.6
        def advance(amount):
            nonlocal left
            left -= amount
            if description == "Converting weights" and left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        yield advance

convert(sys.argv[1], sys.argv[2], progress=Killing(), resume=sys.argv[3] == "resume")
"""


class RecordingProgress:
    def __init__(self) -> None:
        self.totals: dict[str, int | None] = {}

    @contextmanager
    def task(self, description: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        self.totals[description] = total
        yield lambda amount: None


def jaxserve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("from jaxserve.cli.main import main; main()", *arguments)


def command(*arguments: str) -> Result:
    """As `jaxserve`, in this process: most of what a short one takes is to import what is here already."""
    return CliRunner().invoke(build_app(), arguments)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "source", num_hidden_layers=LAYERS, vocab_size=260)


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a conversion of `source` left when it was killed half-way."""
    root = tmp_path_factory.mktemp("killed")
    source = write_tiny_llama(root / "source", num_hidden_layers=LAYERS, vocab_size=260)
    done = python(KILLED, str(source), str(root / "converted"), "resume")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (root / "converted").exists()
    return unfinished_path(root / "converted")


@pytest.fixture
def killed(source: Path, killed_once: Path, tmp_path: Path) -> Path:
    """The destination of a conversion that was killed half-way."""
    shutil.copytree(killed_once, unfinished_path(tmp_path / "converted"))
    return tmp_path / "converted"


def finished_pieces(destination: Path) -> set[str]:
    return set(json.loads((unfinished_path(destination) / "conversion.json").read_text())["finished"])


def assert_equal_folders(left: Path, right: Path) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), stored(left), stored(right))
    ours, theirs = read_manifest(left), read_manifest(right)
    assert (ours.arrays, ours.model_config, ours.source_files) == (
        theirs.arrays,
        theirs.model_config,
        theirs.source_files,
    )


def test_a_killed_conversion_is_resumed(source: Path, tmp_path: Path, killed: Path) -> None:
    assert not killed.exists()
    done = finished_pieces(killed)
    assert {"embedding", "layer_000"} <= done < {"embedding", "head", *(f"layer_{i:03d}" for i in range(LAYERS))}
    before = {path: path.stat().st_mtime_ns for path in (unfinished_path(killed) / "weights" / "layer_000").rglob("*")}
    progress = RecordingProgress()
    convert(source, killed, progress=progress, resume=True)
    convert(source, tmp_path / "fresh", progress=(whole := RecordingProgress()))
    assert (progress.totals["Converting weights"] or 0) < (whole.totals["Converting weights"] or 0)
    after = {path: path.stat().st_mtime_ns for path in (killed / "weights" / "layer_000").rglob("*")}
    assert sorted(after.values()) == sorted(before.values())  # renamed with its folder, not written again
    assert_equal_folders(killed, tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted", "fresh", "source"]
    assert not [path for path in killed.iterdir() if path.name.startswith("conversion")]


def test_half_a_piece_is_written_again(source: Path, killed: Path, tmp_path: Path) -> None:
    half = unfinished_path(killed) / "weights" / "layer_005"
    half.mkdir(exist_ok=True)
    (half / "manifest.ocdbt").write_bytes(b"half")
    convert(source, killed, progress=NoProgress(), resume=True)
    convert(source, tmp_path / "fresh", progress=NoProgress())
    assert_equal_folders(killed, tmp_path / "fresh")


@pytest.mark.parametrize("damage", ["removed", "cut"])
def test_a_finished_piece_that_is_no_longer_whole_is_written_again(
    source: Path, killed: Path, tmp_path: Path, damage: str
) -> None:
    piece = unfinished_path(killed) / "weights" / "layer_000"
    if damage == "removed":
        shutil.rmtree(piece)
    else:
        file = max((piece / "d").iterdir(), key=lambda path: path.stat().st_size)
        file.write_bytes(file.read_bytes()[:-9])
    convert(source, killed, progress=NoProgress(), resume=True)
    convert(source, tmp_path / "fresh", progress=NoProgress())
    assert_equal_folders(killed, tmp_path / "fresh")


@pytest.mark.parametrize("wrong", ["shape", "dtype", "name", "files", "piece", "elsewhere", "nothing"])
def test_what_is_called_finished_and_is_not_is_written_again(
    source: Path, killed: Path, tmp_path: Path, wrong: str
) -> None:
    path = unfinished_path(killed) / "conversion.json"
    state, weights = json.loads(path.read_text()), path.parent / "weights"
    arrays = state["finished"]["layer_000"]
    if wrong == "shape":
        arrays["w_down"]["shape"] = [1, 1]
    elif wrong == "dtype":
        arrays["w_down"]["dtype"] = "float16"
    elif wrong == "name":
        arrays["w_up"] = arrays.pop("w_down")
    elif wrong == "files":  # those of another piece
        shutil.rmtree(weights / "layer_000")
        shutil.copytree(weights / "embedding", weights / "layer_000")
        state["files"]["layer_000"] = state["files"]["embedding"]
    elif wrong == "piece":
        shutil.copytree(weights / "layer_000", weights / "layer_099")
        state["finished"]["layer_099"], state["files"]["layer_099"] = arrays, state["files"]["layer_000"]
    elif wrong == "elsewhere":
        (tmp_path / "mine").mkdir()
        state["finished"]["../../mine"], state["files"]["../../mine"] = {}, {}
    else:
        shutil.rmtree(weights / "layer_000")
        state["files"]["layer_000"] = {}
    path.write_text(json.dumps(state))
    convert(source, killed, progress=NoProgress(), resume=True)
    convert(source, tmp_path / "fresh", progress=NoProgress())
    assert_equal_folders(killed, tmp_path / "fresh")
    assert (tmp_path / "mine").exists() == (wrong == "elsewhere")


@pytest.mark.parametrize(
    "quantization", [None, "int4", *(pytest.param(name, marks=pytest.mark.long) for name in ("fp8", "int8"))]
)
def test_what_is_finished_is_not_written_again_however_it_is_quantized(
    source: Path, tmp_path: Path, quantization: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(RecordingProgress):
        @contextmanager
        def task(self, description: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
            left = 0.6 * (total or 0)

            def advance(amount: int) -> None:
                nonlocal left
                left -= amount
                if description == "Converting weights" and left < 0:
                    raise KeyboardInterrupt

            yield advance

    step = quantization_step(quantization)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "converted", progress=Failing(), resume=True, step=step)
    done = finished_pieces(tmp_path / "converted")
    assert len(done) > 2
    convert(source, tmp_path / "converted", progress=(resumed := RecordingProgress()), resume=True, step=step)
    convert(source, tmp_path / "fresh", progress=(whole := RecordingProgress()), step=step)
    assert (resumed.totals["Converting weights"] or 0) < (whole.totals["Converting weights"] or 0)
    assert not caplog.records


@pytest.mark.parametrize("state", ["", "[]", '{"finished": []}', '{"finished": {"layer_000": 5}}'])
def test_a_damaged_state_is_told_on_one_line(source: Path, killed: Path, state: str) -> None:
    path = unfinished_path(killed) / "conversion.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | json.loads(state)) if state.startswith("{") else state)
    with pytest.raises(CheckpointError, match=r"conversion\.json.*convert without --resume") as caught:
        convert(source, killed, progress=NoProgress(), resume=True)
    assert "\n" not in str(caught.value)
    assert not killed.exists()


def test_without_resume_it_starts_over_and_says_so(
    source: Path, killed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    progress = RecordingProgress()
    convert(source, killed, progress=progress)
    assert "starting over" in caplog.text
    assert "--resume" in caplog.text
    assert is_converted(killed)


def test_another_conversion_is_not_resumed(source: Path, killed: Path) -> None:
    with pytest.raises(CheckpointError, match=r"unfinished conversion of another model or with other options"):
        convert(source, killed, progress=NoProgress(), resume=True, dtype="bfloat16")
    edit_config(source, rope_theta=20000.0)
    with pytest.raises(CheckpointError, match=r"unfinished conversion of another model"):
        convert(source, killed, progress=NoProgress(), resume=True)
    assert {"embedding", "layer_000"} <= finished_pieces(killed)


def test_a_source_with_other_bytes_of_the_same_size_and_time_is_not_resumed(source: Path, killed: Path) -> None:
    weights = source / "model.safetensors"
    status = weights.stat()
    with weights.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(bytes(64))
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(CheckpointError, match=r"unfinished conversion of another model"):
        convert(source, killed, progress=NoProgress(), resume=True)


def test_two_at_once_are_told(source: Path, tmp_path: Path) -> None:
    class SecondOne:
        @contextmanager
        def task(self, description: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
            if description == "Converting weights":
                done = jaxserve("convert", str(source), str(tmp_path / "converted"))
                assert done.returncode == 1
                assert "another process is making" in done.stderr
            yield lambda amount: None

    convert(source, tmp_path / "converted", progress=SecondOne())
    assert is_converted(tmp_path / "converted")


def test_a_failure_leaves_nothing_but_what_resume_asks_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise CheckpointError("the disk is gone")

    monkeypatch.setattr("jaxserve.checkpoint.convert.write_manifest", fail)
    for resume, left in ((False, ["source"]), (True, [".converted.convert.partial", "source"])):
        with pytest.raises(CheckpointError, match="the disk is gone"):
            convert(source, tmp_path / "converted", progress=NoProgress(), resume=resume)
        assert sorted(path.name for path in tmp_path.iterdir()) == left


# --- before the input is known to be good


BACKEND = """
import sys
from jaxserve.checkpoint.convert import convert
from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.progress import NoProgress
from jax._src import xla_bridge
try:
    convert(sys.argv[1], sys.argv[2], progress=NoProgress())
except CheckpointError:
    print(xla_bridge.backends_are_initialized())
"""


def test_no_backend_is_started_for_a_bad_input(source: Path, tmp_path: Path) -> None:
    content = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(content[:-100])
    assert python(BACKEND, str(source), str(tmp_path / "converted")).stdout == "False\n"


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**12},
        {"vocab_size": 10**15},
        {"hidden_size": 2**62},
        {"num_attention_heads": 0},
        {"head_dim": -16},
    ],
    ids=str,
)
def test_numbers_of_a_config_cost_nothing(source: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    edit_config(source, **changes)
    with pytest.raises(CheckpointError, match="source") as caught:
        convert(source, tmp_path / "converted", progress=NoProgress())
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("size", [2**63, 2**40, 0, 7])
def test_a_header_that_claims_too_much(source: Path, tmp_path: Path, size: int) -> None:
    content = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(size.to_bytes(8, "little") + content[8:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        convert(source, tmp_path / "converted", progress=NoProgress())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


# --- the commands


def test_convert_inspect_export(source: Path, tmp_path: Path) -> None:
    (source / "model.onnx").write_bytes(b"x")
    (source / "README.md").write_text("words")
    done = jaxserve("convert", str(source), str(tmp_path / "converted"), "--dtype", "bfloat16")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'converted'}\n"), done.stderr
    assert "model.onnx" in done.stderr
    assert "README" not in done.stderr
    again = command("convert", str(source), str(tmp_path / "converted"))
    assert (again.exit_code, again.stdout) == (1, "")
    assert again.stderr == f"jaxserve: error: {tmp_path / 'converted'} exists: remove it or choose another folder\n"
    done = command("inspect", str(tmp_path / "converted"), "--tensor-parallel-size", "2")
    assert done.exit_code == 0, done.stderr
    assert "LlamaForCausalLM, converted, made from huggingface" in done.stdout
    assert "layer_*/wqkv  [64, 2, 4, 16] bfloat16  (6 times)" in done.stdout
    done = command("export", str(tmp_path / "converted"), str(tmp_path / "exported"))
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'exported'}\n"), done.stderr
    assert (tmp_path / "exported" / "model.safetensors").is_file()


def test_a_bad_input_is_one_line_and_no_folder(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    done = jaxserve("convert", str(source), str(tmp_path / "converted"))
    assert done.returncode == 1
    assert done.stderr.startswith("jaxserve: error: ")
    assert len(done.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
