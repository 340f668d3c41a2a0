"""What a scheduling policy or a goal does to a load, without a device: the real scheduler on a model of a card's steps.

    python scripts/simulate_policies.py --policy fcfs --policy sjf --rate 8 --rate 16 --requests 3000
    python scripts/simulate_policies.py --max-tpot-ms 8 --max-tpot-ms 12 --rate 16 --workload long-among-short:16000

Requests come at random, so many a second on average, in a time of their own: a minute of it takes seconds. The steps are
those of Llama-3-8B in bfloat16, with the sizes that an engine has by itself.
"""

from __future__ import annotations

import argparse
from itertools import cycle, islice

from jaxserve.bench.workload import HELP, load_workload
from jaxserve.config import SchedulingPolicy
from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.prefill_sizes import PrefillSizes, balanced_tokens
from jaxserve.engine.simulator import (
    LLAMA_8B_ON_H100,
    LLAMA_8B_ON_H200,
    PROMPT_SIZES,
    SimulationResult,
    Simulator,
    poisson_trace,
)
from jaxserve.engine.step_pace import StepPace
from jaxserve.engine.waiting_queue import SchedulingOrder

CARDS = {"h100": LLAMA_8B_ON_H100, "h200": LLAMA_8B_ON_H200}
LIMITS = SchedulerLimits(
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    max_prefill_rows=16,
    max_model_len=32_768,
    page_size=16,
    num_pages=25_000,
)


def figures(result: SimulationResult) -> str:
    """Milliseconds to the first token and between tokens, and how busy the device was."""
    cells = [
        f"{result.percentile(what, share) * 1e3:.{digits}f}"
        for what, digits in (
            (lambda course: [course.time_to_first_token], 0),
            (lambda course: course.inter_token_times, 2),
        )
        for share in (50, 99)
    ]
    return " | ".join([*cells, f"{result.busy / result.seconds:.0%}", str(result.num_preemptions)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", choices=CARDS, default="h100")
    parser.add_argument("--policy", action="append", choices=["fcfs", "sjf"], help="may be given several times")
    parser.add_argument("--max-tpot-ms", action="append", type=float, help="goal; may be given several times")
    parser.add_argument("--rate", action="append", type=float, help="requests a second; may be given several times")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--workload", default="sharegpt-like", help=HELP)
    options = parser.parse_args()
    tasks = load_workload(options.workload).tasks
    lengths = [(task.prompt, task.output) for task in islice(cycle(tasks), options.requests)]
    print(f"{options.requests} requests of {options.workload}, simulated steps of Llama-3-8B on one {options.card}")
    print("| policy | goal, ms | a second | TTFT p50, ms | p99 | between tokens p50, ms | p99 | busy | preemptions |")
    print("|---|---|---|---|---|---|---|---|---|")
    policies: list[SchedulingPolicy] = options.policy or ["fcfs"]
    for policy in policies:
        for goal in options.max_tpot_ms or [None]:
            for rate in options.rate or [8.0]:
                simulator = Simulator(
                    LIMITS,
                    CARDS[options.card],
                    order=SchedulingOrder(policy),
                    pace=StepPace(PROMPT_SIZES, goal=None if goal is None else goal / 1e3),
                    prefill_sizes=PrefillSizes.for_goal(PROMPT_SIZES, balanced_tokens(options.card.upper()), goal),
                )
                result = simulator.run(poisson_trace(rate, lengths))
                print(f"| {policy} | {goal or 'twice idle'} | {rate:g} | {figures(result)} |", flush=True)


if __name__ == "__main__":
    main()
