"""What an answer must look like: `response_format` as OpenAI has it, `structured_outputs` as vLLM does."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.validation import StrictModel, kind, supported
from jaxserve.structured.compiler import GrammarCompiler
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.grammar import CompiledGrammar, Grammar

MAX_CHOICES_LISTED = 10_000
MAX_NAME_LENGTH = 64

UNSUPPORTED_STRUCTURED_OUTPUTS: dict[str, tuple[Any, ...]] = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "disable_fallback": (True, False),  # there is none
    "structural_tag": (),
    "whitespace_pattern": (),
}


class JsonSchemaFormat(StrictModel):
    """A named JSON Schema. It is enforced to the letter whether or not it is called strict."""

    name: str = Field(min_length=1, max_length=MAX_NAME_LENGTH, pattern="^[a-zA-Z0-9_-]+$")
    description: str | None = None
    json_schema: dict[str, Any] | bool = Field(True, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """ "text" asks for nothing; "json_object" for any object; "json_schema" for a value that satisfies the schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(StrictModel):
    """One of these.

    Attributes:
        json_value: a JSON Schema, or one as text.
        regex: an expression that the whole answer matches.
        choice: texts of which the answer is one.
        grammar: in Lark's or GBNF's notation.
        json_object: any JSON object.
    """

    json_value: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = Field(None, min_length=1)
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1, max_length=MAX_CHOICES_LISTED)
    grammar: str | None = Field(None, min_length=1)
    json_object: bool | None = None


def clean_output_fields(fields: dict[str, Any]) -> None:
    """Drops what asks for nothing inside `response_format` and `structured_outputs`.

    Raises:
        BadRequestError: names a part that is not supported.
    """
    wanted = fields.get("response_format")
    if isinstance(wanted, dict):
        wanted = supported(wanted, ResponseFormat.model_fields, {}, "response_format.")
        if isinstance(wanted.get("json_schema"), dict):
            known = ("name", "description", "schema", "strict")
            wanted["json_schema"] = supported(wanted["json_schema"], known, {}, "response_format.json_schema.")
        fields["response_format"] = wanted
    wanted = fields.get("structured_outputs")
    if isinstance(wanted, dict):
        known = ("json", "regex", "choice", "grammar", "json_object")
        fields["structured_outputs"] = supported(wanted, known, UNSUPPORTED_STRUCTURED_OUTPUTS, "structured_outputs.")


def check_output_format(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> None:
    """Raises:
    BadRequestError: names the field that is missing or too much.
    """
    if response_format is not None:
        is_schema, has_schema = response_format.type == "json_schema", response_format.json_schema is not None
        if is_schema and not has_schema:
            param = "response_format.json_schema"
            raise BadRequestError(f"`{param}` is missing", param=param, code="missing_required_parameter")
        if has_schema and not is_schema:
            param = "response_format.json_schema"
            raise BadRequestError(f"`{param}` goes with type 'json_schema' only", param=param)
    if structured is None:
        return
    asked = [
        name for name, value in structured.model_dump(by_alias=True).items() if value is not None and value is not False
    ]
    if structured.json_value is False:
        asked.append("json")
    if len(asked) != 1:
        param = f"structured_outputs.{asked[1]}" if asked else "structured_outputs"
        raise BadRequestError("`structured_outputs` needs exactly one of json, regex, choice, grammar", param=param)
    if response_format is not None and response_format.type != "text":
        raise BadRequestError(
            "`structured_outputs` and `response_format` exclude each other", param="structured_outputs"
        )


def wanted_grammar(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> tuple[Grammar, str] | None:
    """The grammar of an answer, and what errors call it; None: anything goes.

    Raises:
        BadRequestError: a schema that came as text is no JSON.
    """
    if response_format is not None and response_format.type == "json_object":
        return Grammar.of_schema({"type": "object"}), "response_format"
    if response_format is not None and response_format.json_schema is not None:
        return Grammar.of_schema(response_format.json_schema.json_schema), "response_format.json_schema.schema"
    if structured is None:
        return None
    if structured.regex is not None:
        return Grammar("regex", structured.regex), "structured_outputs.regex"
    if structured.choice is not None:
        return Grammar.of_choices(structured.choice), "structured_outputs.choice"
    if structured.grammar is not None:
        return Grammar("grammar", structured.grammar), "structured_outputs.grammar"
    if structured.json_object:
        return Grammar.of_schema({"type": "object"}), "structured_outputs.json_object"
    return Grammar.of_schema(_parsed_schema(structured.json_value)), "structured_outputs.json"


async def compile_wanted(compiler: GrammarCompiler, grammar: Grammar, param: str) -> CompiledGrammar:
    """Raises:
    BadRequestError: it cannot be enforced; names the part at fault.
    """
    try:
        return await compiler.compile(grammar)
    except GrammarError as error:
        place = f"{param}.{error.path}" if error.path else param
        raise BadRequestError(f"`{place}`: {error}", param=place, code="invalid_grammar") from error


def _parsed_schema(value: dict[str, Any] | bool | str | None) -> dict[str, Any] | bool:
    if not isinstance(value, str):
        return True if value is None else value
    param = "structured_outputs.json"
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"`{param}` is no JSON: {error}", param=param) from None
    if not isinstance(parsed, (dict, bool)):
        raise BadRequestError(f"`{param}` must be a schema, not {kind(parsed)}", param=param)
    return parsed
