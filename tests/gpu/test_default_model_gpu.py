"""The default model's greedy text on the card in bfloat16, and on the CPU in float32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.greedy_texts import LENGTH, QUESTIONS, Answer, greedy_answers

pytestmark = pytest.mark.usefixtures("hopper")
NEAR_TIE = 0.25  # of log probabilities, which rounding to bfloat16 may turn round


def test_greedy_text_is_the_cpus_but_for_near_ties(default_model_dir: Path) -> None:
    program = [sys.executable, "-m", "tests.gpu.greedy_texts", str(default_model_dir), "float32"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    told = subprocess.run(program, env=environment, check=True, stdout=subprocess.PIPE, timeout=600).stdout
    expected: list[Answer] = json.loads(told.splitlines()[-1])
    assert len(expected) == len(QUESTIONS)
    for question, cpu, card in zip(QUESTIONS, expected, greedy_answers(default_model_dir, "bfloat16"), strict=True):
        assert 0 < len(cpu["tokens"]) <= LENGTH
        different = next(
            (
                place
                for place, pair in enumerate(zip(cpu["tokens"], card["tokens"], strict=False))
                if pair[0] != pair[1]
            ),
            None,
        )
        if different is None:
            assert cpu["tokens"] == card["tokens"], question
        else:  # after it the two go on with texts of their own
            print(f"{question} token {different}: {cpu['tokens'][different]!r} by {cpu['gaps'][different]:.3f}")
            assert cpu["gaps"][different] < NEAR_TIE, question
