"""`jaxserve chat` as a whole: the default model, a pipe, plain text."""

import os
import subprocess
import sys
from pathlib import Path


def test_a_question_through_a_pipe(default_model_dir: Path) -> None:
    questions = "What is the capital of France?\n/stats\nAnd of Spain?\n/exit\n"
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # one CPU device, as a user has
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
