"""Two starts of one configuration have the same programs, whatever differs between processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.recorded_start import RecordedStart

Starts = dict[str, RecordedStart]


def begin(folder: Path, order: str, hash_seed: int) -> subprocess.Popen[str]:
    """A process of its own order of sets, whose programs are kept in this folder alone."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_COMPILATION_", "JAX_PERSISTENT_"))
    }
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-m", "tests.engine.recorded_start", str(folder), order]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=root)


def end(process: subprocess.Popen[str]) -> Starts:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return {name: RecordedStart(**start) for name, start in json.loads(output).items()}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Starts, Starts, Starts]:
    """Two without any programs, each in a folder of its own; and one more in the folder of the first."""
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    processes = [begin(folders[0], "rising", 1), begin(folders[1], "falling", 2)]
    first, second = map(end, processes)
    return first, second, end(begin(folders[0], "falling", 3))


def test_cold_starts_compile_the_same(starts: tuple[Starts, Starts, Starts]) -> None:
    first, second, _ = starts
    assert first["whole"].lowered == second["whole"].lowered
    assert first["whole"].files == second["whole"].files
    assert first["whole"].lowered.keys() == first["whole"].files.keys()
    # Layer by layer there are other programs, but for those that have nothing to do with layers.
    assert first["layerwise"].lowered == second["layerwise"].lowered
    assert first["layerwise"].files == second["layerwise"].files
    assert first["layerwise"].lowered.keys() == first["layerwise"].files.keys() - first["whole"].files.keys()
    files = {**first["whole"].files, **first["layerwise"].files}
    assert len(set(files.values())) == len(files) > 12


def test_a_warm_start_compiles_nothing(starts: tuple[Starts, Starts, Starts]) -> None:
    first, _, warm = starts
    for executor in ("whole", "layerwise"):
        assert warm[executor].files == first[executor].files
        assert not warm[executor].lowered


def test_a_warm_start_chooses_by_what_the_first_one_measured(starts: tuple[Starts, Starts, Starts]) -> None:
    """Although its own clock would tell it otherwise, as another first start's did."""
    first, second, warm = (start["whole"].serving for start in starts)
    assert first == warm != second
    assert any(bucket != other for bucket, other in first.items())
