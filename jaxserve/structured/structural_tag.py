"""Grammars of text with tagged parts: where a trigger comes, a tag follows, with JSON in it that satisfies a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxserve.structured.errors import GrammarError
from jaxserve.structured.grammar_source import Grammar, json_text
from jaxserve.structured.json_schema import inline_schema

_ANY_TEXT = r"/(.|\n)*/"


@dataclass(frozen=True)
class Tag:
    """A part of the text.

    Attributes:
        begin: what it opens with; its first characters are a trigger.
        schema: JSON Schema of what stands between `begin` and `end`, as `json_text` writes it.
        end: may be empty.
    """

    begin: str
    schema: str
    end: str


def structural_tag_grammar(tags: Sequence[Tag], triggers: Sequence[str], control_ids: Mapping[str, int]) -> Grammar:
    """Any text, in which each trigger is the beginning of one of the tags that begin with it.

    Args:
        tags: at least one.
        triggers: at least one.
        control_ids: the vocabulary's control tokens by their spelling: where a tag has one, the token itself comes.

    Whether it can be enforced is found out where it is compiled: the path of what is wrong then names one of the two, such
    as "structures[0].begin".
    """
    begins, ends = [tag.begin for tag in tags], [tag.end for tag in tags]
    form = {"begins": begins, "ends": ends, "triggers": list(triggers), "control_ids": dict(control_ids)}
    # Of parts that are JSON already: others wait until it is written.
    return Grammar("tags", f'{{"form":{json_text(form)},"schemas":[{",".join(tag.schema for tag in tags)}]}}')


def structural_tag_lark(source: str) -> str:
    """What `structural_tag_grammar` has made, in Lark's notation. It takes a tenth of a second for long ones.

    Raises:
        GrammarError: it cannot be enforced.
    """
    asked = json.loads(source)
    form = asked["form"]
    begins, triggers, control_ids = form["begins"], form["triggers"], form["control_ids"]
    _check_triggers(begins, triggers, control_ids)
    lines = ["%llguidance {}", "start: part* rest", "rest: TEXT", f"TEXT: {_ANY_TEXT}"]
    parts: list[str] = []
    for place, trigger in enumerate(triggers):
        bodies: list[str] = []
        for number, begin in enumerate(begins):
            if begin.startswith(trigger):
                opening = _written(begin[len(trigger) :], control_ids)
                bodies.append(f"{opening} value_{number} {_written(form['ends'][number], control_ids)}".strip())
        lines.append(f"body_{place}: {' | '.join(bodies)}")
        if trigger in control_ids:
            lines.append(f"part_{place}: TEXT {_written(trigger, control_ids)} body_{place}")
        else:  # lazy: the text ends with the first trigger in it
            lines.append(f"trigger_{place}[lazy]: {_ANY_TEXT} {_written(trigger, control_ids)}")
            lines.append(f"part_{place}: trigger_{place} body_{place}")
        parts.append(f"part_{place}")
    lines.append(f"part: {' | '.join(parts)}")
    for number, schema in enumerate(asked["schemas"]):
        try:
            lines.append(f"value_{number}: %json {inline_schema(schema)}")
        except GrammarError as error:
            path = f"structures[{number}].schema"
            raise GrammarError(str(error), f"{path}.{error.path}" if error.path else path) from error
    return "\n".join(lines) + "\n"


def _check_triggers(begins: Sequence[str], triggers: Sequence[str], control_ids: Mapping[str, int]) -> None:
    for place, trigger in enumerate(triggers):
        path = f"triggers[{place}]"
        if any(trigger in other for number, other in enumerate(triggers) if number != place):
            raise GrammarError(f"{trigger[:100]!r} is part of another trigger, which could never come then", path)
        if not any(begin.startswith(trigger) for begin in begins):
            raise GrammarError(f"no `begin` of the structures begins with {trigger[:100]!r}", path)
        if trigger not in control_ids and _split(trigger, control_ids) != [trigger]:
            raise GrammarError(
                f"{trigger[:100]!r} has a control token of this model in it: let the trigger be that alone", path
            )
    for number, begin in enumerate(begins):
        if not any(begin.startswith(trigger) for trigger in triggers):
            raise GrammarError(f"{begin[:100]!r} begins with none of the triggers", f"structures[{number}].begin")


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
