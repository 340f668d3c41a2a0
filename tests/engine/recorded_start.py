"""Starts of an engine in a process of its own, which says what programs it has and how it came by them.

    python -m tests.engine.recorded_start FOLDER ORDER

FOLDER is where programs are kept. ORDER is which programs seem to take longer: "rising" or "falling" with their names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from jaxserve.config import EngineConfig
from jaxserve.engine import build, runner
from jaxserve.engine.device_batch import Bucket
from jaxserve.engine.executable_cache import ExecutableCache
from jaxserve.engine.program_choice import fastest_programs
from jaxserve.engine.runner import ModelRunner
from jaxserve.progress import NoProgress
from tests.tiny_engine import MODEL_CONFIG, random_params

MODEL = dataclasses.replace(MODEL_CONFIG, num_layers=1)
CONFIG = EngineConfig(max_model_len=32, max_num_seqs=1, max_num_batched_tokens=128, page_size=8, num_pages=4)


@dataclasses.dataclass
class RecordedStart:
    """What one start did.

    Attributes:
        files: what each program is kept as, by its name: a hash of all that decides what it is.
        lowered: hashes of what those programs were compiled from that were not there, by name.
        serving: whose program runs a bucket's steps, where that was chosen by measured times.
    """

    files: dict[str, str] = dataclasses.field(default_factory=dict)
    lowered: dict[str, str] = dataclasses.field(default_factory=dict)
    serving: dict[str, str] = dataclasses.field(default_factory=dict)


def recorded_start(folder: Path, order: str, *, layerwise: bool) -> RecordedStart:
    """
    Args:
        layerwise: as on a CPU; otherwise as on a GPU, where programs are timed too.
    """
    start = RecordedStart()

    class Recording(ExecutableCache):
        def load_or_compile(
            self, name: str, lower: Callable[[], jax.stages.Lowered], *, bucket: Bucket | None = None
        ) -> Any:
            def recorded() -> jax.stages.Lowered:
                lowered = lower()
                start.lowered[name] = hashlib.sha256(lowered.as_text().encode()).hexdigest()
                return lowered

            path = self._path(name)
            assert path is not None and name not in start.files
            start.files[name] = path.name
            return super().load_or_compile(name, recorded, bucket=bucket)

    def in_order(seconds: Callable[[str], float], names: Sequence[str]) -> dict[str, list[float]]:
        ordered = sorted(names, reverse=order == "falling")
        return {name: [1.0 + number] * 2 for number, name in enumerate(ordered)}

    def chosen(seconds: Mapping[Bucket, float]) -> dict[Bucket, Bucket]:
        serving = fastest_programs(seconds)
        start.serving = {str(bucket): str(other) for bucket, other in serving.items()}
        return serving

    def make_runner(*arguments: Any, **options: Any) -> ModelRunner:
        return ModelRunner(*arguments, **{**options, "layerwise": layerwise})

    with (
        mock.patch.object(runner, "ExecutableCache", Recording),
        mock.patch.object(runner, "times_in_rounds", in_order),
        mock.patch.object(runner, "fastest_programs", chosen),
        mock.patch.object(build, "ModelRunner", make_runner),
        mock.patch.object(build, "program_folder", return_value=folder),
    ):
        build.build_runner(MODEL, random_params(MODEL), CONFIG, NoProgress())
    return start


def main(folder: str, order: str) -> None:
    starts = {
        name: recorded_start(Path(folder), order, layerwise=layerwise)
        for name, layerwise in (("whole", False), ("layerwise", True))
    }
    print(json.dumps({name: dataclasses.asdict(start) for name, start in starts.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
