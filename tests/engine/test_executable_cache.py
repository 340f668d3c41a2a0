"""Programs that one start compiled and the next one loads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.engine.build import program_folder
from jaxserve.engine.device_batch import Bucket
from jaxserve.engine.executable_cache import ExecutableCache, compile_options
from jaxserve.engine.program_times import program_table

pytestmark = pytest.mark.usefixtures("without_jax_cache")


class Program:
    """Doubles a vector on some of the machine's devices; counts how often it was traced."""

    def __init__(self, num_devices: int, first: int = 0) -> None:
        self.devices = jax.devices()[first : first + num_devices]
        self.sharding = NamedSharding(Mesh(np.asarray(self.devices), ("tp",)), PartitionSpec("tp"))
        self.traces = 0

    def lower(self) -> jax.stages.Lowered:
        self.traces += 1
        return jax.jit(lambda x: x * 2).lower(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=self.sharding))

    def start(self, folder: Path | None, context: str = "context", name: str = "double") -> Any:
        """What one start of an engine does."""
        programs = ExecutableCache(folder, self.devices, context)
        compiled = programs.load_or_compile(name, self.lower)
        programs.remove_unused()
        return compiled

    def check(self, compiled: Any) -> None:
        result = compiled(jax.device_put(np.arange(8, dtype=np.float32), self.sharding))
        assert result.sharding.device_set == set(self.devices)
        np.testing.assert_array_equal(np.asarray(result), 2 * np.arange(8))


def test_the_table_of_programs_tells_what_was_compiled_and_what_was_there(tmp_path: Path) -> None:
    program = Program(1)
    program.start(tmp_path, name="double")
    programs = ExecutableCache(tmp_path, program.devices, "context")
    for name in ("double", "double again"):
        programs.load_or_compile(name, program.lower)
    there, made = programs.times
    assert there.name == "double" and there.loaded > 0 and there.traced == there.compiled == 0
    assert made.name == "double again" and made.loaded == 0 and made.traced > 0 and made.compiled > 0
    head, columns, *rows, everything = program_table([there, made]).split("\n")
    assert (head, columns.split()) == ("programs, seconds:", ["loaded", "traced", "compiled"])
    cells = {row.split(maxsplit=3)[3]: row.split()[:3] for row in rows}
    assert cells["double"][1:] == ["-", "-"] and cells["double"][0] != "-"
    assert cells["double again"][0] == "-" and "-" not in cells["double again"][1:]
    assert everything.endswith("all 2, many at once")


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_a_second_start_loads_for_the_devices_in_use(tmp_path: Path, num_devices: int) -> None:
    program = Program(num_devices)
    for _ in range(2):
        program.check(program.start(tmp_path))
    assert program.traces == 1


def test_replicas_on_other_devices_keep_programs_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for start in range(2):
        for first in (0, 2):
            program = Program(2, first)
            program.check(program.start(tmp_path))
            assert program.traces == (start == 0)
    assert not caplog.records


def test_another_context_or_name_compiles_anew(tmp_path: Path) -> None:
    program = Program(1)
    for context, name in (("a", "one"), ("b", "one"), ("a", "two")):
        program.check(program.start(tmp_path, context, name))
    assert program.traces == 3


def test_programs_are_kept_in_one_of_two_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_jax_cache: str
) -> None:
    monkeypatch.setenv("JAXSERVE_HOME", str(tmp_path))
    assert program_folder() == tmp_path / "compiled"
    jax.config.update("jax_compilation_cache_dir", without_jax_cache)
    assert program_folder() is None


def test_a_damaged_file_is_told_and_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = Program(1)
    program.start(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    program.check(program.start(tmp_path))
    assert f"{file} cannot be used" in caplog.text
    program.check(program.start(tmp_path))
    assert program.traces == 2


def test_without_a_folder_nothing_is_kept() -> None:
    program = Program(1)
    for _ in range(2):
        program.check(program.start(None))
    assert program.traces == 2


def test_other_flags_compile_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(1)
    program.start(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true " + os.environ.get("XLA_FLAGS", ""))
    program.start(tmp_path)
    assert program.traces == 2


def test_a_folder_that_cannot_be_is_told_and_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = Program(1)
    in_the_way = tmp_path / "file"
    in_the_way.write_text("no folder")
    program.check(program.start(in_the_way / "folder"))
    assert "could not be kept" in caplog.text


def test_programs_that_no_start_used_for_a_month_are_removed(tmp_path: Path) -> None:
    program = Program(1)
    program.start(tmp_path, name="old")
    (old,) = tmp_path.iterdir()
    long_ago = time.time() - 31 * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    program.start(tmp_path, name="new")
    assert not old.exists()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_gpus_programs_take_cublas_for_more_than_one_token_and_nothing_is_asked_of_a_cpu():
    assert compile_options("cpu", Bucket(8, 4, 64)) == {}
    one, decode, mixed = (
        compile_options("gpu", bucket) for bucket in (Bucket(1, 0, 0), Bucket(8, 0, 0), Bucket(8, 4, 64))
    )
    assert all(options["xla_disable_hlo_passes"] == "rematerialization" for options in (one, decode, mixed))
    assert "xla_gpu_enable_triton_gemm" not in one
    for options in (decode, mixed):
        assert not options["xla_gpu_enable_triton_gemm"]
        assert options["xla_gpu_autotune_level"] == 0
    for tried in (Bucket(64, 4, 64), Bucket(0, 4, 128), Bucket(32, 0, 0, 3), Bucket(64, 4, 128)):
        options = compile_options("gpu", tried)
        assert not options["xla_gpu_enable_triton_gemm"]
        assert "xla_gpu_autotune_level" not in options


def test_programs_whose_products_are_tried_compile_one_at_a_time_beside_the_others() -> None:
    programs = ExecutableCache(None, [_Device("gpu")], "context")  # pyright: ignore[reportArgumentType]
    tried, others = (Bucket(1, 0, 0), Bucket(0, 4, 128)), (Bucket(8, 0, 0), Bucket(16, 0, 0))
    lowered = _Lowered()
    with ThreadPoolExecutor(4) as pool:
        compiling = [
            pool.submit(programs.load_or_compile, "name", lambda: lowered, bucket=bucket)  # pyright: ignore[reportArgumentType]
            for bucket in (*tried, *others)
        ]
        begun = [lowered.begun.acquire(timeout=timeout) for timeout in (60, 60, 60, 0.1)]
        lowered.may_end.set()
        assert begun == [True, True, True, False]
        assert [future.result() for future in compiling] == ["compiled"] * 4


@dataclass(frozen=True)
class _Device:
    platform: str
    device_kind: str = "kind"
    id: int = 0

    @property
    def client(self) -> SimpleNamespace:
        return SimpleNamespace(platform_version="version")


class _Lowered:
    """A program whose compiling tells that it has begun, and ends when it may."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()

    def compile(self, compiler_options: dict[str, Any]) -> str:
        assert compiler_options
        self.begun.release()
        self.may_end.wait()
        return "compiled"


@dataclass
class Machine:
    """On which parts take the seconds that are told, one after the other: the rounds of each."""

    folder: Path | None
    seconds: dict[str, list[list[float]]]
    asked: list[list[str]] = field(default_factory=list)

    def start(self, name: str = "steps") -> dict[str, float]:
        """What a start goes by."""
        cache = ExecutableCache(self.folder, jax.devices()[:1], "context")
        return cache.load_or_measure(name, tuple(self.seconds), self._measure)

    def _measure(self, parts: Sequence[str]) -> dict[str, list[float]]:
        self.asked.append(list(parts))
        return {part: self.seconds[part].pop(0) for part in parts}


def test_what_an_undisturbed_start_measured_holds_for_the_next_ones(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"small": [[1.55, 1.5, 9.0], [1.0]], "large": [[2.0, 2.05, 2.1], [1.0]]})
    assert machine.start() == machine.start() == {"small": 1.5, "large": 2.0}
    assert machine.asked == [["small", "large"]]
    assert machine.start("others") == {"small": 1.0, "large": 1.0}
    nowhere = Machine(None, {"small": [[1.5, 1.5], [1.6, 1.6]]})
    assert [nowhere.start(), nowhere.start()] == [{"small": 1.5}, {"small": 1.6}]


def test_what_a_disturbed_start_measured_is_measured_again(tmp_path: Path) -> None:
    machine = Machine(
        tmp_path, {"small": [[1.5, 1.5, 1.5], []], "large": [[4.0, 3.0, 2.5], [8.0, 2.3, 9.0], [2.0, 2.0, 2.0], []]}
    )
    chosen_by = [machine.start()["large"] for _ in range(5)]
    assert chosen_by == [2.5, 2.3, 2.0, 2.0, 2.0]
    assert machine.asked == [["small", "large"], ["large"], ["large"]], (
        "what agrees is kept, and the rest until it does"
    )
    assert machine.start() == {"small": 1.5, "large": 2.0}


def test_damaged_measurements_are_measured_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    damages = (
        '["cut',
        "[1]",
        '{"small": [1.5, 1.5]}',
        '{"small": [1.5, 1.5], "large": ["?"]}',
        '{"small": 1, "large": 2}',
    )
    machine = Machine(tmp_path, {part: [[seconds] * 2] * 6 for part, seconds in (("small", 1.5), ("large", 2.0))})
    for damaged in damages:
        for path in tmp_path.glob("*.measured"):
            path.write_text(damaged)
        caplog.clear()
        assert machine.start() == {"small": 1.5, "large": 2.0}
        assert ("is measured anew" in caplog.text) == (len(machine.asked) > 1)
    assert len(machine.asked) == len(damages)
