"""How answers of a chat are drawn: the flags of `jaxserve chat`, and what `/set` changes."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from jaxserve.sampling_params import SamplingParams

MAX_STOPS = 4  # as in OpenAI's API
_ESCAPES = {"n": "\n", "t": "\t"}


@dataclass(frozen=True)
class ChatSettings:
    """Sampling of the next answers, as `SamplingParams` has it, plus stop strings.

    Raises:
        ValueError: names the setting, its value and the range.
    """

    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        numbers = dataclasses.asdict(self)
        del numbers["stop"]
        SamplingParams(**numbers)  # checks the ranges
        if len(self.stop) > MAX_STOPS:
            raise ValueError(f"stop has {len(self.stop)} strings: at most {MAX_STOPS} can be given")
        if "" in self.stop:
            raise ValueError("stop holds an empty string, which would end every answer at once")

    def text(self) -> str:
        """In the syntax of `/set`."""
        values = dataclasses.asdict(self)
        values["stop"] = ",".join(_escaped(stop) for stop in self.stop)
        return ";".join(f"{name}={'none' if value is None else value}" for name, value in values.items())


def with_overrides(settings: ChatSettings, text: str) -> ChatSettings:
    """The settings after `/set TEXT`, where TEXT is like `temperature=0.5;seed=1;stop=a,b`.

    A backslash takes the meaning from the `,`, `;` or backslash after it; `\\n` and `\\t` are a new line and a tab.
    `seed=none` and `max_tokens=none` unset; `stop=` clears.

    Raises:
        ValueError: an unknown setting, a value that is none of its kind, or one out of range. Nothing is changed then.
    """
    changes: dict[str, Any] = {}
    for override in _split(text, ";"):
        if not override.strip():
            continue
        name, equals, value = override.partition("=")
        name = name.strip()
        if not equals:
            raise ValueError(f"{override.strip()!r} is no setting: write NAME=VALUE, as in temperature=0.5;seed=1")
        if name not in _PARSERS:
            raise ValueError(f"unknown setting {name!r}: there are {', '.join(_PARSERS)}")
        changes[name] = _PARSERS[name](name, value)
    return dataclasses.replace(settings, **changes)


def _float(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{name}={value.strip()!r} is no number") from None


def _int(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name}={value.strip()!r} is no whole number") from None


def _optional_int(name: str, value: str) -> int | None:
    return None if value.strip().lower() in ("", "none") else _int(name, value)


def _stops(name: str, value: str) -> tuple[str, ...]:
    del name
    return tuple(_unescaped(stop) for stop in _split(value, ",")) if value else ()


_PARSERS = {
    "temperature": _float,
    "top_p": _float,
    "top_k": _int,
    "min_p": _float,
    "seed": _optional_int,
    "max_tokens": _optional_int,
    "stop": _stops,
}


def _split(text: str, separator: str) -> list[str]:
    """Cuts at separators that no backslash precedes; the backslashes stay."""
    parts = [""]
    for piece in re.findall(r"\\.|\\$|[^\\]", text, flags=re.DOTALL):
        if piece == separator:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), text, flags=re.DOTALL)


def _escaped(text: str) -> str:
    escaped = re.sub(r"([\\,;])", r"\\\1", text)
    return escaped.replace("\n", "\\n").replace("\t", "\\t")
