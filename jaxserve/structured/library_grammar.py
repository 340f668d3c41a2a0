"""Grammars as clients send them, in the form that the grammar library takes. Knows no vocabulary, and is quick to import."""

from __future__ import annotations

import json
import re

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from jaxserve.structured.errors import GrammarError
from jaxserve.structured.grammar_source import Grammar, check_length
from jaxserve.structured.json_schema import JSON_OPTIONS, check_schema
from jaxserve.structured.structural_tag import structural_tag_lark
from jaxserve.structured.tool_grammar import tool_call_lark

_REGEX_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
# Blank lines before a rule are none of it: each of many would be gone through again from every one before it.
_GBNF_RULE = re.compile(r"^[^\S\n]*[A-Za-z][\w-]*\s*::=", re.MULTILINE)
# For whoever mends the library, not for clients.
_DETAILS = re.compile(r"<(?:state|backtrace|non-verbose)\b.*", re.DOTALL)


def library_grammar(grammar: Grammar) -> str:
    """What `make_matcher` takes.

    Raises:
        GrammarError: the grammar is wrong, too long, or asks for what cannot be enforced.
    """
    check_length(grammar)
    try:
        return _library_grammar(grammar)
    except GrammarError:
        raise
    except (ValueError, RecursionError) as error:
        raise GrammarError(first_line(str(error))) from error


def make_matcher(source: str, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """Compiles what `library_grammar` has made. Lets other threads run meanwhile.

    The library bounds neither time nor memory of all grammars, and for some its recursion ends the process
    (`GrammarTrials`).

    Raises:
        GrammarError: the grammar is wrong, too large, or nothing satisfies it.
    """
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(first_line(matcher.get_error()))
    probe = matcher.deep_copy()  # what the first token costs, it costs here
    probe.compute_bitmask()
    if probe.is_error() or (probe.is_stopped() and not probe.is_accepting()):
        raise GrammarError(f"no output satisfies it: {first_line(probe.get_error()) or probe.stop_reason()}")
    return matcher


def first_line(message: str) -> str:
    """What the library says is wrong, for clients: without where that is in the library."""
    if message.startswith("panic"):
        return "it is too large or too complex to compile: make it simpler"
    lines = [line.strip() for line in _DETAILS.sub("", message).splitlines() if line.strip()]
    return " ".join(lines)[:500]


def _library_grammar(grammar: Grammar) -> str:
    match grammar.kind:
        case "json":
            schema = json.loads(grammar.source)
            check_schema(schema)
            if schema is False:
                raise GrammarError("nothing satisfies the schema `false`")
            source = json.dumps({} if schema is True else schema, ensure_ascii=False)
            return llguidance.LLMatcher.grammar_from_json_schema(source, overrides=JSON_OPTIONS)
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            choices = [_REGEX_SPECIAL.sub(r"\\\g<0>", choice) for choice in json.loads(grammar.source)]
            return llguidance.LLMatcher.grammar_from_regex("(" + "|".join(choices) + ")")
        case "grammar":
            return llguidance.LLMatcher.grammar_from_lark(_as_lark(grammar.source))
        case "lark":
            return llguidance.LLMatcher.grammar_from_lark(grammar.source)
        case "tools":
            return llguidance.LLMatcher.grammar_from_lark(tool_call_lark(grammar.source))
        case "tags":
            return llguidance.LLMatcher.grammar_from_lark(structural_tag_lark(grammar.source))


def _as_lark(source: str) -> str:
    if not _GBNF_RULE.search(source):
        return source
    try:
        return gbnf_to_lark(source)
    except Exception as error:  # the converter raises plain Exception for whatever is wrong
        raise GrammarError(first_line(str(error))) from error
