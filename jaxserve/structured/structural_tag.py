"""Grammars of text with tagged parts: where a trigger comes, a tag follows, with JSON in it that satisfies a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.structured.errors import GrammarError
from jaxserve.structured.library_grammar import Grammar, inline_schema

_ANY_TEXT = r"/(.|\n)*/"


@dataclass(frozen=True)
class Tag:
    """A part of the text.

    Attributes:
        begin: what it opens with; its first characters are a trigger.
        schema: JSON Schema of what stands between `begin` and `end`.
        end: may be empty.
    """

    begin: str
    schema: dict[str, Any] | bool
    end: str


def structural_tag_grammar(tags: Sequence[Tag], triggers: Sequence[str], control_ids: Mapping[str, int]) -> Grammar:
    """Any text, in which each trigger is the beginning of one of the tags that begin with it.

    Args:
        tags: at least one.
        triggers: at least one.
        control_ids: the vocabulary's control tokens by their spelling: where a tag has one, the token itself comes.

    Raises:
        GrammarError: it cannot be enforced; the path names one of the two, such as "structures[0].begin".
    """
    _check_triggers(tags, triggers, control_ids)
    lines = ["%llguidance {}", "start: part* rest", "rest: TEXT", f"TEXT: {_ANY_TEXT}"]
    parts: list[str] = []
    for place, trigger in enumerate(triggers):
        bodies: list[str] = []
        for number, tag in enumerate(tags):
            if tag.begin.startswith(trigger):
                opening = _written(tag.begin[len(trigger) :], control_ids)
                bodies.append(f"{opening} value_{number} {_written(tag.end, control_ids)}".strip())
        lines.append(f"body_{place}: {' | '.join(bodies)}")
        if trigger in control_ids:
            lines.append(f"part_{place}: TEXT {_written(trigger, control_ids)} body_{place}")
        else:  # lazy: the text ends with the first trigger in it
            lines.append(f"trigger_{place}[lazy]: {_ANY_TEXT} {_written(trigger, control_ids)}")
            lines.append(f"part_{place}: trigger_{place} body_{place}")
        parts.append(f"part_{place}")
    lines.append(f"part: {' | '.join(parts)}")
    for number, tag in enumerate(tags):
        try:
            lines.append(f"value_{number}: %json {inline_schema(tag.schema)}")
        except GrammarError as error:
            path = f"structures[{number}].schema"
            raise GrammarError(str(error), f"{path}.{error.path}" if error.path else path) from error
    return Grammar("lark", "\n".join(lines) + "\n")


def _check_triggers(tags: Sequence[Tag], triggers: Sequence[str], control_ids: Mapping[str, int]) -> None:
    for place, trigger in enumerate(triggers):
        path = f"triggers[{place}]"
        if any(trigger in other for number, other in enumerate(triggers) if number != place):
            raise GrammarError(f"{trigger[:100]!r} is part of another trigger, which could never come then", path)
        if not any(tag.begin.startswith(trigger) for tag in tags):
            raise GrammarError(f"no `begin` of the structures begins with {trigger[:100]!r}", path)
        if trigger not in control_ids and _split(trigger, control_ids) != [trigger]:
            raise GrammarError(
                f"{trigger[:100]!r} has a control token of this model in it: let the trigger be that alone", path
            )
    for number, tag in enumerate(tags):
        if not any(tag.begin.startswith(trigger) for trigger in triggers):
            raise GrammarError(f"{tag.begin[:100]!r} begins with none of the triggers", f"structures[{number}].begin")


def _written(text: str, control_ids: Mapping[str, int]) -> str:
    """A text in Lark's notation."""
    return " ".join(
        f"<[{control_ids[piece]}]>" if piece in control_ids else json.dumps(piece, ensure_ascii=False)
        for piece in _split(text, control_ids)
    )


def _split(text: str, control_ids: Mapping[str, int]) -> list[str]:
    """The text cut where control tokens begin and end; the longest of those that begin at one place."""
    if not control_ids:
        return [text] if text else []
    longest_first = sorted(control_ids, key=len, reverse=True)
    pieces = re.split(f"({'|'.join(re.escape(spelling) for spelling in longest_first)})", text)
    return [piece for piece in pieces if piece]
