"""Checks that every route's parsing shares: which fields are known, what their values may be, how errors name them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from jaxserve.protocol.errors import BadRequestError

RequestT = TypeVar("RequestT", bound=BaseModel)
Neutral = Mapping[str, tuple[Any, ...]]


class StrictModel(BaseModel):
    """Types as they are written: "5", 1.5 and true are no integers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def supported(body: Mapping[str, Any], known: Iterable[str], unsupported: Neutral, path: str) -> dict[str, Any]:
    """The fields that ask for something this server does; the rest asks for nothing, or is refused."""
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            fields[name] = value
        elif name not in unsupported:
            raise BadRequestError(
                f"unknown field `{path}{name[:100]}`{_suggestion(name, known)}",
                param=f"{path}{name[:100]}",
                code="unknown_parameter",
            )
        elif not _asks_for_nothing(value, unsupported[name]):
            raise BadRequestError(
                f"`{path}{name}` is not supported by this server; leave it out",
                param=f"{path}{name}",
                code="unsupported_parameter",
            )
    return fields


def _asks_for_nothing(value: object, neutral: tuple[Any, ...]) -> bool:
    return any(isinstance(value, bool) == isinstance(item, bool) and value == item for item in neutral)


def _suggestion(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name[:100], list(known), n=1)
    return f": did you mean `{close[0]}`?" if close else ""


def validate(model: type[RequestT], fields: dict[str, Any]) -> RequestT:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _bad_request(first, fields) from None


def _bad_request(error: ErrorDetails, fields: dict[str, Any]) -> BadRequestError:
    # The step before it is the key itself, unless a client calls one so.
    is_key = error["loc"][-1:] == ("[key]",) and error["loc"][-2:-1] == (error["input"],)
    param = _path(error["loc"][:-2] if is_key else error["loc"], fields)
    if error["type"] == "missing":
        return BadRequestError(f"`{param}` is missing", param=param, code="missing_required_parameter")
    message = error["msg"][:1].lower() + error["msg"][1:].replace(" after validation", "")
    if error["type"] not in ("too_long", "too_short"):  # these say already what was found
        message += f", not {shown(error['input'])}"
    return BadRequestError(f"`{param}`: {'key: ' if is_key else ''}{message}", param=param)


def _path(location: tuple[int | str, ...], fields: object) -> str:
    """`messages[0].content`: the part of pydantic's location that the client wrote (it adds names of union members)."""
    path = ""
    for step in location:
        if isinstance(step, int):
            if not isinstance(fields, list):
                break
            path += f"[{step}]"
            fields = fields[step] if step < len(fields) else None
        else:
            if not isinstance(fields, dict):
                break
            path += f".{step}" if path else step
            fields = fields.get(step)
    return path


def shown(value: object) -> str:
    if isinstance(value, (dict, list, bool)) or value is None:
        return f"a list of {len(value)}" if isinstance(value, list) else kind(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
