"""What a benchmark sends: sizes of prompts and answers, with arrival times or texts where the source has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources

import numpy as np

from jaxserve.bench.workload_files import Task, read_azure_trace, read_sharegpt

HELP = (
    "sharegpt-like, sharegpt:FILE, fixed:PROMPT/OUTPUT, shared-prefix:TOKENS, long-among-short:TOKENS, azure:FILE, "
    "json-schema"
)

_LONG_EVERY = 16  # requests, of which one has the long prompt
_SHORT = Task(100, 200)
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 40}, "city": {"type": "string", "maxLength": 20}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
_SCHEMA_QUESTION = "Invent person number {number}: answer with a JSON object of name, age, tags and address."


@dataclass(frozen=True)
class Workload:
    """A list of tasks that is sent in order, over and over."""

    name: str
    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError(f"workload {self.name!r} holds no request")

    def task(self, index: int) -> Task:
        return self.tasks[index % len(self.tasks)]

    @property
    def has_arrivals(self) -> bool:
        """Whether it says when each request is sent."""
        return self.tasks[0].arrival is not None

    @property
    def needs_text(self) -> bool:
        """Whether its requests can only be sent as text, and so not to an engine without its text side."""
        return self.tasks[0].json_schema is not None

    @property
    def mean_context(self) -> float:
        """Tokens in the cache of a running sequence, averaged over the steps of its decoding."""
        steps = sum(task.output for task in self.tasks)
        return sum(task.output * (task.prompt + task.output / 2) for task in self.tasks) / steps

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and answer together."""
        return max(task.prompt + task.output for task in self.tasks)

    def fitting(self, max_model_len: int) -> Workload:
        """Without the requests that are too long for the model.

        Raises:
            ValueError: all of them are.
        """
        kept = tuple(task for task in self.tasks if task.prompt + task.output <= max_model_len)
        if not kept:
            raise ValueError(
                f"no request of workload {self.name!r} fits {max_model_len} tokens: raise --max-model-len or take another"
            )
        return replace(self, tasks=kept)


def load_workload(name: str, *, count_tokens: Callable[[str], int] | None = None) -> Workload:
    """A workload by its name, as `HELP` lists them.

    Args:
        count_tokens: of a text, for workloads that hold texts; None: one token is taken to be four characters.

    Raises:
        ValueError: unknown name, or a file that is not what it should be.
        OSError: the file cannot be read.
    """
    kind, _, argument = name.partition(":")
    if name == "sharegpt-like":
        return Workload(name, _sharegpt_like())
    if kind == "sharegpt" and argument:
        return Workload(name, read_sharegpt(argument, count_tokens or (lambda text: max(1, len(text) // 4))))
    if kind == "azure" and argument:
        return Workload(name, read_azure_trace(argument))
    if kind == "fixed":
        prompt, _, output = argument.partition("/")
        if prompt.isdecimal() and output.isdecimal() and int(prompt) and int(output):
            return Workload(name, (Task(int(prompt), int(output)),))
    if kind == "shared-prefix" and _is_count(argument or "512"):
        shared = int(argument or 512)
        return Workload(
            name, tuple(replace(task, prompt=task.prompt + shared, shared=shared) for task in _sharegpt_like())
        )
    if kind == "long-among-short" and _is_count(argument or "4096"):
        return Workload(name, (*[_SHORT] * (_LONG_EVERY - 1), Task(int(argument or 4096), 200)))
    if name == "json-schema":
        schema = json.dumps(_SCHEMA)
        return Workload(
            name,
            tuple(
                Task(30, 120, text=_SCHEMA_QUESTION.format(number=number), json_schema=schema) for number in range(100)
            ),
        )
    raise ValueError(f"workload {name!r} is unknown: use one of {HELP} (such as fixed:100/500)")


def _is_count(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def _sharegpt_like() -> tuple[Task, ...]:
    text = resources.files("jaxserve.bench").joinpath("sharegpt_like_lengths.json").read_text()
    return tuple(Task(prompt, output) for prompt, output in json.loads(text))


class Prompts:
    """Makes the token ids of prompts: random ones, the same for the same seed and request.

    They are pieces of one row of random ids that is drawn beforehand: making a prompt is so cheap that it can be done where
    an answer has just ended.

    Args:
        end, first: ids are drawn from first .. end - 1.
    """

    def __init__(self, end: int, *, first: int = 0, longest: int = 8192, seed: int = 0) -> None:
        if not 0 <= first < end:
            raise ValueError(f"token ids {first}..{end - 1} are no range to draw prompts from")
        self._pool = np.random.default_rng(seed).integers(first, end, max(_POOL, 2 * longest)).tolist()

    def token_ids(self, task: Task, index: int) -> list[int]:
        """The prompt of the `index`-th request; its first `task.shared` tokens are those of every other request."""
        own = task.prompt - task.shared
        start = (index + 1) * _STRIDE % (len(self._pool) - own)
        return self._pool[: task.shared] + self._pool[start : start + own]

    def text(self, task: Task, index: int) -> str:
        """A prompt of about as many tokens: short common words, of which most vocabularies make one token each."""
        if task.text is not None:
            return task.text
        return " ".join(_WORDS[token % len(_WORDS)] for token in self.token_ids(task, index))


_POOL = 2**18
_STRIDE = 40503  # a prime: neighbours share nothing
_WORDS = (
    "the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "on", "are", "as", "with", "his", "they", "at", "be",
    "this", "from", "have", "or", "by", "one", "had", "not", "but", "what", "all", "were", "when", "we", "there", "can",
)  # fmt: skip
