"""Several configurations at the same loads, each in a process of its own, into one folder that can be resumed."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxserve.bench.endpoint_url import split_url
from jaxserve.bench.failures import Failure, exit_reason, forget_failure, write_failure
from jaxserve.bench.json_files import read_json
from jaxserve.bench.process_group import run_in_group
from jaxserve.bench.records import Load, failed_requests
from jaxserve.bench.results import held_alone, is_done, read_summary
from jaxserve.json_fields import from_json

_THREADS_PER_DEVICE = 4
_LOAD_FLAGS = ("--concurrency", "--request-rate", "--trace-speed", "--timeout")


@dataclass(frozen=True)
class Configuration:
    """One thing to be measured.

    Attributes:
        name: what charts call it.
        arguments: of `jaxserve bench run`, beside those of the loads.
        num_devices: that it runs on, as far as this process is to provide them.
        over_http: only; its loads then lie in a folder of that run's own.
    """

    name: str
    arguments: tuple[str, ...]
    num_devices: int = 1
    over_http: bool = False

    @property
    def folder_name(self) -> str:
        return re.sub(r"[^A-Za-z0-9.-]+", "-", self.name).strip("-").lower()

    def figures_in(self, folder: Path) -> Path:
        """Where the loads' figures lie in the folder of a sweep."""
        runs = self.runs_in(folder)
        return runs / "http" if self.over_http else runs

    def runs_in(self, folder: Path) -> Path:
        """What its run is told to write to, in the folder of a sweep."""
        return folder / "runs" / self.folder_name


def plan(
    models: Sequence[str],
    *,
    tensor_parallel_sizes: Sequence[int],
    data_parallel_sizes: Sequence[int],
    speculative_configs: Sequence[str],
    static_batching: bool,
    endpoints: Sequence[str],
    engine_arguments: Sequence[str] = (),
    endpoint_arguments: Sequence[str] = (),
    synthetic_acceptance: float | None = None,
    most_devices: int | None = None,
    over_http: bool = False,
) -> list[Configuration]:
    """Every combination of the engine's settings, plain and speculating; static batching with the first of them; and each
    endpoint as a competitor.

    Args:
        engine_arguments: what all engines have in common, and endpoints do not.
        endpoint_arguments: how endpoints are asked.
        synthetic_acceptance: probability that those that speculate keep a draft, whatever it is.
        most_devices: combinations that need more are left out.
        over_http: measure the engines over HTTP only.

    Raises:
        ValueError: there is nothing to measure, two would have the same name, an endpoint's URL is none, or an acceptance is
            given for nobody.
    """
    for url in endpoints:
        split_url(url)
    if synthetic_acceptance is not None and not speculative_configs:
        raise ValueError(
            "--speculative-synthetic-acceptance says something of --speculative-config only: give that too"
        )
    found: list[Configuration] = []
    for model, tensor, data in itertools.product(models, tensor_parallel_sizes, data_parallel_sizes):
        if most_devices is not None and tensor * data > most_devices:
            continue
        prefix = f"{Path(model).stem} " if len(models) > 1 else ""
        name = prefix + f"TP{tensor}" + (f" x DP{data}" if data > 1 else "")
        arguments = (model, "--tensor-parallel-size", str(tensor), *engine_arguments)
        if data > 1:
            arguments += ("--data-parallel-size", str(data))
        found.append(Configuration(name, arguments, tensor * data))
        for number, speculation in enumerate(speculative_configs, start=1):
            suffix = f" speculation{f' {number}' if len(speculative_configs) > 1 else ''}"
            speculating = (*arguments, "--speculative-config", speculation)
            if synthetic_acceptance is not None:
                speculating += ("--speculative-synthetic-acceptance", str(synthetic_acceptance))
            found.append(Configuration(name + suffix, speculating, tensor * data))
    if static_batching and found:
        first = found[0]
        found.append(Configuration(f"{first.name} static", (*first.arguments, "--static-batching"), first.num_devices))
    if over_http:
        found = [replace(each, arguments=(*each.arguments, "--http"), over_http=True) for each in found]
    found += [Configuration(_endpoint_name(url), ("--endpoint", url, *endpoint_arguments)) for url in endpoints]
    if not found:
        raise ValueError("nothing to measure: give --model or --endpoint, and --max-devices that some combination fits")
    names = [configuration.folder_name for configuration in found]
    if len(set(names)) < len(names):
        raise ValueError(f"two configurations have the same name: {sorted(names)}")
    return found


def _endpoint_name(url: str) -> str:
    return re.sub(r"^https?://", "", url).rstrip("/").removesuffix("/v1")


@dataclass(frozen=True)
class Outcome:
    """What a sweep did not do.

    Attributes:
        failed: names of the configurations that failed; what they said is on stderr, and why in their folders.
        unfinished: of those that there was no time for, or not enough.
    """

    failed: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()


def run_sweep(
    configurations: Sequence[Configuration],
    loads: Sequence[Load],
    arguments: Sequence[str],
    folder: Path,
    tell: Callable[[str], None],
    *,
    seconds: float | None = None,
) -> Outcome:
    """Measures what is not done yet.

    Args:
        arguments: of `jaxserve bench run`, the same for all: loads, workload and the like.
        seconds: after which what runs is ended, with the loads that it has done, and nothing more begun; None: never.

    Raises:
        ValueError: what is done in the folder was measured with other arguments.
        RuntimeError: another sweep is writing into it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with held_alone(folder):
        _write_plan(folder, configurations, arguments)
        return _run(configurations, loads, arguments, folder, tell, seconds)


def failed_of_sweep(configurations: Sequence[Configuration], loads: Sequence[Load], folder: Path) -> str:
    """How many requests failed of what a sweep was asked for, as `failed_requests` tells it.

    Raises:
        ValueError: a file is not what was written there.
    """
    return failed_requests(
        {
            each.name: [found for load in loads if (found := read_summary(each.figures_in(folder), load)) is not None]
            for each in configurations
        }
    )


def _run(
    configurations: Sequence[Configuration],
    loads: Sequence[Load],
    arguments: Sequence[str],
    folder: Path,
    tell: Callable[[str], None],
    seconds: float | None,
) -> Outcome:
    deadline = None if seconds is None else time.monotonic() + seconds
    failed, unfinished = [], []
    for number, configuration in enumerate(configurations, start=1):
        runs = configuration.runs_in(folder)
        if all(is_done(configuration.figures_in(folder), load) for load in loads):
            tell(f"{configuration.name}: done before")
            continue
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            unfinished.append(configuration.name)
            continue
        tell(f"{configuration.name} ({number} of {len(configurations)})")
        command = [sys.executable, "-m", "jaxserve", "bench", "run", *configuration.arguments, *arguments]
        forget_failure(runs)
        try:
            code, reason = _measure(command, configuration, runs, left)
        except subprocess.TimeoutExpired:
            unfinished.append(configuration.name)
            tell(f"{configuration.name}: ended after {left:.0f} s, since time was up")
            continue
        if code:
            failed.append(configuration.name)
            write_failure(runs, Failure(configuration.name, reason))
            tell(f"{configuration.name}: failed with exit code {code}")
    return Outcome(tuple(failed), tuple(unfinished))


def _measure(command: list[str], configuration: Configuration, runs: Path, timeout: float | None) -> tuple[int, str]:
    """Runs `bench run`; its exit code, and why it failed where it did.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "failure"  # and not its stderr, which stays the terminal's
        told = ["--failure-file", str(path), "--name", configuration.name, "--output", str(runs)]
        code = run_in_group(
            [*command, *told], environment=environment_for(configuration), timeout=timeout, stdout=subprocess.DEVNULL
        )
        return code, path.read_text() if path.is_file() else exit_reason(code)


@dataclass(frozen=True)
class _Plan:
    """What the folder's sweep.json holds.

    Attributes:
        configurations: arguments of each by its name.
    """

    configurations: dict[str, list[str]]

    @staticmethod
    def from_json(data: dict[str, Any]) -> _Plan:
        return from_json(_Plan, data, ignore_unknown=True)


def _write_plan(folder: Path, configurations: Sequence[Configuration], arguments: Sequence[str]) -> None:
    """Notes what is measured. Loads may be added later; whatever else changed, figures of both would be mixed up."""
    path = folder / "sweep.json"
    kept = read_json(path, _Plan.from_json).configurations if path.is_file() else {}
    fixed = _without_loads(arguments)
    plans = {each.name: [*each.arguments, *fixed] for each in configurations}
    for each in configurations:
        was = kept.get(each.name, plans[each.name])
        if was != plans[each.name] and any(each.runs_in(folder).rglob("*.summary.json")):
            raise ValueError(
                f"{folder} holds figures of {each.name} that were measured with {shlex.join(was)}, not "
                f"{shlex.join(plans[each.name])}: give another --output"
            )
    path.write_text(json.dumps({"configurations": {**kept, **plans}, "arguments": list(arguments)}, indent=1))


def _without_loads(arguments: Sequence[str]) -> list[str]:
    """Of flags with a value each, those that figures depend on."""
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    return [part for flag, value in pairs if flag not in _LOAD_FLAGS for part in (flag, value)]


def environment_for(configuration: Configuration) -> dict[str, str]:
    """As here, with as many CPU devices, and threads for them, as the configuration needs where jax uses the CPU."""
    environment = dict(os.environ)
    flags = environment.get("XLA_FLAGS", "")
    on_cpu = environment.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"
    if configuration.num_devices == 1 or not on_cpu:
        return environment
    if "xla_force_host_platform_device_count" not in flags:
        flag = f"--xla_force_host_platform_device_count={configuration.num_devices}"
        environment["XLA_FLAGS"] = f"{flags} {flag}".strip()
    # XLA's threads on a CPU are as many as this says, or cores. Devices block them while they wait for each other's
    # sums: with three devices on two cores none was left for the one that was waited for.
    environment.setdefault("NPROC", str(_THREADS_PER_DEVICE * configuration.num_devices))
    return environment
