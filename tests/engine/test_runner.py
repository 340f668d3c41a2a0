"""The forward pass as one program, as accelerators run it, gives the tokens of the layer-by-layer one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.engine import runner as runner_module
from jaxserve.engine.buckets import Buckets
from jaxserve.engine.device_batch import Bucket, Sizes
from jaxserve.engine.executable_cache import ExecutableCache
from jaxserve.engine.memory_plan import MemoryUse, OutOfMemoryError
from jaxserve.engine.request import Request
from jaxserve.engine.runner import ModelRunner
from jaxserve.engine.schedule import DecodeRow, PrefillChunk, ScheduledBatch
from jaxserve.engine.scheduler import Scheduler, SchedulerLimits
from jaxserve.engine.sequence import Sequence
from jaxserve.kernels.peer_memory import PeerLayout, make_peer_memory
from jaxserve.models.params import param_specs
from jaxserve.progress import NoProgress
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.mesh import TENSOR_AXIS, make_mesh
from jaxserve.sharding.placement import named_shardings
from tests.tiny_engine import MODEL_CONFIG, ONE_SEQUENCE, ask, tiny_engine, tiny_params

LIMITS = SchedulerLimits(
    max_num_seqs=2, max_num_batched_tokens=4, max_prefill_rows=2, max_model_len=24, page_size=4, num_pages=7
)
REQUESTS = [
    ([2, 3, 4, 5, 6, 7], SamplingParams(temperature=0.0, max_tokens=15, ignore_eos=True)),
    ([9], SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)),
    (list(range(2, 14)), SamplingParams(temperature=0.9, seed=6, top_p=0.9, max_tokens=8, ignore_eos=True)),
]


@pytest.fixture(scope="module", autouse=True)
def compiled_once() -> Iterator[None]:
    """Runners of the same sizes on the same devices share their programs, as starts do that keep them on disk."""
    load, compiled = ExecutableCache.load_or_compile, dict[Any, Any]()

    def load_once(cache: ExecutableCache, name: str, lower: Callable[[], Any], **options: Any) -> Any:
        key = cache._context, name
        if key not in compiled:
            compiled[key] = load(cache, name, lower, **options)
        return compiled[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExecutableCache, "load_or_compile", load_once)
        yield


def whole_program_runner(
    num_devices: int = 1, *, has_peers: bool = False, check: Callable[[MemoryUse], None] = lambda use: None
) -> ModelRunner:
    """One device: for all of `LIMITS`; several: for steps without pieces of prompts beside others, and without masks."""
    mesh = make_mesh(jax.devices(), num_devices)
    layout = PeerLayout(2, LIMITS.max_num_seqs, 4 * MODEL_CONFIG.hidden_size)
    runner = ModelRunner(
        MODEL_CONFIG,
        jax.device_put(tiny_params(), named_shardings(param_specs(MODEL_CONFIG), mesh)),
        mesh=mesh,
        sizes=Sizes(
            max_num_seqs=LIMITS.max_num_seqs,
            pages_per_seq=LIMITS.pages_for(LIMITS.longest_sequence),
            num_pages=LIMITS.num_pages,
            page_size=LIMITS.page_size,
        ),
        buckets=Buckets(  # as few as serve these limits
            decode_rows=(2,),
            mixed_decode_rows=(1,) if num_devices == 1 else (),
            prefill_only_tokens=(3, 4) if num_devices == 1 else (3,),
            prefill_tokens=(4,),
            prefill_rows=2,
            sample_rows=(3,),
            sampling_modes=("full",),
            masked_modes=("full",) if num_devices == 1 else (),
        ),
        cache_dtype=np.dtype(np.float32),  # pyright: ignore[reportArgumentType]
        layerwise=False,
        peers=make_peer_memory(mesh, TENSOR_AXIS, layout) if has_peers else None,
    )
    runner.warm_up(NoProgress(), check=check)
    return runner


def test_one_program_gives_the_tokens_of_the_layerwise_engine() -> None:
    scheduler, runner = Scheduler(LIMITS), whole_program_runner()
    sequences = [
        Sequence(
            request=Request(f"request-{index}", tuple(prompt), sampling, arrival_time=0.0),
            index=0,
            seed=sampling.seed or 0,
            stop_token_ids=frozenset(),
            max_output_tokens=sampling.max_tokens or 0,
            token_ids=list(prompt),
        )
        for index, (prompt, sampling) in enumerate(REQUESTS)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    pending: Any = None
    while scheduler.has_work or pending is not None:
        batch = scheduler.schedule()
        launched = (batch, runner.launch_sample(runner.launch_forward(batch))) if batch else None
        if pending is not None:
            scheduler.update(pending[0], runner.fetch(pending[1]))
        pending = launched
    assert scheduler.num_preemptions > 0
    with tiny_engine(ONE_SEQUENCE, mode="filtered") as engine:
        for sequence, (prompt, sampling) in zip(sequences, REQUESTS, strict=True):
            assert sequence.token_ids[len(prompt) :] == ask(engine, prompt, sampling)


def prompt_sequence(tokens: int) -> Sequence:
    return Sequence(
        request=Request("request", (2,) * tokens, SamplingParams(temperature=0.0), arrival_time=0.0),
        index=0,
        seed=0,
        stop_token_ids=frozenset(),
        max_output_tokens=4,
    )


def test_a_step_writes_its_logits_and_hidden_states_over_those_of_the_step_before() -> None:
    runner = whole_program_runner()
    steps = []
    for tokens in (3, 4, 3):
        chunk = PrefillChunk(prompt_sequence(tokens), 0, 0, (2,) * tokens, (0,), True, 0)
        steps.append(runner.launch_forward(ScheduledBatch(decode=(), prefill=(chunk,))))
        runner.fetch(runner.launch_sample(steps[-1]))
    assert [step.logits.is_deleted() for step in steps] == [True, True, False]
    assert [step.hidden.is_deleted() for step in steps] == [True, True, False]
    assert [step.slots.is_deleted() for step in steps] == [True, True, False]
    use = runner.memory_use()
    assert use.results == 4 * (3 * MODEL_CONFIG.vocab_size + 3 + 4 * MODEL_CONFIG.hidden_size)
    assert use.total == use.weights + use.kv_cache + use.slots + use.work_space + use.results
    for executor in runner._forward.values():
        [program] = executor.programs
        memory = program.memory_analysis()
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes <= 16 * program.out_tree.num_leaves  # pointers


def test_what_everything_takes_is_told_before_a_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running one where memory is short would fail with the device's own error, or end the process."""

    def refuse(use: MemoryUse) -> None:
        assert use.work_space > 0 and use.kv_cache > 0
        raise OutOfMemoryError("too much")

    monkeypatch.setattr(ModelRunner, "_rehearse", lambda *arguments: pytest.fail("a program runs"))
    with pytest.raises(OutOfMemoryError):
        whole_program_runner(check=refuse)


def test_a_larger_program_that_is_faster_serves_the_steps_of_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives what theirs gives."""

    def tokens() -> list[int]:
        runner = whole_program_runner()
        chunk = PrefillChunk(prompt_sequence(3), 0, 0, (2, 7, 5), (0,), True, 0)
        logits = runner.launch_forward(ScheduledBatch(decode=(), prefill=(chunk,)))
        used.append(logits.bucket)
        return runner.fetch(runner.launch_sample(logits)).token_ids.tolist()

    used: list[Bucket] = []
    monkeypatch.setattr(runner_module, "fastest_programs", lambda seconds: {bucket: bucket for bucket in seconds})
    own = tokens()
    larger = Bucket(1, 2, 4)
    monkeypatch.setattr(runner_module, "fastest_programs", lambda seconds: dict.fromkeys(seconds, larger))
    assert tokens() == own
    assert used == [Bucket(0, 2, 3), larger]


def test_programs_are_chosen_by_what_was_measured_or_kept_from_an_earlier_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, fast = Bucket(0, 2, 3), Bucket(1, 2, 4)
    measured: list[dict[str, list[float]]] = []

    def kept(
        cache: ExecutableCache, name: str, parts: list[str], measure: Callable[[list[str]], dict[str, list[float]]]
    ) -> dict[str, float]:
        del cache
        assert str(slow) in name and str(fast) in name and {str(slow), str(fast)} <= set(parts)
        measured.append(measure([str(slow)]))
        return {part: 1.0 if part == str(fast) else 2.0 for part in parts}

    monkeypatch.setattr(ExecutableCache, "load_or_measure", kept)
    runner = whole_program_runner()
    assert list(measured[0]) == [str(slow)], "the others are known"
    assert len(measured[0][str(slow)]) > 1 and all(seconds > 0 for seconds in measured[0][str(slow)])
    chunk = PrefillChunk(prompt_sequence(3), 0, 0, (2, 7, 5), (0,), True, 0)
    assert runner.launch_forward(ScheduledBatch(decode=(), prefill=(chunk,))).bucket == fast


def test_sums_that_are_left_to_the_norms_give_the_same_tokens() -> None:
    """The devices' memory reaches every program: sums that are small enough are made with the norm behind them."""

    def tokens(runner: ModelRunner) -> list[list[int]]:
        chunk = PrefillChunk(prompt_sequence(2), 0, 0, (2, 7), (0,), True, 0)
        launched = runner.launch_sample(runner.launch_forward(ScheduledBatch(decode=(), prefill=(chunk,))))
        rows = (DecodeRow(prompt_sequence(2), 0, -1, -1),)
        later = runner.launch_sample(runner.launch_forward(ScheduledBatch(decode=rows, prefill=())))
        return [runner.fetch(step).token_ids.tolist() for step in (launched, later)]

    with_peers, without = whole_program_runner(2, has_peers=True), whole_program_runner(2)
    assert tokens(with_peers) == tokens(without) == tokens(whole_program_runner())
    layout = PeerLayout(2, LIMITS.max_num_seqs, 4 * MODEL_CONFIG.hidden_size)
    exchanged = 4 * (layout.words + layout.table_words)
    assert with_peers.memory_use().results == without.memory_use().results + exchanged
