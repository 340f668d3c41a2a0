"""Times the sum over devices between two products of a decode step, on two cards or more: microseconds a call.

    python scripts/bench_all_reduce.py --output DIR

A program is a chain of products with a square weight matrix, each followed by the sum over devices, the residual add and
the norm. Two lengths of it are timed, each launched several times ahead as the engine does; their difference, divided by
the difference in calls, leaves out what a program costs once. `local` is the same chain without the sum over devices:
what another variant takes more is what the sum costs. Each group of variants runs in a process of its own, so that none
can take the others' figures along, and must be right before it is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.bench.process_group import run_in_group
from jaxserve.bench.profile import traced_kernels
from jaxserve.kernels.add_rms_norm import add_rms_norm
from jaxserve.kernels.all_reduce_add_rms_norm import all_reduce_add_rms_norm
from jaxserve.kernels.peer_memory import PeerLayout, PeerMemory, make_peer_memory

AXIS = "tp"
EPS = 1e-5
CALLS = (8, 72)
LAUNCHES = 8  # of a program, ahead of each other
REPETITIONS = 5
TOTAL_SECONDS = 230.0
HANG_SECONDS = 30.0  # that no case takes, nor a case and the end of its process

Case = tuple[str, int]  # variant and rows
CUT, WHOLE = PartitionSpec(AXIS), PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to do it.

    Attributes:
        is_wide: the product's float32 result is summed, not its rounding to bfloat16.
        xla_flags: for its process.
    """

    is_wide: bool = False
    xla_flags: str = ""


VARIANTS = {
    "local": Variant(),
    "nccl": Variant(),
    "peers": Variant(),
    "peers_float32": Variant(is_wide=True),
    "peers_no_graph": Variant(xla_flags="--xla_gpu_enable_command_buffer="),
    "nccl_in_graph": Variant(xla_flags="--xla_gpu_enable_command_buffer=+COLLECTIVES"),
}
GROUPS = (("local", "nccl"), ("peers", "peers_float32"), ("peers_no_graph",), ("nccl_in_graph",))


@dataclasses.dataclass(frozen=True)
class Inputs:
    x: jax.Array  # [rows, size], the same on all devices
    weights: jax.Array  # [ranks, size, size]
    norm: jax.Array  # [size]


def reduce_step(
    name: str, x: jax.Array, update: jax.Array, norm: jax.Array, peers: PeerMemory
) -> tuple[jax.Array, jax.Array]:
    if name == "local":
        return add_rms_norm(x, update, norm, EPS)
    memory, implementation = (peers, "mosaic_gpu") if name.startswith("peers") else (None, None)
    if jax.default_backend() == "cpu":
        implementation = "xla"
    total, normed = all_reduce_add_rms_norm(
        x,
        update,
        norm,
        EPS,
        axis=AXIS,
        peers=memory,
        implementation=implementation,  # pyright: ignore[reportArgumentType]
    )
    return total, cast("jax.Array", normed)  # it was not asked for in float8


def chain(name: str, mesh: Mesh, calls: int) -> Callable[..., jax.Array]:
    """(x, weights, norm, peers) -> every device's residual stream after so many calls, [ranks, rows, size]."""

    def per_device(x: jax.Array, weights: jax.Array, norm: jax.Array, peers: PeerMemory) -> jax.Array:
        # XLA has the devices wait for each other before a program with a collective of its own: without one, a device
        # might still load its kernels while another's first kernel waits for it.
        x = x + lax.psum(weights[0, 0, 0] * 0, AXIS)
        normed = x
        for _ in range(calls):
            if VARIANTS[name].is_wide:
                update = jnp.dot(normed, weights[0], preferred_element_type=jnp.float32)[None]
            else:
                update = normed @ weights[0]
            x, normed = reduce_step(name, x, update, norm, peers)
        return x[None]

    return jax.shard_map(per_device, mesh=mesh, in_specs=(WHOLE, CUT, WHOLE, CUT), out_specs=CUT, check_vma=False)


def compile_chain(name: str, mesh: Mesh, calls: int, inputs: Inputs, peers: PeerMemory) -> Callable[[], jax.Array]:
    arguments = (inputs.x, inputs.weights, inputs.norm, peers)
    lowered = jax.jit(chain(name, mesh, calls)).lower(*arguments)
    # The same product for all variants, whatever a trial would have chosen, and no kernels that pad few rows to eight.
    options = {
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_autotune_level": 0,
        "xla_disable_hlo_passes": "cublas-pad-for-gemms",
    }
    compiled = lowered.compile(compiler_options=options if jax.default_backend() == "gpu" else None)
    return functools.partial(compiled, *arguments)


def make_inputs(mesh: Mesh, rows: list[int], size: int) -> dict[int, Inputs]:
    """By the number of rows; all share their weights."""

    def make_weights() -> jax.Array:
        keys = jax.random.split(jax.random.key(1), mesh.size)
        values = jax.vmap(lambda key: jax.random.normal(key, (size, size), jnp.bfloat16))(keys)
        return values * jnp.bfloat16(size**-0.5)

    weights = jax.jit(make_weights, out_shardings=NamedSharding(mesh, CUT))()
    norm = jax.device_put(np.ones(size, jnp.bfloat16), NamedSharding(mesh, WHOLE))
    rng = np.random.default_rng(0)
    return {
        count: Inputs(
            x=jax.device_put(rng.standard_normal((count, size)).astype(jnp.bfloat16), NamedSharding(mesh, WHOLE)),
            weights=weights,
            norm=norm,
        )
        for count in rows
    }


def summed_weights(inputs: Inputs) -> dict[bool, np.ndarray]:
    """On the host in float32, for `error_of`: those of the first device, and (True) the sum of all devices'."""
    first, *others = (np.asarray(shard.data[0], np.float32) for shard in inputs.weights.addressable_shards)
    return {False: first, True: sum(others, start=first)}


def error_of(name: str, inputs: Inputs, summed: dict[bool, np.ndarray], results: jax.Array, calls: int) -> float:
    """Largest difference from the same chain in float32 on the host, relative to the largest value.

    Args:
        summed: of `summed_weights`, which takes seconds where there are many devices.

    Raises:
        ValueError: the devices' results differ.
    """
    got = np.asarray(results, np.float32)  # [ranks, rows, size]
    if name != "local" and not all(np.array_equal(got[0], other) for other in got[1:]):
        raise ValueError(f"{name}: the devices' results differ by up to {np.abs(got - got[:1]).max()}")
    x = np.asarray(inputs.x, np.float32)
    product = summed[name != "local"]
    normed = x
    for _ in range(calls):
        x = x + normed @ product
        normed = x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + EPS)
    return float(np.abs(got[0] - x).max() / np.abs(x).max())


def time_program(program: Callable[[], jax.Array]) -> float:
    """Median seconds of one run of several that were launched ahead."""
    times = []
    for _ in range(REPETITIONS + 1):
        start = time.perf_counter()
        results = [program() for _ in range(LAUNCHES)]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) / LAUNCHES)
    return float(np.median(times[1:]))


def profile_kernels(program: Callable[[], jax.Array]) -> list[dict[str, Any]]:
    """Kernels of one device by their time: name, how many in a run, median and least microseconds of one."""
    runs = 2
    durations: dict[str, list[float]] = defaultdict(list)
    for event in traced_kernels(lambda: jax.block_until_ready([program() for _ in range(runs)])):
        durations[event.name].append(event.duration * 1e6)
    longest = sorted(durations.items(), key=lambda item: -sum(item[1]))[:6]
    return [
        {"kernel": name[:60], "count": len(all_of) / runs, "median_us": float(np.median(all_of)), "min_us": min(all_of)}
        for name, all_of in longest
    ]


def run_group(cases: list[Case], options: argparse.Namespace, output: Path) -> None:
    """Measures some cases in this process; a line of JSON for each figure, as soon as there is one."""
    began = time.perf_counter()
    devices = jax.devices()[: options.devices or None]
    mesh = Mesh(np.asarray(devices), (AXIS,))
    rows = [int(part) for part in options.rows.split(",")]
    peers = make_peer_memory(mesh, AXIS, PeerLayout(mesh.size, max(rows), 4 * options.size))
    inputs = make_inputs(mesh, rows, options.size)
    summed = summed_weights(inputs[rows[0]])

    def record(**figures: Any) -> None:
        with output.open("a") as file:
            file.write(json.dumps(figures) + "\n")
        print(" ".join(f"{key}={value}" for key, value in figures.items()), flush=True)

    record(device=devices[0].device_kind, ranks=mesh.size, jax=jax.__version__, flags=os.environ.get("XLA_FLAGS", ""))
    with ThreadPoolExecutor(16) as pool:
        compiling = {
            (name, count, calls): pool.submit(compile_chain, name, mesh, calls, inputs[count], peers)
            for name, count in cases
            for calls in CALLS
        }
        # Nothing is loaded onto a device while another's kernel waits for it.
        wait(compiling.values())
        record(compiled_after_s=round(time.perf_counter() - began, 1))
        for name, count in cases:
            try:
                short, long = (compiling[name, count, calls].result() for calls in CALLS)
                # The first run of a program loads it: before anything is launched ahead.
                jax.block_until_ready(long())
                error = error_of(name, inputs[count], summed, short(), CALLS[0])
                # Launched ahead, the two lengths in turn: nothing is left over from one to the next.
                several = [program() for _ in range(4) for program in (short, long)]
                if any(not np.array_equal(np.asarray(several[i]), np.asarray(several[i % 2])) for i in range(8)):
                    raise ValueError(f"{name}, {count} rows: runs of the same program differ")
                if not error < 0.05:
                    raise ValueError(f"{name}, {count} rows: {error=} against the same chain in float32")
                times = [time_program(program) for program in (short, long)]
                record(
                    variant=name,
                    rows=count,
                    us=round((times[1] - times[0]) / (CALLS[1] - CALLS[0]) * 1e6, 2),
                    us_whole_program=round(times[1] * 1e6, 1),
                    error=round(error, 5),
                )
            except Exception as error:  # the other sizes and variants are still to be measured
                record(variant=name, rows=count, failed=f"{type(error).__name__}: {error}"[:300])
        for name, count in cases if options.profile else ():
            if count not in (rows[0], rows[-1]):
                continue
            try:
                for kernel in profile_kernels(compiling[name, count, CALLS[1]].result()):
                    record(variant=name, rows=count, **kernel)
            except Exception as error:
                record(variant=name, rows=count, profile_failed=f"{type(error).__name__}: {error}"[:300])


def told(figures: list[dict[str, Any]]) -> set[Case]:
    """What was measured, or failed."""
    return {(line["variant"], line["rows"]) for line in figures if "us" in line or "failed" in line}


def start_groups(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Runs each group in its own process, one after the other; returns all their figures, which the folder then has too.

    A group that ends abnormally has failed, with all that it had still to measure. One that time is up for has not, but
    what it hung in: else the same would be tried again whenever the rest is asked for.
    """
    deadline = time.monotonic() + options.seconds
    chosen = options.variants.split(",") if options.variants else list(VARIANTS)
    rows = [int(part) for part in options.rows.split(",")]
    path = folder / "all_reduce.json"
    figures: list[dict[str, Any]] = json.loads(path.read_text()) if options.resume and path.is_file() else []
    for group in GROUPS:
        cases = [(name, count) for name in group if name in chosen for count in rows]
        cases = [case for case in cases if case not in told(figures)]
        left = deadline - time.monotonic()
        if not cases or left < 15:
            continue
        names = list(dict.fromkeys(name for name, _ in cases))
        output = folder / f"{'-'.join(names)}.jsonl"
        output.unlink(missing_ok=True)
        environment = dict(os.environ)
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {VARIANTS[names[0]].xla_flags}".strip()
        environment.setdefault("NCCL_NVLS_ENABLE", "0")
        asked = ",".join(f"{name}:{count}" for name, count in cases)
        command = [sys.executable, __file__, *sys.argv[1:], "--group", asked, "--group-output", str(output)]
        print(f"== {', '.join(names)} ({left:.0f} s left)", flush=True)
        code = None
        try:
            code = run_in_group(command, environment=environment, timeout=min(left, options.group_seconds))
        except subprocess.TimeoutExpired:
            print(f"{names} took too long and was ended", flush=True)
            hung = hung_case(cases, output)
            if hung:
                figures.append(
                    {"variant": hung[0], "rows": hung[1], "failed": f"hung for {HANG_SECONDS:.0f} s or more"}
                )
        finally:  # also where one does not want to wait for the rest
            figures += read_lines(output)
            if code:
                print(f"{names} ended with {code}", flush=True)
                failed = f"its process ended with {code}"
                untold = [case for case in cases if case not in told(figures)]
                figures += [{"variant": name, "rows": count, "failed": failed} for name, count in untold]
            aside = path.with_suffix(".new")
            aside.write_text(json.dumps(figures, indent=1))
            aside.replace(path)
    return figures


def hung_case(cases: list[Case], output: Path) -> Case | None:
    """Of a group that was ended: what it did not come on from, for so long that it had not just begun with it."""
    lines = read_lines(output)
    compiled = any("compiled_after_s" in line for line in lines)
    if not compiled or time.time() - output.stat().st_mtime < HANG_SECONDS:
        return None
    return next((case for case in cases if case not in told(lines)), None)


def read_lines(output: Path) -> list[dict[str, Any]]:
    """What a group has written; its last line may be cut."""
    lines = output.read_text().splitlines(keepends=True) if output.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def table(figures: list[dict[str, Any]], size: int) -> str:
    """Microseconds of a call by variant and rows, and what is more than without the sum over devices."""
    measured = {(line["variant"], line["rows"]): line["us"] for line in figures if "us" in line}
    names = [name for name in VARIANTS if any(name == measured_name for measured_name, _ in measured)]
    rows = sorted({count for _, count in measured})
    lines = [
        "us a call (and more than local)",
        f"{'KB of bfloat16':>16}" + "".join(f"{2 * size * count // 1024:>17}" for count in rows),
    ]
    for name in names:
        cells = []
        for count in rows:
            value, local = measured.get((name, count)), measured.get(("local", count))
            if value is None:
                cells.append(f"{'-':>17}")
            else:
                cells.append(f"{value:9.2f}" + (f" ({value - local:5.1f})" if local is not None else " " * 8))
        lines.append(f"{name:>16}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="2,4,8,16,32,64")
    parser.add_argument("--size", type=int, default=4096, help="of the residual stream")
    parser.add_argument("--devices", type=int, default=0, help="how many of the devices; 0: all")
    parser.add_argument("--variants", default="", help=f"some of {','.join(VARIANTS)}; all if empty")
    parser.add_argument("--no-profile", dest="profile", action="store_false")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="after which no more is measured")
    parser.add_argument("--group-seconds", type=float, default=75.0)
    parser.add_argument("--output", default="bench_all_reduce", help="folder")
    parser.add_argument("--resume", action="store_true", help="keep the folder's figures, and measure what it lacks")
    parser.add_argument("--group", default="", help=argparse.SUPPRESS)
    parser.add_argument("--group-output", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.group:
        pairs = [part.split(":") for part in options.group.split(",")]
        run_group([(name, int(count)) for name, count in pairs], options, Path(options.group_output))
        return
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    figures = start_groups(options, folder)
    print(table(figures, options.size), flush=True)


if __name__ == "__main__":
    main()
