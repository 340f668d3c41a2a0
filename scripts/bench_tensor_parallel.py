#!/usr/bin/env python3
"""One model over all cards beside two replicas over half of them each: which gives more, with and without speculation.

    python scripts/bench_tensor_parallel.py llama-3-70b --devices 8 --quantization fp8 --draft llama-3-8b \
        --concurrency 1,8,16,30,64 --goals 5.5,6,6.7,7.8,10 --output eight-cards

What is measured, with random weights, in process: the model over all devices, over half of them, two replicas over half of
them each, each of these with a draft model too; and the sum over all devices alone. What is done lies in the output folder
(`runs/`, as `jaxserve bench sweep` leaves it, and `all-reduce/`) and is not done again. It ends by itself after --seconds,
with a report of what there is, and the same command goes on from there: on a machine that is gone in between, that folder
is to be kept, and compiled programs too (JAXSERVE_HOME says where those are). Options that are not listed are those of
`jaxserve bench run`, with a value each.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_all_reduce import table as all_reduce_table
from bench_all_reduce import told

from jaxserve.bench.process_group import run_in_group
from jaxserve.bench.records import Load
from jaxserve.bench.report import build_report
from jaxserve.bench.results import Series, find_series
from jaxserve.bench.sweep import Configuration, Outcome, environment_for, failed_of_sweep, plan, run_sweep
from jaxserve.cli.bench_options import parse_counts, parse_numbers
from jaxserve.models.presets import preset_config

SUM_VARIANTS = ("local", "nccl", "peers", "peers_float32")
REPORT_SECONDS = 30.0
LEAST_SUM_SECONDS = 60.0  # that the sums are begun with


def configurations_of(options: argparse.Namespace) -> list[Configuration]:
    """The widest first, for it is what everything else is set against."""
    draft = []
    if options.draft:
        settings: dict[str, Any] = {"method": "draft_model", "model": options.draft}
        settings["num_speculative_tokens"] = options.num_drafts
        if options.quantization:
            settings["quantization"] = options.quantization
        draft.append(json.dumps(settings))
    return plan(
        [options.model],
        tensor_parallel_sizes=[options.devices, options.devices // 2],
        data_parallel_sizes=[1, 2],
        speculative_configs=draft,
        static_batching=False,
        endpoints=[],
        synthetic_acceptance=options.acceptance if draft else None,
        most_devices=options.devices,
    )


def measure_sums(options: argparse.Namespace, seconds: float) -> None:
    """Times the sum over all devices alone, if that is not done yet and there is time."""
    folder = options.output / "all-reduce"
    if seconds < LEAST_SUM_SECONDS or not missing_sums(options):
        return
    command = [sys.executable, str(Path(__file__).with_name("bench_all_reduce.py")), "--no-profile", "--resume"]
    command += ["--devices", str(options.devices), "--size", str(preset_config(options.model).hidden_size)]
    command += ["--rows", options.sum_rows, "--variants", ",".join(SUM_VARIANTS), "--output", str(folder)]
    command += ["--seconds", f"{seconds:.0f}", "--group-seconds", f"{seconds / 2:.0f}"]
    environment = environment_for(Configuration("sums", (), options.devices))
    run_in_group(command, environment=environment, stdout=sys.stderr)


def sums_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    path = options.output / "all-reduce" / "all_reduce.json"
    return json.loads(path.read_text()) if path.is_file() else []


def missing_sums(options: argparse.Namespace) -> bool:
    """Whether there is a case that neither was measured nor failed."""
    done = told(sums_of(options))
    rows = parse_counts(options.sum_rows, "--sum-rows")
    return any((variant, count) not in done for variant in SUM_VARIANTS for count in rows)


def tpot_table(series: Sequence[Series], names: Sequence[str], loads: Sequence[Load], goals: Sequence[float]) -> str:
    """Mean times per token by configuration and load, below the goals and the floor of the first configuration."""
    found = {part.name: {point.summary.load: point.summary for point in part.points} for part in series}
    widest = found.get(names[0], {})
    rows: list[tuple[str, list[float | None]]] = []
    if goals:
        rows.append((f"goal of {names[0]}", list(goals)))
    rows.append((f"floor of {names[0]}", [widest[load].floor_ms if load in widest else None for load in loads]))
    for name in names:
        measured = found.get(name, {})
        rows.append((name, [measured[load].tpot_ms["mean"] if load in measured else None for load in loads]))
    width = max(len(name) for name, _ in rows)
    lines = ["mean time per output token in ms, by requests in flight"]
    lines.append(" " * width + "".join(f"{load.label:>8}" for load in loads))
    for name, values in rows:
        lines.append(f"{name:<{width}}" + "".join(f"{'-' if value is None else f'{value:.2f}':>8}" for value in values))
    missed = [
        f"{load.label} ({widest[load].tpot_ms['mean']:.2f} of {goal:g})"
        for load, goal in zip(loads, goals, strict=False)
        if load in widest and widest[load].tpot_ms["mean"] > goal
    ]
    if goals and all(load in widest for load in loads):
        lines.append(f"{names[0]} misses its goal at {', '.join(missed)}" if missed else f"{names[0]} meets its goals")
    return "\n".join(lines)


def results(
    options: argparse.Namespace, names: Sequence[str], loads: Sequence[Load], outcome: Outcome, failures: str
) -> str:
    """Everything in words, and what there is not."""
    parts = []
    if any((options.output / "runs").rglob("*.summary.json")):
        said = build_report(options.output, title=f"{options.model} on {options.devices} devices", slo_tpot_ms=None)
        goals = parse_numbers(options.goals, "--goals") if options.goals else ()
        parts += [tpot_table(find_series(options.output), names, loads, goals), said]
    sums = sums_of(options)
    if sums:
        size = preset_config(options.model).hidden_size
        parts.append(f"sums over {options.devices} devices: {all_reduce_table(sums, size)}")
    failed_sums = [f"{line['variant']} of {line['rows']} rows ({line['failed']})" for line in sums if "failed" in line]
    if failed_sums:
        parts.append(f"sums that failed: {', '.join(failed_sums)}")
    if outcome.failed:
        parts.append(f"failed: {', '.join(outcome.failed)}")
    if failures:
        parts.append(f"requests failed: {failures}")
    unfinished = [*outcome.unfinished, *(["sums over devices"] if missing_sums(options) else [])]
    if unfinished:
        parts.append(f"not done yet: {', '.join(unfinished)}; the same command goes on from here")
    return "\n\n".join(part for part in parts if part)


def read_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and those for `jaxserve bench run`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an architecture: llama-3-8b, llama-3-70b, llama-3.2-1b, or a JSON file")
    parser.add_argument("--devices", type=int, required=True, help="an even number")
    parser.add_argument("--quantization", default="", help="of the model and its draft model")
    parser.add_argument("--draft", default="", help="architecture of the draft model; unset: nothing speculates")
    parser.add_argument("--num-drafts", type=int, default=3)
    parser.add_argument(
        "--acceptance", type=float, default=0.8, help="share of drafts that are kept, whatever they are"
    )
    parser.add_argument("--concurrency", default="1,8,16,30,64")
    parser.add_argument(
        "--goals", default="", help="ms per token of the model over all devices, one for each concurrency"
    )
    parser.add_argument("--max-model-len", default="2048")
    parser.add_argument("--max-num-batched-tokens", default="1024")
    parser.add_argument("--sum-rows", default="1,8,16,32,64,128,256", help="tokens of a step whose sums are timed")
    parser.add_argument("--seconds", type=float, default=540.0, help="after which it ends")
    parser.add_argument("--output", type=Path, default=Path("bench-tensor-parallel"))
    options, further = parser.parse_known_args(arguments)
    if options.devices < 2 or options.devices % 2:
        parser.error(f"--devices {options.devices} must be even")
    if options.goals and options.goals.count(",") != options.concurrency.count(","):
        parser.error(f"--goals {options.goals} must be as many as --concurrency {options.concurrency}")
    return options, further


def main(arguments: Sequence[str]) -> int:
    began = time.monotonic()
    options, further = read_options(arguments)
    loads = [Load("concurrency", value) for value in parse_counts(options.concurrency, "--concurrency")]
    configurations = configurations_of(options)
    flags = ["--concurrency", options.concurrency, "--max-model-len", options.max_model_len]
    flags += ["--max-num-batched-tokens", options.max_num_batched_tokens]
    flags += ["--quantization", options.quantization] if options.quantization else []

    def left() -> float:
        return options.seconds - REPORT_SECONDS - (time.monotonic() - began)

    outcome = run_sweep(
        configurations,
        loads,
        [*flags, *further],
        options.output,
        lambda text: print(text, file=sys.stderr),
        seconds=left(),
    )
    measure_sums(options, left())
    failures = failed_of_sweep(configurations, loads, options.output)
    text = results(options, [each.name for each in configurations], loads, outcome, failures)
    (options.output / "results.txt").write_text(f"{text}\n")
    print(text)
    return 1 if outcome != Outcome() or failures or missing_sums(options) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
