"""What an answer may be, from what its request says about formats and tools: compiled, or refused."""

from __future__ import annotations

from jaxserve.config import ToolCallFormat
from jaxserve.constraint import Constraint
from jaxserve.engine.request import EngineStoppedError, QueueFullError
from jaxserve.protocol.errors import BadRequestError, from_engine_error
from jaxserve.protocol.output_format import compile_tags, compile_wanted, wanted_grammar, wanted_tags
from jaxserve.protocol.requests import ChatCompletionRequest, GenerationRequest
from jaxserve.protocol.tools import NamedToolChoice, Tool, ToolChoice, ToolUse
from jaxserve.structured.compiler import Compiler, GrammarCompiler
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.grammar_source import MAX_GRAMMAR_LENGTH, Grammar
from jaxserve.structured.tool_grammar import CallShape, tool_call_grammar
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tool_call_text import MARKERS, MISTRAL_BEGIN, format_of_template


class AnswerRules:
    """The rules of one model.

    Args:
        tool_call_format: how the model writes calls; None: told by its template.
        compiler: of grammars, closed together with this; None: they are compiled here.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        tool_call_format: ToolCallFormat | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        source = "" if template is None else template.source
        self._format: ToolCallFormat | None = tool_call_format or format_of_template(source)
        self._template_knows_tools = "tools" in source
        self._grammars = compiler or GrammarCompiler(tokenizer)
        marker_ids = [tokenizer.token_id(marker) for marker in MARKERS]
        self._marker_ids = tokenizer.special_token_ids.intersection(marker_ids)
        ids = {spelling: tokenizer.token_id(spelling) for spelling in tokenizer.special_tokens}
        self._control_ids = {spelling: token_id for spelling, token_id in ids.items() if token_id is not None}
        begin = tokenizer.token_id(MISTRAL_BEGIN)
        self._mistral_begin = begin if begin in tokenizer.special_token_ids else None

    def tool_use(self, request: ChatCompletionRequest) -> ToolUse | None:
        """How calls in the answer are found; None: there are none, and the text is told as it is.

        Raises:
            BadRequestError: the request offers tools, and the model knows none.
        """
        choice: ToolChoice = request.tool_choice or "auto"
        if not request.tools or choice == "none":
            return None
        kind = self.tool_call_format()
        if isinstance(choice, NamedToolChoice):
            named = tuple(tool for tool in request.tools if tool.function.name == choice.function.name)
            return ToolUse(kind, named, "named", several=False)
        return ToolUse(kind, tuple(request.tools), choice, several=request.parallel_tool_calls)

    def tool_call_format(self) -> ToolCallFormat:
        """How the model writes calls.

        Raises:
            BadRequestError: it knows no tools, or nothing tells how it writes calls.
        """
        if not self._template_knows_tools:
            raise BadRequestError(
                "This model takes no `tools`: its chat template has no place for them. Leave them out, or serve a model "
                "whose chat template knows tools.",
                param="tools",
                code="no_tool_support",
            )
        if self._format is None:
            raise BadRequestError(
                "`tools` cannot be used: the chat template of this model does not tell how it writes calls. Start the "
                "server with --tool-call-parser.",
                param="tools",
                code="no_tool_support",
            )
        return self._format

    async def constraint(self, request: GenerationRequest, use: ToolUse | None = None) -> Constraint | None:
        """What the answer must look like.

        Raises:
            BadRequestError: it cannot be enforced; names the part at fault.
            RateLimitError: too many others wait to be compiled.
            UnavailableError: the engine that would compile it has ended.
        """
        try:
            return await self._constraint(request, use)
        except (QueueFullError, EngineStoppedError) as error:
            raise from_engine_error(error) from error
        except GrammarError as error:  # it cannot even be written down, or is too much altogether
            raise BadRequestError(str(error), param=error.path or None, code="invalid_grammar") from error

    def shown_ids(self, request: GenerationRequest, use: ToolUse | None) -> frozenset[int]:
        """Control tokens that belong to the answer's text: those that its calls or tags are marked with.

        It may take milliseconds; any thread.
        """
        if use is not None:
            return self._marker_ids
        tags = wanted_tags(request.response_format, request.structured_outputs)
        if tags is None:
            return frozenset()
        texts = "\n".join(text for structure in tags[0].structures for text in (structure.begin, structure.end))
        return frozenset(token_id for spelling, token_id in self._control_ids.items() if spelling in texts)

    def prepare(self) -> None:
        """Begins what the first grammar would have to wait for."""
        self._grammars.prepare()

    def close(self) -> None:
        self._grammars.close()

    async def _constraint(self, request: GenerationRequest, use: ToolUse | None) -> Constraint | None:
        if use is not None:
            return await self._tool_constraint(request, use)
        tags = wanted_tags(request.response_format, request.structured_outputs)
        if tags is not None:
            return await compile_tags(self._grammars, *tags, self._control_ids)
        wanted = wanted_grammar(request.response_format, request.structured_outputs)
        return None if wanted is None else await compile_wanted(self._grammars, *wanted)

    async def _tool_constraint(self, request: GenerationRequest, use: ToolUse) -> Constraint | None:
        if request.structured_outputs is not None:
            raise BadRequestError("`structured_outputs` and `tools` exclude each other", param="structured_outputs")
        if wanted_tags(request.response_format, None) is not None:
            raise BadRequestError("structural tags and `tools` exclude each other", param="response_format")
        answer = wanted_grammar(request.response_format, None)
        must_call = use.choice != "auto"
        if not must_call and answer is None and not any(tool.function.strict for tool in use.tools):
            return None
        kind = use.parser_kind
        if kind == "pythonic":
            param = "response_format" if answer else "tools"
            raise BadRequestError(
                f"`{param}`: with tools that the model may or may not call, this model's pythonic calls cannot be held to a "
                "schema; leave out `strict` and `response_format`, or set `tool_choice`",
                param=param,
            )
        if answer is not None and not must_call:
            if kind == "llama3_json":
                raise BadRequestError(
                    "`response_format`: this model writes calls as JSON too, so JSON answers go with `tool_choice` only",
                    param="response_format",
                )
            await compile_wanted(self._grammars, *answer)  # what is wrong with the schema alone is told by its name
        grammar = tool_call_grammar(
            kind,
            await self._shapes(use),
            must_call=must_call,
            several=use.several,
            mistral_begin_id=self._mistral_begin,
            answer=None if answer is None else answer[0].source,
        )
        return await compile_wanted(self._grammars, grammar, "tools")

    async def _shapes(self, use: ToolUse) -> list[CallShape]:
        """What the arguments are held to: a tool's schema, or any object where that cannot be enforced and need not."""
        strict: dict[int, Grammar] = {}
        room = MAX_GRAMMAR_LENGTH
        for place, tool in enumerate(use.tools):  # before any is compiled, which may take seconds for each long one
            if tool.function.strict:
                strict[place] = _arguments(tool)
                room -= len(strict[place].source)
            if room < 0:
                raise GrammarError(
                    f"the `parameters` of strict tools have more than {MAX_GRAMMAR_LENGTH} characters together", "tools"
                )
        shapes: list[CallShape] = []
        for place, tool in enumerate(use.tools):
            if place in strict:
                grammar = strict[place]
                param = "tools" if use.choice == "named" else f"tools[{place}]"
                await compile_wanted(self._grammars, grammar, f"{param}.function.parameters")
            else:
                grammar = _arguments(tool)
                room -= len(grammar.source)
                if room < 0 or not await self._can_be_enforced(grammar):
                    grammar = Grammar.of_schema({"type": "object"})
            shapes.append(CallShape(tool.function.name, grammar.source))
        return shapes

    async def _can_be_enforced(self, grammar: Grammar) -> bool:
        try:
            await self._grammars.compile(grammar)
        except GrammarError:
            return False
        return True


def _arguments(tool: Tool) -> Grammar:
    return Grammar.of_schema({"type": "object", **(tool.function.parameters or {})})
