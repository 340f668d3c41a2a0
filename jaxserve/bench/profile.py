"""One decode window of a running engine under the profiler: where the time of a step goes."""

from __future__ import annotations

import math
import re
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxserve.bench.floor import Ceiling, attended_tokens
from jaxserve.bench.in_process import InProcessTarget
from jaxserve.bench.kernels import ABOVE
from jaxserve.bench.load import LoadTimeoutError
from jaxserve.bench.records import RequestRecord
from jaxserve.bench.workload import Prompts
from jaxserve.bench.workload_files import Task
from jaxserve.config import ModelConfig
from jaxserve.engine.client import EngineClient
from jaxserve.engine.replicas import ReplicatedEngine
from jaxserve.models.kv_cache import kv_bytes_per_token
from jaxserve.models.param_spec import ParamSpec
from jaxserve.models.params import param_specs
from jaxserve.wording import plural

KeyT = TypeVar("KeyT")

_LONGEST_OUTPUT = 4000
_WINDOW = "jaxserve decode window"  # how the trace calls the time that counts
_WEIGHTS_OF = {"qkv": ("wqkv",), "output": ("wo",), "mlp": ("w_gate_up", "w_down")}  # by paragraph, in each layer

# The named scopes of a forward pass, innermost last where one lies in another.
SCOPES = (
    "embed", "rope", "attention_norm", "qkv", "rope_write_kv", "attention", "output", "mlp_norm", "mlp", "final_norm",
    "lm_head",
)  # fmt: skip

# Where the trace tells no scope, as for what runs in a GPU's launch graphs: parts of a step by the names of their kernels,
# ours and those of XLA and cuBLAS. The first that fits counts.
_BY_NAME = tuple(
    (re.compile(pattern), part)
    for pattern, part in (
        ("all_?reduce|nccl", "sums over devices"),
        ("attention", "attention"),
        ("rope_write", "rope_write_kv"),
        ("quantize_rows", "rounding"),
        ("gemm|gemv|nvjet|cutlass|xmma|cublas|matmul|splitk|(^|_)dot", "products"),
        ("norm", "norms"),
    )
)
_PRODUCTS = (*_WEIGHTS_OF, "lm_head")  # paragraphs whose floors are those of their weights

# What lies around them in speculation, by how a table tells it.
_SPECULATION = {
    "draft": "draft", "feed_drafter": "show", "show_drafter": "show", "verify": "verify", "verify_full": "verify",
}  # fmt: skip


@dataclass(frozen=True)
class KernelEvent:
    """One run of a kernel on the device; times in seconds.

    Attributes:
        scope: which paragraph of the forward pass it belongs to, "" where the trace does not tell.
    """

    name: str
    scope: str
    start: float
    duration: float


@dataclass(frozen=True)
class Window:
    """A decode window: its kernels, how many steps it had, and how long it was.

    Attributes:
        context: tokens in the cache of a sequence, in the middle of the window.
        host_gap: 1 - (time in which some kernel ran / time from the first to the last).
    """

    events: list[KernelEvent]
    num_steps: int
    seconds: float
    context: float

    @property
    def host_gap(self) -> float:
        if not self.events:
            return 0.0
        span = max(event.start + event.duration for event in self.events) - min(event.start for event in self.events)
        return 1.0 - busy_seconds(self.events) / span if span else 0.0


def busy_seconds(events: Iterable[KernelEvent]) -> float:
    """Time in which at least one of them ran."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        stop = event.start + event.duration
        total += max(0.0, stop - max(end, event.start))
        end = max(end, stop)
    return total


def profile_decode(
    engine: EngineClient | ReplicatedEngine,
    *,
    concurrency: int,
    context: int,
    num_steps: int,
    folder: Path,
    timeout: float = 300.0,
) -> Window:
    """Has `concurrency` sequences decode from `context` tokens on, and traces about `num_steps` steps.

    The folder gets the profiler's files, among them one for Perfetto (https://ui.perfetto.dev). They hold the prompts before
    these steps as well: a profiler that starts while XLA's launch graphs run has ended them with CUDA's "launch failed".

    Raises:
        ValueError: the engine has no room for them.
        LoadTimeoutError: it takes longer than `timeout` seconds.
    """
    check_room(
        concurrency, context + num_steps, max_num_seqs=engine.config.max_num_seqs, max_model_len=engine.max_model_len
    )
    task = Task(context, min(engine.max_model_len - context, _LONGEST_OUTPUT))
    target = InProcessTarget(engine, Prompts(engine.model_config.vocab_size, longest=context), temperature=0.0)
    stopping = threading.Event()

    def start_again(record: RequestRecord) -> None:
        """Holds the load, however long the profiler takes to start."""
        if not stopping.is_set():
            target.start(record.index, task, start_again)

    before = engine.stats().generation_tokens
    deadline = _Deadline(
        time.monotonic() + timeout,
        f"{concurrency} {plural('sequence', concurrency)} from {context} {plural('token', context)} on did not get through "
        f"{num_steps} {plural('step', num_steps)} within {timeout:g} s: ask for less (--concurrency, --context, --steps)",
    )
    with jax.profiler.trace(str(folder), create_perfetto_trace=True, profiler_options=_options()):
        for index in range(concurrency):
            target.start(index, task, start_again)
        try:
            _wait(lambda: target.num_begun >= concurrency, deadline)
            first, started = engine.stats(), time.perf_counter()
            with jax.profiler.TraceAnnotation(_WINDOW):
                _wait(lambda: engine.stats().num_steps >= first.num_steps + num_steps, deadline)
            last, seconds = engine.stats(), time.perf_counter() - started
        finally:
            stopping.set()
            target.stop()
        _wait(lambda: engine.stats().num_running == 0, deadline)  # nor does it stop while they run
    paths = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    decoded = ((first.generation_tokens + last.generation_tokens) / 2 - before) / concurrency
    return Window(
        read_events(paths[-1], within=_WINDOW),
        last.num_steps - first.num_steps,
        seconds,
        context + decoded % task.output,
    )


def check_room(concurrency: int, tokens: int, *, max_num_seqs: int | None, max_model_len: int | None) -> None:
    """As far as the limits are known.

    Raises:
        ValueError: so many sequences of so many tokens do not fit.
    """
    if tokens >= (max_model_len or math.inf) or concurrency > (max_num_seqs or math.inf):
        subject = f"{concurrency} {plural('sequence', concurrency)} of {tokens} tokens"
        verb = "does" if concurrency == 1 else "do"
        raise ValueError(f"{subject} {verb} not fit {max_num_seqs=} and {max_model_len=}: raise these, or ask for less")


def _options() -> jax.profiler.ProfileOptions:
    """Without what nobody reads here: each call of Python, and every program as text, which makes gigabytes."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.enable_hlo_proto = False
    return options


@dataclass(frozen=True)
class _Deadline:
    """Attributes:
    moment: of `time.monotonic`.
    message: what is told once it has passed.
    """

    moment: float
    message: str


def _wait(condition: Callable[[], bool], deadline: _Deadline) -> None:
    while not condition():
        if time.monotonic() > deadline.moment:
            raise LoadTimeoutError(deadline.message)
        time.sleep(0.001)


def traced_kernels(run: Callable[[], object]) -> list[KernelEvent]:
    """The kernels of a call, which must wait for what it starts."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        [trace] = Path(folder).rglob("*.xplane.pb")
        return read_events(trace)


def read_events(path: Path, *, within: str | None = None) -> list[KernelEvent]:
    """Kernels of a profile: those on a GPU's streams; on a CPU, what XLA ran.

    Args:
        within: only those that begin while this annotation of the host lasts.

    Raises:
        ValueError: the profile has no such annotation.
    """
    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    begin, end = (float("-inf"), float("inf")) if within is None else _annotated(planes, within)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    found = []
    for plane in gpus[:1] or planes:
        for line in plane.lines:
            if gpus and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                statistics = {str(key): value for key, value in event.stats if key is not None}
                if not begin <= event.start_ns <= end or (not gpus and "hlo_op" not in statistics):
                    continue
                origin = str(statistics.get("tf_op") or statistics.get("name") or "")
                scope = scope_of(origin, event.name)
                found.append(KernelEvent(event.name, scope, event.start_ns * 1e-9, event.duration_ns * 1e-9))
    return found


def _annotated(planes: Iterable[Any], name: str) -> tuple[float, float]:
    """When an annotation began and ended, in nanoseconds."""
    for plane in planes:
        for line in plane.lines:
            for event in line.events:
                if event.name == name:
                    return event.start_ns, event.start_ns + event.duration_ns
    raise ValueError(f"the trace has no event {name!r}")


def scope_of(origin: str, kernel: str) -> str:
    """The innermost known scope in a path such as "jit(forward)/mlp/dot_general"; else by the kernel's own name, which tells
    products and norms from others, but not whose they are; "" where neither tells anything.

    What a drafter does is told apart from the same of the model: "draft mlp".
    """
    parts = origin.split("/")
    speculation = next((_SPECULATION[part] for part in parts if part in _SPECULATION), "")
    by_name = (part for pattern, part in _BY_NAME if pattern.search(kernel.lower()))
    scope = next((part for part in reversed(parts) if part in SCOPES), None) or next(by_name, "")
    return f"{speculation} {scope}".strip()


def scope_floors(
    config: ModelConfig,
    dtype: jnp.dtype,
    ceiling: Ceiling,
    *,
    batch: int,
    context: float,
    num_devices: int,
    cache_dtype: jnp.dtype | None = None,
) -> dict[str, float]:
    """Seconds that each paragraph of one step takes at least, for the weights and pages that it reads.

    Args:
        cache_dtype: of the KV cache; None: `dtype`.
    """
    specs = param_specs(config)
    read: dict[str, float] = {
        name: sum(_num_bytes(getattr(layer, array), dtype) for layer in specs.layers for array in arrays)
        for name, arrays in _WEIGHTS_OF.items()
    }
    read["lm_head"] = config.hidden_size * config.vocab_size * dtype.itemsize
    token_bytes = kv_bytes_per_token(config, dtype if cache_dtype is None else cache_dtype)
    read["attention"] = batch * attended_tokens(config, context) * token_bytes
    return {name: num_bytes / (ceiling.bandwidth * num_devices) for name, num_bytes in read.items()}


def _num_bytes(weight: Any, dtype: jnp.dtype) -> int:
    """Of a declared weight, quantized or not."""
    return sum(
        spec.num_bytes(dtype) for spec in jax.tree.leaves(weight, is_leaf=lambda leaf: isinstance(leaf, ParamSpec))
    )


def format_window(window: Window, floors: dict[str, float], *, most: int) -> str:
    """Where the time of a step went: by paragraph with its floor, and by kernel. A line under the paragraphs says where they
    add up to more than the time in which kernels ran, and another why shares are above 100%.
    """
    lines = [
        f"{window.num_steps} {plural('step', window.num_steps)} in {window.seconds * 1e3:.1f} ms: "
        f"{window.seconds / window.num_steps * 1e3:.3f} ms a step, {len(window.events) / window.num_steps:.0f} kernels a "
        f"step, host gap {window.host_gap:.1%}",
        "",
        f"{'us a step':>10}  {'floor':>8}  {'share':>6}  paragraph",
    ]
    by_scope = _sums(window, lambda event: event.scope or "(other)")
    whole = sum(floors.values())
    if any(scope == "products" for scope, _ in by_scope):  # all those that have no row of their own
        told = {scope for scope, _ in by_scope}
        floors = {**floors, "products": sum(floors.get(name, 0.0) for name in _PRODUCTS if name not in told)}
    for scope, (seconds, _) in by_scope:
        floor, share = _against_floor(seconds, floors.get(scope))
        lines.append(f"{seconds * 1e6:10.1f}  {floor:>8}  {share:>6}  {scope}")
    total = sum(seconds for _, (seconds, _) in by_scope)
    lines.append(f"{total * 1e6:10.1f}  {whole * 1e6:8.1f}  {whole / total if total else 0:6.0%}  all")
    busy = busy_seconds(window.events) / window.num_steps
    if total > ABOVE * busy:
        lines.append(
            f"kernels overlap, or one holds others, as a loop does: of a step some kernel ran in {busy * 1e6:.1f} us, and "
            f"their times add up to {total * 1e6:.1f} us"
        )
    if any(floors.get(scope, 0.0) > ABOVE * seconds for scope, (seconds, _) in by_scope):
        lines.append(
            "above 100%: so small that a cache serves it, which the floor, the memory's, does not count, or part of its "
            "work stands in another row"
        )
    lines += ["", f"{'us a step':>10}  {'floor':>8}  {'share':>6}  {'a step':>7}  {'paragraph':<17}  kernel"]
    by_kernel = _sums(window, lambda event: (event.scope or "-", event.name))
    kernels = Counter(scope for (scope, _), _ in by_kernel)
    for (scope, name), (seconds, count) in by_kernel[:most]:
        # A paragraph's floor is a kernel's where it is the only one of it.
        floor, share = _against_floor(seconds, floors.get(scope) if kernels[scope] == 1 else None)
        lines.append(f"{seconds * 1e6:10.1f}  {floor:>8}  {share:>6}  {count:7.1f}  {scope:<17}  {name[:80]}")
    return "\n".join(lines)


def _against_floor(seconds: float, floor: float | None) -> tuple[str, str]:
    """A floor in microseconds, and its share of a time."""
    return (f"{floor * 1e6:.1f}", f"{floor / seconds:.0%}") if floor and seconds else ("-", "-")


def _sums(window: Window, key: Callable[[KernelEvent], KeyT]) -> Sequence[tuple[KeyT, tuple[float, float]]]:
    """Seconds and runs in one step by key, most time first."""
    seconds: dict[KeyT, float] = defaultdict(float)
    counts: dict[KeyT, int] = defaultdict(int)
    for event in window.events:
        name = key(event)
        seconds[name] += event.duration / window.num_steps
        counts[name] += 1
    return sorted(
        ((name, (total, counts[name] / window.num_steps)) for name, total in seconds.items()),
        key=lambda row: -row[1][0],
    )
