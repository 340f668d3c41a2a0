"""Several configurations at the same loads, each in a process of its own, into one folder that can be resumed."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.bench.records import Load
from jaxserve.bench.results import is_done


@dataclass(frozen=True)
class Configuration:
    """One thing to be measured.

    Attributes:
        name: what charts call it.
        arguments: of `jaxserve bench run`, beside those of the loads.
        num_devices: that it runs on, as far as this process is to provide them.
    """

    name: str
    arguments: tuple[str, ...]
    num_devices: int = 1

    @property
    def folder_name(self) -> str:
        return re.sub(r"[^A-Za-z0-9.-]+", "-", self.name).strip("-").lower()


def plan(
    models: Sequence[str],
    *,
    tensor_parallel_sizes: Sequence[int],
    data_parallel_sizes: Sequence[int],
    speculative_configs: Sequence[str],
    static_batching: bool,
    endpoints: Sequence[str],
    synthetic_acceptance: float | None = None,
) -> list[Configuration]:
    """Every combination of the engine's settings, plain and speculating; static batching with the first of them; and each
    endpoint as a competitor.

    Args:
        synthetic_acceptance: probability that those that speculate keep a draft, whatever it is.

    Raises:
        ValueError: there is nothing to measure, two would have the same name, or an acceptance is given for nobody.
    """
    if synthetic_acceptance is not None and not speculative_configs:
        raise ValueError(
            "--speculative-synthetic-acceptance says something of --speculative-config only: give that too"
        )
    found: list[Configuration] = []
    for model, tensor, data in itertools.product(models, tensor_parallel_sizes, data_parallel_sizes):
        prefix = f"{Path(model).stem} " if len(models) > 1 else ""
        name = prefix + f"TP{tensor}" + (f" x DP{data}" if data > 1 else "")
        arguments = (model, "--tensor-parallel-size", str(tensor))
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
    found += [Configuration(_endpoint_name(url), ("--endpoint", url)) for url in endpoints]
    if not found:
        raise ValueError("nothing to measure: give --model or --endpoint")
    names = [configuration.folder_name for configuration in found]
    if len(set(names)) < len(names):
        raise ValueError(f"two configurations have the same name: {sorted(names)}")
    return found


def _endpoint_name(url: str) -> str:
    return re.sub(r"^https?://", "", url).rstrip("/").removesuffix("/v1")


def run_sweep(
    configurations: Sequence[Configuration],
    loads: Sequence[Load],
    arguments: Sequence[str],
    folder: Path,
    tell: Callable[[str], None],
) -> list[str]:
    """Measures what is not done yet.

    Args:
        arguments: of `jaxserve bench run`, the same for all: loads, workload and the like.

    Returns:
        Names of the configurations that failed; what they said is on stderr.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [configuration.name for configuration in configurations]
    (folder / "sweep.json").write_text(json.dumps({"configurations": names, "arguments": list(arguments)}, indent=1))
    failed = []
    for number, configuration in enumerate(configurations, start=1):
        runs = folder / "runs" / configuration.folder_name
        if all(is_done(runs, load) for load in loads):
            tell(f"{configuration.name}: done before")
            continue
        tell(f"{configuration.name} ({number} of {len(configurations)})")
        command = [sys.executable, "-m", "jaxserve", "bench", "run", *configuration.arguments, *arguments]
        command += ["--name", configuration.name, "--output", str(runs)]
        done = subprocess.run(command, env=environment_for(configuration), stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            failed.append(configuration.name)
            tell(f"{configuration.name}: failed with exit code {done.returncode}")
    return failed


def environment_for(configuration: Configuration) -> dict[str, str]:
    """As here, with as many CPU devices as the configuration needs where jax is told to use the CPU."""
    environment = dict(os.environ)
    flags = environment.get("XLA_FLAGS", "")
    on_cpu = environment.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"
    if configuration.num_devices > 1 and on_cpu and "xla_force_host_platform_device_count" not in flags:
        flag = f"--xla_force_host_platform_device_count={configuration.num_devices}"
        environment["XLA_FLAGS"] = f"{flags} {flag}".strip()
    return environment
