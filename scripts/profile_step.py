"""Times the device's part of steps with random weights, and says which kernels the time goes to.

    python scripts/profile_step.py llama-3-8b --decode 1,64 --context 400 --prefill 256,128+64 --output DIR
    python scripts/profile_step.py llama-3-8b --decode 8,64 --xla-options '{}' --xla-options '{"xla_gpu_autotune_level": 4}'

Each step is launched over and over as the engine does, before the last one's tokens are fetched, so that the time is the
device's as long as the host takes less. The tables of
kernels come from a trace of a few steps; they are written to OUTPUT/kernels.txt, and the times of all steps are told last.
Several sets of XLA options, on top of those that the engine compiles with, are compiled and measured one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.floor import device_ceiling, step_floor_ms
from jaxserve.bench.profile import read_events
from jaxserve.config import EngineConfig
from jaxserve.engine import executable_cache
from jaxserve.engine.build import make_engine_mesh, resolve_dtype, wanted_quantization
from jaxserve.engine.decode_state import empty_state
from jaxserve.engine.device_batch import Bucket, Sizes, packed_size, views
from jaxserve.engine.executable_cache import ExecutableCache, compile_options
from jaxserve.engine.executors import ForwardCompiler, ForwardExecutor, ResultPlaces
from jaxserve.engine.programs import ProgramFactory
from jaxserve.engine.runner import zero_cache
from jaxserve.kernels.peer_memory import PeerLayout, PeerMemory, make_peer_memory
from jaxserve.models import linear, llama
from jaxserve.models.params import init_params, param_specs
from jaxserve.models.presets import preset_config
from jaxserve.quantization_config import Quantization
from jaxserve.sharding.mesh import TENSOR_AXIS
from jaxserve.sharding.placement import named_shardings, put_replicated, replicated

PAGE_SIZE = 16
PREFILL_ROWS = 16


def packed_step(bucket: Bucket, sizes: Sizes, context: int, prompt_tokens: int) -> np.ndarray:
    """A step with every decode row live, and as many prompts of about that length as fill the bucket's prefill part."""
    pages_per_row = -(-(context + 64) // PAGE_SIZE)
    packed = np.zeros(packed_size(bucket, sizes), np.int32)
    fields = views(packed, bucket, sizes)
    fields["decode_slots"][:] = np.arange(bucket.decode_rows)
    fields["decode_new_page_indices"][:] = sizes.pages_per_seq
    if bucket.prefill_rows:
        rows = max(1, min(bucket.prefill_rows, bucket.prefill_tokens // prompt_tokens))
        starts = np.linspace(0, bucket.prefill_tokens, rows + 1).astype(np.int32)
        fields["prefill_query_starts"][: rows + 1] = starts
        fields["prefill_query_starts"][rows + 1 :] = bucket.prefill_tokens
        fields["prefill_slots"][:] = sizes.max_num_seqs
        first_page = bucket.decode_rows * pages_per_row
        for row in range(rows):
            fields["prefill_page_table"][row] = (
                first_page + row * 256 + np.arange(sizes.pages_per_seq)
            ) % sizes.num_pages
    return packed


def kernel_table(folder: str, steps: int, most: int) -> str:
    """Kernels of a trace by their time in one step."""
    [trace] = Path(folder).rglob("*.xplane.pb")
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for event in read_events(trace):
        times[event.name] += event.duration
        counts[event.name] += 1
    lines = [f"{'us a step':>10}  {'a step':>7}  kernel"]
    for name, total in sorted(times.items(), key=lambda item: -item[1])[:most]:
        lines.append(f"{total / steps * 1e6:10.1f}  {counts[name] / steps:7.1f}  {name[:90]}")
    lines.append(f"{sum(times.values()) / steps * 1e6:10.1f}  {sum(counts.values()) / steps:7.1f}  all")
    return "\n".join(lines)


def host_table(folder: str, steps: int, most: int) -> str:
    """What the host's threads did in a step, calls within calls counted in both."""
    [trace] = Path(folder).rglob("*.xplane.pb")
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        if plane.name.startswith("/host:CPU"):
            for line in plane.lines:
                for event in line.events:
                    times[event.name] += event.duration_ns / 1e3
                    counts[event.name] += 1
    lines = [f"{'us a step':>10}  {'a step':>7}  host"]
    for name, total in sorted(times.items(), key=lambda item: -item[1])[:most]:
        lines.append(f"{total / steps:10.1f}  {counts[name] / steps:7.1f}  {name[:90]}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--decode", default="1,64")
    parser.add_argument("--prefill", default="")
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--prompt-tokens", type=int, default=229, help="of each prompt in a step with prompts")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--num-pages", type=int, default=8192)
    parser.add_argument("--kernels", type=int, default=14)
    parser.add_argument("--xla", default="", help="ops to run in plain XLA, such as decode_matmul,rope_write_kv")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--quantization", choices=get_args(Quantization))
    parser.add_argument("--peer-rows", type=int, default=0, help="most tokens whose sums over devices kernels make")
    parser.add_argument("--no-splits", action="store_true", help="products of few tokens in one piece")
    parser.add_argument("--xla-options", action="append", help="JSON object of a set of programs; may be repeated")
    parser.add_argument(
        "--one-by-one", action="store_true", help="compile so that no program disturbs another's trials"
    )
    parser.add_argument("--output", default="/tmp/profile_step")
    options = parser.parse_args()
    config, engine_config = (
        preset_config(options.model),
        EngineConfig(tensor_parallel_size=options.tensor_parallel_size, quantization=options.quantization),
    )
    config = replace(config, quantization=wanted_quantization(config, engine_config))
    mesh = make_engine_mesh(engine_config)
    dtype = resolve_dtype(engine_config, mesh)
    sizes = Sizes(64, 512, options.num_pages, PAGE_SIZE)
    buckets = [Bucket(int(rows), 0, 0) for rows in options.decode.split(",") if rows]
    for part in options.prefill.split(","):
        if part:
            tokens, _, rows = part.partition("+")
            buckets.append(Bucket(int(rows or 0), PREFILL_ROWS, int(tokens)))
    most_tokens = max([2048, *(bucket.prefill_tokens for bucket in buckets)])
    factory = ProgramFactory(config, sizes, mesh, most_tokens, has_peers=options.peer_rows > 0)
    peers: PeerMemory | None = None
    if factory.has_peers:
        layout = PeerLayout(mesh.size, options.peer_rows, 4 * config.hidden_size)
        peers = make_peer_memory(mesh, TENSOR_AXIS, layout)
    started = time.perf_counter()
    bandwidth = device_ceiling(mesh.devices.flat[0]).bandwidth
    params = init_params(config, 0, dtype, named_shardings(param_specs(config), mesh))
    cache = jax.tree.map(lambda pages: pages + jnp.ones((), pages.dtype), zero_cache(config, sizes, mesh, dtype))
    jax.block_until_ready((params, cache))
    print(f"weights and cache made in {time.perf_counter() - started:.1f} s", flush=True)
    state = jax.device_put(empty_state(sizes), replicated(mesh))
    Path(options.output).mkdir(parents=True, exist_ok=True)
    kernels_file = Path(options.output) / "kernels.txt"
    kernels_file.write_text("")
    times: dict[str, list[str]] = {str(bucket): [] for bucket in buckets}
    variants = options.xla_options or ["{}"]
    uncached, places = ExecutableCache(None, tuple(mesh.devices.flat), ""), ResultPlaces(replicated(mesh))
    for variant in variants:
        more = json.loads(variant)
        with (
            use_xla(options.xla.split(",") if options.xla else [], splits=not options.no_splits),
            mock.patch.object(
                executable_cache, "compile_options", lambda *which, more=more: compile_options(*which) | more
            ),
            ThreadPoolExecutor(1 if options.one_by_one else None) as pool,
        ):
            compiler = ForwardCompiler(factory, uncached, params, cache, state, places, peers)
            compiling = [pool.submit(compile_forward, compiler, bucket) for bucket in buckets]
            programs = [future.result() for future in compiling]
        print(f"{variant}: compiled after {time.perf_counter() - started:.1f} s", flush=True)
        for bucket, forward in zip(buckets, programs, strict=True):
            cache, milliseconds, host, table = measure(
                options, config, factory, sizes, mesh, dtype, params, cache, bucket, forward, bandwidth
            )
            times[str(bucket)].append(f"{milliseconds:.2f} ({host:.2f})")
            with kernels_file.open("a") as file:
                print(f"{bucket}, {variant}: {milliseconds:.2f} ms a step\n{table}\n", file=file)
    print("ms a step (of which the host launches): " + " | ".join(variants))
    for name, values in times.items():
        print(f"{name}: {' '.join(values)}")


@contextlib.contextmanager
def use_xla(ops: list[str], *, splits: bool) -> Iterator[None]:
    """Has these ops of the model run in plain XLA, to show what their kernels bring."""
    with contextlib.ExitStack() as stack:
        for op in ops:
            module = next(module for module in (llama, linear) if hasattr(module, op))
            plain = partial(getattr(module, op), implementation="xla")
            stack.enter_context(mock.patch.object(module, op, plain))
        if not splits:
            for module in (llama, linear):
                stack.enter_context(mock.patch.object(module, "num_parts", return_value=1))
        yield


def compile_forward(compiler: ForwardCompiler, bucket: Bucket) -> ForwardExecutor:
    started = time.perf_counter()
    forward = compiler.whole(bucket, max(8, bucket.rows))
    print(f"{bucket}: ready after {time.perf_counter() - started:.1f} s", flush=True)
    return forward


def measure(
    options: argparse.Namespace,
    config: Any,
    factory: ProgramFactory,
    sizes: Sizes,
    mesh: Any,
    dtype: Any,
    params: Any,
    cache: Any,
    bucket: Bucket,
    forward: Any,
    bandwidth: float,
) -> tuple[Any, float, float, str]:
    """The cache, milliseconds of a step, those of them in which the host launched it, and the table of its kernels."""
    place = replicated(mesh)
    pages_per_row = -(-(options.context + 64) // PAGE_SIZE)
    table = (np.arange(64)[:, None] * pages_per_row + np.arange(sizes.pages_per_seq)[None]) % sizes.num_pages
    state = replace(
        empty_state(sizes),
        kv_lens=jnp.full((64,), options.context - options.rounds // 2, jnp.int32),
        page_table=jnp.asarray(table, jnp.int32),
    )
    state = jax.device_put(state, place)
    packed = packed_step(bucket, sizes, options.context, options.prompt_tokens)
    sample = jax.jit(factory.sample("greedy"), donate_argnums=(0,))
    launching = 0.0

    def steps(count: int, cache: Any, state: Any, *, is_first: bool = False) -> tuple[Any, Any]:
        """As the engine has it: a step is launched before the tokens of the last one are fetched."""
        nonlocal launching
        before = None
        for _ in range(count):
            began = time.perf_counter()
            result = forward(params, cache, state, put_replicated(packed, place))
            if is_first:  # nothing else is loaded while a kernel may wait for another device
                jax.block_until_ready(result)
            cache, (state, tokens) = result.cache, sample(result.state, result.logits, result.slots)
            tokens.copy_to_host_async()
            launching += time.perf_counter() - began
            if before is not None:
                np.asarray(before)
            before = tokens
        jax.block_until_ready(before)
        return cache, state

    cache, state = steps(3, cache, state, is_first=True)
    times = []
    launching = 0.0
    for _ in range(3):
        began = time.perf_counter()
        cache, state = steps(options.rounds // 3, cache, state)
        times.append((time.perf_counter() - began) / (options.rounds // 3) * 1e3)
    host = launching / (3 * (options.rounds // 3)) * 1e3
    floor = step_floor_ms(
        config,
        dtype,
        mesh.devices.flat[0].device_kind,
        batch=bucket.decode_rows,
        context=options.context,
        num_devices=mesh.size,
        bandwidth=bandwidth,
    )
    print(f"{bucket}: {min(times):.2f} ms a step (floor {floor or 0:.2f}), {host:.2f} of the host", flush=True)
    table = ""
    if options.kernels:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                cache, state = steps(4, cache, state)
            table = kernel_table(folder, 4, options.kernels) + "\n" + host_table(folder, 4, options.kernels)
    return cache, min(times), host, table


if __name__ == "__main__":
    main()
