"""What an answer must look like: `response_format` as OpenAI has it, `structured_outputs` as vLLM does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from jaxserve.constraint import Constraint
from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.validation import StrictModel, kind, supported
from jaxserve.structured.compiler import Compiler
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.grammar_source import Grammar
from jaxserve.structured.structural_tag import Tag, structural_tag_grammar

MAX_CHOICES_LISTED = 10_000
MAX_NAME_LENGTH = 64
MAX_STRUCTURES = 128
MAX_TAG_LENGTH = 1000  # characters of what a tag begins or ends with

UNSUPPORTED_STRUCTURED_OUTPUTS: dict[str, tuple[Any, ...]] = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "disable_fallback": (True, False),  # there is none
    "whitespace_pattern": (),
}
UNSUPPORTED_RESPONSE_FORMAT: dict[str, tuple[Any, ...]] = {"format": ()}  # a newer form of structural tags


class JsonSchemaFormat(StrictModel):
    """A named JSON Schema. It is enforced to the letter whether or not it is called strict."""

    name: str = Field(min_length=1, max_length=MAX_NAME_LENGTH, pattern="^[a-zA-Z0-9_-]+$")
    description: str | None = None
    json_schema: dict[str, Any] | bool = Field(True, alias="schema")
    strict: bool | None = None


TagText = Annotated[str, Field(min_length=1, max_length=MAX_TAG_LENGTH)]


class TagStructure(StrictModel):
    """A part of the text: `begin`, JSON that satisfies the schema, `end`."""

    begin: TagText
    json_schema: dict[str, Any] | bool = Field(alias="schema")
    end: str = Field(max_length=MAX_TAG_LENGTH)


class StructuralTag(StrictModel):
    """Any text, in which one of the structures follows wherever a trigger comes, with which it begins."""

    type: Literal["structural_tag"]
    structures: list[TagStructure] = Field(min_length=1, max_length=MAX_STRUCTURES)
    triggers: list[TagText] = Field(min_length=1, max_length=MAX_STRUCTURES)


class ResponseFormat(StrictModel):
    """ "text" asks for nothing; "json_object" for any object; "json_schema" for a value that satisfies the schema;
    "structural_tag" for text with such values in it.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[TagStructure] | None = Field(None, min_length=1, max_length=MAX_STRUCTURES)
    triggers: list[TagText] | None = Field(None, min_length=1, max_length=MAX_STRUCTURES)


class StructuredOutputs(StrictModel):
    """One of these.

    Attributes:
        json_value: a JSON Schema, or one as text.
        regex: an expression that the whole answer matches.
        choice: texts of which the answer is one.
        grammar: in Lark's or GBNF's notation.
        json_object: any JSON object.
        structural_tag: text with tagged parts; clients may send it as JSON text.
    """

    json_value: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = Field(None, min_length=1)
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1, max_length=MAX_CHOICES_LISTED)
    grammar: str | None = Field(None, min_length=1)
    json_object: bool | None = None
    structural_tag: StructuralTag | None = None


def clean_output_fields(fields: dict[str, Any]) -> None:
    """Drops what asks for nothing inside `response_format` and `structured_outputs`.

    Raises:
        BadRequestError: names a part that is not supported.
    """
    wanted = fields.get("response_format")
    if isinstance(wanted, dict):
        wanted = supported(wanted, ResponseFormat.model_fields, UNSUPPORTED_RESPONSE_FORMAT, "response_format.")
        if isinstance(wanted.get("json_schema"), dict):
            known = ("name", "description", "schema", "strict")
            wanted["json_schema"] = supported(wanted["json_schema"], known, {}, "response_format.json_schema.")
        fields["response_format"] = wanted
    wanted = fields.get("structured_outputs")
    if isinstance(wanted, dict):
        known = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        wanted = supported(wanted, known, UNSUPPORTED_STRUCTURED_OUTPUTS, "structured_outputs.")
        if "structural_tag" in wanted:
            wanted["structural_tag"] = _clean_structural_tag(wanted["structural_tag"])
        fields["structured_outputs"] = wanted


def check_output_format(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> None:
    """Raises:
    BadRequestError: names the field that is missing or too much.
    """
    if response_format is not None:
        owners = {"json_schema": "json_schema", "structures": "structural_tag", "triggers": "structural_tag"}
        for field, owner in owners.items():
            param = f"response_format.{field}"
            belongs, is_there = response_format.type == owner, getattr(response_format, field) is not None
            if belongs and not is_there:
                raise BadRequestError(f"`{param}` is missing", param=param, code="missing_required_parameter")
            if is_there and not belongs:
                raise BadRequestError(f"`{param}` goes with type '{owner}' only", param=param)
    if structured is None:
        return
    asked = [
        name for name, value in structured.model_dump(by_alias=True).items() if value is not None and value is not False
    ]
    if structured.json_value is False:
        asked.append("json")
    if len(asked) != 1:
        param = f"structured_outputs.{asked[1]}" if asked else "structured_outputs"
        raise BadRequestError("`structured_outputs` needs exactly one of its fields", param=param)
    if response_format is not None and response_format.type != "text":
        raise BadRequestError(
            "`structured_outputs` and `response_format` exclude each other", param="structured_outputs"
        )


def wanted_grammar(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> tuple[Grammar, str] | None:
    """The grammar of an answer that is one value, and what errors call it; None: anything goes, or structural tags.

    Raises:
        BadRequestError: a schema that came as text is no JSON.
    """
    if response_format is not None and response_format.type == "json_object":
        return Grammar.of_schema({"type": "object"}), "response_format"
    if response_format is not None and response_format.json_schema is not None:
        return Grammar.of_schema(response_format.json_schema.json_schema), "response_format.json_schema.schema"
    if structured is None or structured.structural_tag is not None:
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


def wanted_tags(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> tuple[StructuralTag, str] | None:
    """The structural tags of an answer, and what errors call them."""
    if response_format is not None and response_format.structures is not None:
        structures, triggers = response_format.structures, response_format.triggers or []
        return StructuralTag(type="structural_tag", structures=structures, triggers=triggers), "response_format"
    if structured is not None and structured.structural_tag is not None:
        return structured.structural_tag, "structured_outputs.structural_tag"
    return None


async def compile_tags(
    compiler: Compiler, wanted: StructuralTag, param: str, control_ids: Mapping[str, int]
) -> Constraint:
    """The constraint of structural tags.

    Args:
        control_ids: control tokens of the vocabulary by their spelling.

    Raises:
        BadRequestError: they cannot be enforced; names the part at fault.
    """
    tags: list[Tag] = []
    for place, structure in enumerate(wanted.structures):  # what is wrong with a schema alone is told by its name
        schema = Grammar.of_schema(structure.json_schema)
        await compile_wanted(compiler, schema, f"{param}.structures[{place}].schema")
        tags.append(Tag(structure.begin, schema.source, structure.end))
    return await compile_wanted(compiler, structural_tag_grammar(tags, wanted.triggers, control_ids), param)


async def compile_wanted(compiler: Compiler, grammar: Grammar, param: str) -> Constraint:
    """Raises:
    BadRequestError: it cannot be enforced; names the part at fault.
    """
    try:
        return await compiler.compile(grammar)
    except GrammarError as error:
        raise _refusal(error, param) from error


def _refusal(error: GrammarError, param: str) -> BadRequestError:
    place = f"{param}.{error.path}" if error.path else param
    return BadRequestError(f"`{place}`: {error}", param=place, code="invalid_grammar")


def _clean_structural_tag(value: object) -> dict[str, Any]:
    """Structural tags, which may have come as text."""
    param = "structured_outputs.structural_tag"
    if isinstance(value, str):
        try:
            value = from_json(value, allow_inf_nan=False)
        except ValueError as error:
            raise BadRequestError(f"`{param}` is no JSON: {error}", param=param) from None
    if not isinstance(value, dict):
        raise BadRequestError(f"`{param}` must be an object, not {kind(value)}", param=param)
    return supported(value, StructuralTag.model_fields, UNSUPPORTED_RESPONSE_FORMAT, f"{param}.")


def _parsed_schema(value: dict[str, Any] | bool | str | None) -> dict[str, Any] | bool:
    if not isinstance(value, str):
        return True if value is None else value
    param = "structured_outputs.json"
    try:
        parsed = from_json(value, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequestError(f"`{param}` is no JSON: {error}", param=param) from None
    if not isinstance(parsed, (dict, bool)):
        raise BadRequestError(f"`{param}` must be a schema, not {kind(parsed)}", param=param)
    return parsed
