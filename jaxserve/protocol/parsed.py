"""Answers as objects of a pydantic class, for the Python API: the class's schema in, its objects out."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from jaxserve.protocol.responses import ChatChoice, ChatCompletion


def class_of(options: dict[str, Any]) -> type[BaseModel] | None:
    """The pydantic class that `response_format` is, if it is one."""
    wanted = options.get("response_format")
    return wanted if isinstance(wanted, type) and issubclass(wanted, BaseModel) else None


def with_schema(options: dict[str, Any], wanted: type[BaseModel]) -> dict[str, Any]:
    """The options as a client of the server would send them: the class as its JSON Schema.

    Objects get no other properties than the class has, unless it allows them.
    """
    schema = _closed(wanted.model_json_schema())
    name = "".join(character if character.isascii() and character.isalnum() else "_" for character in wanted.__name__)
    described = {"name": name[:64], "schema": schema, "strict": True}
    return {**options, "response_format": {"type": "json_schema", "json_schema": described}}


def with_parsed(completion: ChatCompletion, wanted: type[BaseModel]) -> ChatCompletion:
    """The completion, with `message.parsed` on each choice that is whole; None on one that was cut, or calls tools.

    Raises:
        pydantic.ValidationError: a validator of the class refuses what its schema allows.
    """
    choices = [_parsed_choice(choice, wanted) for choice in completion.choices]
    return completion.model_copy(update={"choices": choices})


def _parsed_choice(choice: ChatChoice, wanted: type[BaseModel]) -> ChatChoice:
    message = choice.message
    if choice.finish_reason != "stop" or not message.content or message.tool_calls:
        return choice
    parsed = wanted.model_validate_json(message.content)
    return choice.model_copy(update={"message": message.model_copy(update={"parsed": parsed})})


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        key: value if key in ("default", "const", "enum", "examples") else _closed(value)
        for key, value in schema.items()
    }
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed
