"""Compiled programs on disk, so that a second start neither traces nor compiles.

JAX's own compilation cache saves the compiling but not the tracing, which for a deep model and a dozen batch shapes takes
longer than loading what came out of it. A file here is used only by the same source, versions, device and sizes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pickle
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jaxlib import version as jaxlib_version

from jaxserve.engine.device_batch import Bucket
from jaxserve.engine.program_choice import is_settled
from jaxserve.engine.program_times import ProgramTime

logger = logging.getLogger(__name__)

_UNUSED_SECONDS = 30 * 24 * 3600.0
_KEPT_ROUNDS = 3  # of what was measured, the quickest
_SOURCE_FOLDERS = ("engine", "kernels", "models", "sharding")


CompileOptions = dict[str, Any]


def compile_options(platform: str, bucket: Bucket | None = None) -> CompileOptions:
    """XLA's options for a program, beside what XLA_FLAGS says.

    Args:
        bucket: the step that it makes, if it is a forward pass.
    """
    if platform != "gpu":
        return {}
    # The KV cache is updated in place, but the pass that trades memory for work counts a new cache for each kernel that
    # writes to it. It then computes what all layers share anew for each layer: some 150 kernels a step.
    options: CompileOptions = {"xla_disable_hlo_passes": "rematerialization"}
    if bucket is not None and _num_tokens(bucket) > 1:
        # cuBLAS's kernels are as fast or faster there than Triton's, and of them its own first choice is as good as the one
        # that wins a quiet trial, but for a few sizes. While everything compiles at once trials disturb each other: they
        # take most of a minute of all cores, and what wins varies from start to start (steps of 8 sequences took 4.6 ms
        # after one start and 5.9 after another).
        options["xla_gpu_enable_triton_gemm"] = False
        if not needs_trials(bucket):
            options["xla_gpu_autotune_level"] = 0
    return options


def needs_trials(bucket: Bucket) -> bool:
    """Whether XLA is to try on the GPU which kernels suit a step's products: one such program at a time.

    cuBLAS's first choice costs steps of 128 tokens a fifth (a prompt of 128: 6.3 ms, after trials 5.1) and those of 192 four
    percent. For a single token the choice is between its kernels and Triton's.
    """
    return _num_tokens(bucket) in (1, 128, 192)


def _num_tokens(bucket: Bucket) -> int:
    return bucket.decode_tokens + bucket.prefill_tokens


class ExecutableCache:
    """Serialized programs in a folder that belongs to the user: like any program of theirs, its files are trusted.

    Args:
        folder: None: nothing is kept.
        devices: that the programs run on, which may be a part of what the machine has.
        context: whatever decides what the programs are, apart from source, versions, device and flags.

    Attributes:
        times: what each program that was asked for took.
    """

    def __init__(self, folder: Path | None, devices: Sequence[jax.Device], context: str) -> None:  # pyright: ignore[reportInvalidTypeForm]
        device = devices[0]
        self._folder = folder
        self._devices = tuple(devices)
        self._platform = device.platform
        self._trials = threading.Lock()
        self._lowering = threading.Lock()
        self.times: list[ProgramTime] = []
        self._context = "\n".join(
            [
                context,
                jax.__version__,
                jaxlib_version.__version__,
                device.device_kind,
                # XLA does not load what it compiled for some devices onto others: each replica has its own.
                " ".join(str(device.id) for device in devices),
                device.client.platform_version,
                os.environ.get("XLA_FLAGS", ""),
                _processor() if device.platform == "cpu" else "",
                _source_digest(),
            ]
        )

    def load_or_compile(
        self, name: str, lower: Callable[[], jax.stages.Lowered], *, bucket: Bucket | None = None
    ) -> Any:
        """The compiled program called `name`: from disk, or traced and compiled now and kept.

        Args:
            bucket: as in `compile_options`; another one wants another name.
        """
        path = self._path(name)
        started = time.perf_counter()
        if path is not None:
            loaded = _load(path, self._devices)
            if loaded is not None:
                self.times.append(ProgramTime(name, loaded=time.perf_counter() - started))
                return loaded
        # Python traces one program at a time in any case; while all threads take turns at it none of them compiles.
        with self._lowering:
            started = time.perf_counter()
            lowered = lower()
            traced = time.perf_counter() - started
        is_alone = self._platform == "gpu" and bucket is not None and needs_trials(bucket)
        with self._trials if is_alone else contextlib.nullcontext():
            started = time.perf_counter()
            compiled = lowered.compile(compiler_options=compile_options(self._platform, bucket))
        self.times.append(ProgramTime(name, traced=traced, compiled=time.perf_counter() - started))
        if path is not None:
            _store(path, compiled)
        return compiled

    def load_or_measure(
        self, name: str, parts: Sequence[str], measure: Callable[[Sequence[str]], Mapping[str, Sequence[float]]]
    ) -> dict[str, float]:
        """The least that each part took, at the first start with them, so that all starts decide alike by it.

        Parts whose rounds do not agree, since the machine was disturbed, are measured again at the next start.

        Args:
            measure: seconds that some of the parts take, several rounds of each.
        """
        path = self._path(name, "measured")
        rounds = {part: [] for part in parts} if path is None else _load_rounds(path, parts)
        unsettled = [part for part in parts if not is_settled(rounds[part])]
        if unsettled:
            for part, seconds in measure(unsettled).items():
                rounds[part] = sorted([*rounds[part], *seconds])[:_KEPT_ROUNDS]
            if path is not None:
                _write(path, json.dumps(rounds).encode())
        return {part: min(rounds[part]) for part in parts}

    def remove_unused(self) -> None:
        """Deletes programs that no start has used for a month: of older source, versions, sizes."""
        if self._folder is None or not self._folder.is_dir():
            return
        oldest = time.time() - _UNUSED_SECONDS
        for path in [*self._folder.glob("*.executable"), *self._folder.glob("*.measured")]:
            if path.stat().st_mtime < oldest:
                path.unlink(missing_ok=True)

    def _path(self, name: str, kind: str = "executable") -> Path | None:
        if self._folder is None:
            return None
        digest = hashlib.sha256(f"{self._context}\n{name}".encode()).hexdigest()
        return self._folder / f"{digest}.{kind}"


def _load_rounds(path: Path, parts: Sequence[str]) -> dict[str, list[float]]:
    """The seconds of each part that are kept there: none, if there are none for all of them."""
    try:
        found = json.loads(path.read_text())
        os.utime(path)
        return {part: [float(seconds) for seconds in found[part]] for part in parts}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, LookupError) as error:
        logger.warning("%s cannot be used and is measured anew: %s", path, error)
    return {part: [] for part in parts}


def _load(path: Path, devices: Sequence[jax.Device]) -> Any:  # pyright: ignore[reportInvalidTypeForm]
    try:
        data = path.read_bytes()
    except OSError:  # not there; or not to be read, which storing the new one will tell
        return None
    try:
        os.utime(path)
        return serialize_executable.deserialize_and_load(
            *pickle.loads(data), backend=devices[0].client, execution_devices=devices
        )
    except Exception as error:  # a cut file, or one that this build of XLA does not take: it is only a cache
        logger.warning("the compiled program in %s cannot be used and is made anew: %s", path, error)
        return None


def _store(path: Path, compiled: Any) -> None:
    try:
        data = pickle.dumps(serialize_executable.serialize(compiled))
    except (ValueError, NotImplementedError, pickle.PicklingError, jax.errors.JaxRuntimeError) as error:
        logger.warning("a compiled program could not be kept in %s; the next start compiles it again: %s", path, error)
        return
    _write(path, data)


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all; where it cannot be written the next start does without."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("what was compiled could not be kept in %s; the next start does it again: %s", path, error)


def _source_digest() -> str:
    """Changes whenever a line of what is compiled may have changed."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in _SOURCE_FOLDERS:
        for path in sorted((package / folder).glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    """What instructions a program for this CPU may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return "\n".join(sorted(wanted))
