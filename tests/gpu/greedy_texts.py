"""Greedy answers of a model to ten questions, printed as JSON: `python -m tests.gpu.greedy_texts FOLDER DTYPE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TypedDict, cast

from jaxserve import Engine
from jaxserve.config import DType, EngineConfig

QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about a lighthouse.",
    "List the first ten prime numbers.",
    "Translate 'good morning' into Spanish, German and Italian.",
    "What is the difference between a list and a tuple in Python?",
    "Tell me a short story about a dog that learns to swim.",
    "How do I boil an egg?",
    "Name three inventions of the nineteenth century and say who made them.",
    "If a train leaves at nine and arrives at half past eleven, how long does it take?",
)
LENGTH = 64


class Answer(TypedDict):
    """Its tokens, and by how much each was likelier than the next likely, as a difference of log probabilities."""

    tokens: list[str]
    gaps: list[float]


def greedy_answers(folder: Path, dtype: DType) -> list[Answer]:
    answers: list[Answer] = []
    with Engine(str(folder), EngineConfig(max_model_len=512, max_num_seqs=4, dtype=dtype)) as engine:
        for question in QUESTIONS:
            completion = engine.chat.completions.create(
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=LENGTH,
                logprobs=True,
                top_logprobs=2,
            )
            logprobs = completion.choices[0].logprobs
            assert logprobs is not None and logprobs.content is not None
            answers.append(
                {
                    "tokens": [entry.token for entry in logprobs.content],
                    "gaps": [
                        entry.top_logprobs[0].logprob - entry.top_logprobs[1].logprob for entry in logprobs.content
                    ],
                }
            )
    return answers


if __name__ == "__main__":
    print(json.dumps(greedy_answers(Path(sys.argv[1]), cast(DType, sys.argv[2]))))
