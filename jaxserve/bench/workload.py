"""What a benchmark sends: pairs of prompt and output length, and prompts of random tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import cycle

import numpy as np


@dataclass(frozen=True)
class Lengths:
    """Tokens of one request."""

    prompt: int
    output: int


@dataclass(frozen=True)
class Workload:
    """A list of lengths that is sent in order, over and over."""

    name: str
    lengths: tuple[Lengths, ...]

    def __iter__(self) -> Iterator[Lengths]:
        return cycle(self.lengths)

    @property
    def mean_context(self) -> float:
        """Tokens in the cache of a running sequence, averaged over the steps of its decoding."""
        steps = sum(pair.output for pair in self.lengths)
        return sum(pair.output * (pair.prompt + pair.output / 2) for pair in self.lengths) / steps


def load_workload(name: str) -> Workload:
    """`sharegpt-like` (built in: 500 pairs of ShareGPT-like lengths), or `fixed:PROMPT/OUTPUT`.

    Raises:
        ValueError: unknown name.
    """
    if name == "sharegpt-like":
        text = resources.files("jaxserve.bench").joinpath("sharegpt_like_lengths.json").read_text()
        return Workload(name, tuple(Lengths(prompt, output) for prompt, output in json.loads(text)))
    kind, _, numbers = name.partition(":")
    prompt, _, output = numbers.partition("/")
    if kind == "fixed" and prompt.isdecimal() and output.isdecimal() and int(prompt) and int(output):
        return Workload(name, (Lengths(int(prompt), int(output)),))
    raise ValueError(f"workload {name!r} is unknown: use 'sharegpt-like' or 'fixed:PROMPT/OUTPUT' (e.g. fixed:100/500)")


def random_prompt(generator: np.random.Generator, length: int, vocab_size: int) -> list[int]:
    return generator.integers(0, vocab_size, length).tolist()
