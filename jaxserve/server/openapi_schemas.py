"""JSON Schemas of request and response bodies, from the types that validate and make them.

pydantic knows the types; the rules that parsing adds are put on top, so that what a schema forbids is refused and what
it allows is understood:

* null is the same as absent, for every optional field and even for fields that nobody knows;
* fields that are not supported may hold the values that ask for nothing;
* unions that are checked by hand (prompts, contents, stop strings) have their forms spelled out.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from jaxserve.protocol.messages import UNSUPPORTED_MESSAGE
from jaxserve.protocol.output_format import MAX_NAME_LENGTH, UNSUPPORTED_RESPONSE_FORMAT, UNSUPPORTED_STRUCTURED_OUTPUTS
from jaxserve.protocol.requests import (
    MAX_MESSAGES,
    MAX_PROMPT_TOKEN_IDS,
    MAX_PROMPTS,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    UNSUPPORTED_STREAM_OPTIONS,
)
from jaxserve.protocol.responses_api_requests import UNSUPPORTED_RESPONSES
from jaxserve.protocol.responses_api_tools import UNSUPPORTED_FUNCTION, UNSUPPORTED_TEXT
from jaxserve.protocol.tokenize_requests import UNSUPPORTED_TOKENIZE_CHAT
from jaxserve.sampling_params import MAX_LOGIT_BIAS

Schema = dict[str, Any]

_TEXT_PART: Schema = {"$ref": "#/components/schemas/TextPart"}
_TOKEN_IDS: Schema = {
    "type": "array", "minItems": 1, "maxItems": MAX_PROMPT_TOKEN_IDS, "items": {"type": "integer", "minimum": 0},
}  # fmt: skip
_STOP_STRING: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_LENGTH}

# Fields that are checked by hand, in whichever request they stand: what they may be, null apart.
_BY_HAND: dict[str, Schema] = {
    "content": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _TEXT_PART}]},
    "logit_bias": {
        "type": "object",
        "maxProperties": MAX_LOGIT_BIAS,
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "structural_tag": {"anyOf": [{"type": "string"}, {"$ref": "#/components/schemas/StructuralTag"}]},
    "stop": {"anyOf": [_STOP_STRING, {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": _STOP_STRING}]},
}
_PROMPT: Schema = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string"}},
        _TOKEN_IDS,
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _TOKEN_IDS},
    ]
}

_INPUT_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {
        "type": {"enum": ["input_text", "output_text", "text"]}, "text": {"type": "string"}, "annotations": {},
        "logprobs": {},
    },
    "additionalProperties": {"type": "null"},
}  # fmt: skip
_CALL_ID: Schema = {"type": "string", "minLength": 1}
_INPUT_MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _INPUT_PART}]},
        "id": {}, "status": {}, "phase": {},
    },
    "additionalProperties": {"type": "null"},
}  # fmt: skip

_NULL: Schema = {"type": "null"}
_FORMATS: list[Schema] = [
    {
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"enum": ["text", "json_object"]}},
        "additionalProperties": _NULL,
    },
    {
        "type": "object",
        "required": ["type", "name", "schema"],
        "properties": {
            "type": {"const": "json_schema"},
            "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_LENGTH, "pattern": "^[a-zA-Z0-9_-]+$"},
            "schema": {"type": ["object", "boolean"]},
            "description": {"type": ["string", "null"]},
            "strict": {"type": ["boolean", "null"]},
        },
        "additionalProperties": _NULL,
    },
]
_OUTPUT: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _INPUT_PART}]}


def _input_item(form: str, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "required": ["type", *properties],
        "properties": {"type": {"const": form}, "id": {}, "status": {}, "phase": {}, **properties},
        "additionalProperties": {"type": "null"},
    }


_INPUT_ITEMS: list[Schema] = [
    _INPUT_MESSAGE,
    _input_item("function_call", call_id=_CALL_ID, name={"type": "string"}, arguments={"type": "string"}),
    _input_item("function_call_output", call_id=_CALL_ID, output=_OUTPUT),
]

# Schema -> fields that it alone has, checked by hand.
_BY_HAND_OF: dict[str, dict[str, Schema]] = {
    "CompletionRequest": {"prompt": _PROMPT},
    "DetokenizeRequest": {"tokens": {**_TOKEN_IDS, "minItems": 0}},
    "ResponsesRequest": {
        "input": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": {"anyOf": _INPUT_ITEMS}},
            ]
        }
    },
    "AskedText": {"format": {"anyOf": [*_FORMATS, {"type": "null"}]}},
}

# Schema -> fields that are no error while they ask for nothing, with the values that do. Each of these is read by
# `validation.supported`, which drops null; schemas that are not listed are pydantic's own and forbid it.
_LENIENT: dict[str, Mapping[str, tuple[Any, ...]]] = {
    "ChatCompletionRequest": UNSUPPORTED_CHAT,
    "CompletionRequest": UNSUPPORTED_COMPLETION,
    "StreamOptions": UNSUPPORTED_STREAM_OPTIONS,
    "ResponseFormat": UNSUPPORTED_RESPONSE_FORMAT,
    "StructuralTag": UNSUPPORTED_RESPONSE_FORMAT,
    "JsonSchemaFormat": {},
    "StructuredOutputs": UNSUPPORTED_STRUCTURED_OUTPUTS,
    "Tool": {},
    "FunctionTool": {},
    "NamedToolChoice": {},
    "ChatMessage": UNSUPPORTED_MESSAGE,
    "TextPart": {},
    "ResponsesRequest": UNSUPPORTED_RESPONSES,
    "ResponsesFunction": UNSUPPORTED_FUNCTION,
    "NamedResponsesFunction": {},
    "AskedText": UNSUPPORTED_TEXT,
    "TokenizeTextRequest": {},
    "TokenizeChatRequest": UNSUPPORTED_TOKENIZE_CHAT,
    "DetokenizeRequest": {},
}


def request_schemas(models: list[type[BaseModel]]) -> dict[str, Schema]:
    """Schemas of request bodies and of all that they are made of, by name."""
    schemas = _pydantic_schemas(models)
    for name, neutral in _LENIENT.items():
        if name in schemas:
            schemas[name] = _lenient(schemas[name], neutral)
    for name, fields in _BY_HAND_OF.items():
        if name in schemas:
            schemas[name]["properties"] |= fields
    return schemas


def response_schemas(models: list[type[BaseModel]]) -> dict[str, Schema]:
    """Schemas of answers and of all that they are made of, by name: nothing stands in an answer that is not described."""
    schemas = _pydantic_schemas(models)
    for schema in schemas.values():
        if schema.get("type") == "object":
            schema.setdefault("additionalProperties", False)
    return schemas


def _pydantic_schemas(models: list[type[BaseModel]]) -> dict[str, Schema]:
    # "validation" for answers too: there a field with a default may be absent, as it is when it was not set.
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    return definitions.get("$defs", {})


def _lenient(schema: Schema, neutral: Mapping[str, tuple[Any, ...]]) -> Schema:
    required = set(schema.get("required", ()))
    properties: dict[str, Schema] = {}
    for name, field in schema["properties"].items():
        described: Schema = copy.deepcopy(_BY_HAND.get(name) or field)
        properties[name] = described if name in required else _or_null(described)
    for name, values in neutral.items():
        properties[name] = {
            "enum": [*values, None],
            "description": "Not supported: only values that ask for nothing are taken.",
        }
    return {**schema, "properties": properties, "additionalProperties": {"type": "null"}}


def _or_null(field: Schema) -> Schema:
    notes = {key: field[key] for key in ("default", "description", "title") if key in field}
    rest = {key: value for key, value in field.items() if key not in notes}
    options = rest.pop("anyOf", None) or [rest]
    if {"type": "null"} not in options:
        options = [*options, {"type": "null"}]
    return {**notes, "anyOf": options}
