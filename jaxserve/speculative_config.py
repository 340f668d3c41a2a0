"""How tokens are drafted for the model to verify: frozen and validated. Field names follow vLLM's."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

SpeculativeMethod = Literal["ngram", "draft_model", "early_exit", "eagle", "eagle3", "medusa"]

# Heads that are trained for one model, and read its hidden states.
HEAD_METHODS: tuple[SpeculativeMethod, ...] = ("eagle", "eagle3", "medusa")
MAX_SPECULATIVE_TOKENS = 32  # more are never accepted often enough to pay
MAX_LOOKUP = 32  # a longer run finds nothing that this one does not, and each token of it makes programs larger
_DEFAULT_LOOKUP_MAX, _DEFAULT_LOOKUP_MIN = 4, 2
_SHOWN = 200  # characters of a wrong value

# Which fields mean something to which methods.
_FIELDS_OF: dict[str, tuple[SpeculativeMethod, ...]] = {
    "model": ("draft_model", *HEAD_METHODS),
    "quantization": ("draft_model",),
    "num_layers": ("early_exit",),
    "prompt_lookup_max": ("ngram",),
    "prompt_lookup_min": ("ngram",),
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """Which drafter there is, and how far it looks ahead.

    Attributes:
        method: "ngram": what followed the last tokens where they stood before, in the prompt or the answer (prompt lookup,
            https://arxiv.org/abs/2304.04487); "draft_model": a small model with the same vocabulary
            (https://arxiv.org/abs/2211.17192); "early_exit": the first layers of the model itself;
            "eagle" (https://arxiv.org/abs/2401.15077), "eagle3" (https://arxiv.org/abs/2503.01840) and "medusa"
            (https://arxiv.org/abs/2401.10774): heads that were trained for the model.
        num_speculative_tokens: drafted for each sequence in a step at most.
        model: of the drafts: a known name, a folder or file, or hf:ORG/NAME (draft_model); of the head: a folder or
            hf:ORG/NAME (eagle, eagle3, medusa).
        quantization: what the draft model's weights are made into as they are loaded (draft_model).
        num_layers: how many of the model's layers draft; None: a quarter of them (early_exit).
        prompt_lookup_max, prompt_lookup_min: longest and shortest run of last tokens that is looked for (ngram). Only one
            of them given: the other is the same.
        adaptive: draft fewer tokens, or none, where more would not pay; else always as many as there is room for.
        synthetic_acceptance: every draft is accepted with this probability, whatever the model thinks of it: for benchmarks
            with random weights; None: drafts are verified.

    Raises:
        ValueError: names the field, its value and the remedy.
    """

    method: SpeculativeMethod
    num_speculative_tokens: int
    model: str | None = None
    quantization: str | None = None
    num_layers: int | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    adaptive: bool = True
    synthetic_acceptance: float | None = None

    def __post_init__(self) -> None:
        if self.method not in get_args(SpeculativeMethod):
            raise ValueError(
                f"speculative method={self.method!r} must be one of {', '.join(get_args(SpeculativeMethod))}"
            )
        if not _is_int(self.num_speculative_tokens) or not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens!r} must be a number from 1 to "
                f"{MAX_SPECULATIVE_TOKENS}"
            )
        if self.model is not None and not isinstance(self.model, str):
            raise ValueError(f"speculative model={self.model!r} must be a text: a name or folder, or hf:ORG/NAME")
        for name, methods in _FIELDS_OF.items():
            if getattr(self, name) is not None and self.method not in methods:
                raise ValueError(
                    f"speculative {name}={getattr(self, name)!r} means nothing to method {self.method!r}: leave it out, "
                    f"or use {' or '.join(repr(method) for method in methods)}"
                )
        if self.method == "draft_model" and not self.model:
            raise ValueError('speculative method "draft_model" needs "model": a name or folder, of the same vocabulary')
        if self.method in HEAD_METHODS and not self.model:
            raise ValueError(
                f'speculative method "{self.method}" needs "model": the folder or hf:ORG/NAME of a head trained for it'
            )
        if self.num_layers is not None and (not _is_int(self.num_layers) or self.num_layers < 1):
            raise ValueError(f"speculative num_layers={self.num_layers!r} must be at least 1")
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"speculative adaptive={self.adaptive!r} must be true or false")
        self._check_lookup()
        accepted = self.synthetic_acceptance
        if accepted is not None and not (isinstance(accepted, (int, float)) and 0.0 <= accepted <= 1.0):
            raise ValueError(f"speculative_synthetic_acceptance={accepted!r} must lie in 0..1")

    def _check_lookup(self) -> None:
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or not 1 <= value <= MAX_LOOKUP):
                raise ValueError(f"{name}={value!r} must be a number from 1 to {MAX_LOOKUP}")
        if self.longest_lookup < self.shortest_lookup:
            raise ValueError(
                f"prompt_lookup_max={self.prompt_lookup_max} must not be below prompt_lookup_min={self.prompt_lookup_min}"
            )

    @property
    def longest_lookup(self) -> int:
        """Last tokens at most that prompt lookup looks for."""
        return self.prompt_lookup_max or self.prompt_lookup_min or _DEFAULT_LOOKUP_MAX

    @property
    def shortest_lookup(self) -> int:
        """Last tokens at least that prompt lookup looks for."""
        return self.prompt_lookup_min or self.prompt_lookup_max or _DEFAULT_LOOKUP_MIN

    @staticmethod
    def from_json(text: str, *, synthetic_acceptance: float | None = None) -> SpeculativeConfig:
        """What `--speculative-config` says.

        Raises:
            ValueError: it is no JSON object, lacks a field, has an unknown one, or a wrong value.
        """
        shown = repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
        try:
            values: Any = json.loads(text)
        except (ValueError, RecursionError) as error:  # the latter where it is nested too deeply
            raise ValueError(
                f"--speculative-config {shown} is not JSON ({error}); it should look like "
                '\'{"method": "ngram", "num_speculative_tokens": 4}\''
            ) from error
        if not isinstance(values, dict):
            raise ValueError(f"--speculative-config {shown} must be a JSON object")
        known = [field.name for field in dataclasses.fields(SpeculativeConfig) if field.name != "synthetic_acceptance"]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"--speculative-config has unknown fields {unknown}; known ones: {', '.join(known)}")
        missing = [name for name in ("method", "num_speculative_tokens") if name not in values]
        if missing:
            raise ValueError(f"--speculative-config {shown} lacks {' and '.join(missing)}")
        return SpeculativeConfig(**values, synthetic_acceptance=synthetic_acceptance)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
