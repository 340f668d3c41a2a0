"""Workloads that lie in files: ShareGPT's conversations and the Azure traces of language model inference."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

# As benchmarks on ShareGPT commonly do: what is shorter or longer is left out.
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048
_MOST_CONVERSATIONS = 2000


@dataclass(frozen=True)
class Task:
    """One request.

    Attributes:
        prompt, output: tokens.
        shared: tokens at the start of the prompt that every request of the workload has.
        arrival: seconds after the first request's, or None where the load decides.
        text: the prompt's own words, where the workload has them.
        json_schema: that the answer must satisfy, as JSON.
    """

    prompt: int
    output: int
    shared: int = 0
    arrival: float | None = None
    text: str | None = None
    json_schema: str | None = None


def read_sharegpt(path: str, count_tokens: Callable[[str], int]) -> tuple[Task, ...]:
    """First question and answer of each conversation, in an order shuffled by a fixed seed.

    The file is a JSON list of `{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}, ...]}`.

    Raises:
        ValueError: it is not such a file, or none of its conversations can be used.
    """
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
    if not isinstance(entries, list):
        raise ValueError(f"{path} is not in ShareGPT's format: it holds no list of conversations")
    pairs = [pair for entry in entries if (pair := _first_pair(entry)) is not None]
    order = np.random.default_rng(0).permutation(len(pairs))
    tasks: list[Task] = []
    for index in order:
        question, answer = pairs[index]
        task = Task(count_tokens(question), count_tokens(answer), text=question)
        long_enough = min(task.prompt, task.output) >= _SHORTEST
        if long_enough and task.prompt <= _LONGEST_PROMPT and task.prompt + task.output <= _LONGEST:
            tasks.append(task)
        if len(tasks) == _MOST_CONVERSATIONS:
            break
    if not tasks:
        raise ValueError(f"{path} holds no conversation of usable length in ShareGPT's format")
    return tuple(tasks)


def _first_pair(entry: Any) -> tuple[str, str] | None:
    turns = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    values = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
    return (values[0], values[1]) if isinstance(values[0], str) and isinstance(values[1], str) else None


def read_azure_trace(path: str) -> tuple[Task, ...]:
    """Requests of a trace with the columns TIMESTAMP, ContextTokens and GeneratedTokens, as Azure publishes them.

    https://github.com/Azure/AzurePublicDataset: each line is one request of a production service (arXiv:2311.18677).

    Raises:
        ValueError: a line that cannot be understood, with its number.
    """
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        wanted = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
        if reader.fieldnames is None or not wanted <= set(reader.fieldnames):
            raise ValueError(f"{path} has the columns {reader.fieldnames}; an Azure trace has {sorted(wanted)}")
        rows = [_trace_row(row, path, number) for number, row in enumerate(reader, start=2)]
    rows = sorted(row for row in rows if row[1] and row[2])
    return tuple(Task(prompt, output, arrival=time - rows[0][0]) for time, prompt, output in rows)


def _trace_row(row: dict[str, str], path: str, number: int) -> tuple[float, int, int]:
    try:
        # datetime knows microseconds; the traces have seven digits.
        time = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", row["TIMESTAMP"]))
        return time.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"])
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}, line {number} is no line of an Azure trace: {row} ({error})") from error
