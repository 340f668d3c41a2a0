"""`jaxserve chat` as a whole: the default model, a pipe, plain text."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("as_tests_run", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_question_through_a_pipe(as_tests_run: bool, default_model_dir: Path) -> None:
    questions = "What is the capital of France?\n/stats\nAnd of Spain?\n/exit\n"
    # As a user has it: one CPU device, and programs that are optimized.
    env = {name: value for name, value in os.environ.items() if as_tests_run or name != "XLA_FLAGS"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "jaxserve",
            "chat",
            "--temperature",
            "0",
            "--max-tokens",
            "24",
            "--max-model-len",
            "256",
        ],
        env=env,
        input=questions,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    answer, *stats, second_answer = done.stdout.splitlines()
    assert "Paris" in answer
    assert stats[0].startswith("prompt: ")
    assert any("tokens/s" in line for line in stats)
    assert "Madrid" in second_answer  # only the first turn says what is asked of Spain
    assert "\x1b" not in done.stdout + done.stderr
