"""Chat templates as programs that are not trusted: held in jinja2's sandbox, and bounded in time and in what they make.

A thread cannot be interrupted from outside, so a template is compiled to look at the clock itself: at each step of a
loop, at each call and at each operator that can make something large.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

_LARGEST_EXPONENT = 1000
_LARGEST_NUMBER = 100_000  # bits


@dataclass(frozen=True)
class TemplateLimits:
    """What one rendering may use up.

    Attributes:
        seconds: from its start to its end.
        size: characters or items, of the output and of each value on the way.
    """

    seconds: float = 5.0
    size: int = 16_000_000


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A rendering took longer, or made more, than it may."""


class SandboxedTemplate:
    """A compiled template; immutable, and may be used from several threads."""

    def __init__(self, source: str, limits: TemplateLimits) -> None:
        """Raises jinja2.TemplateError if it is not valid Jinja."""
        self._limits = limits
        try:
            self._code = _Environment(limits).compile(source)
        except RecursionError as error:
            raise jinja2.TemplateError("it is nested too deeply") from error
        except (SyntaxError, ValueError) as error:  # Python's, of the code that Jinja makes: a break outside of a loop
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            raise jinja2.TemplateError(reason) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The output.

        Raises:
            jinja2.TemplateError: the template raises an error, or reached a limit; Exception: what Python raised in it.
        """
        environment = _Environment(self._limits)  # one for each rendering, since it holds the deadline
        template = jinja2.Template.from_code(environment, self._code, environment.make_globals(None))
        pieces: list[str] = []
        size = 0
        for piece in template.generate(variables):
            size += len(piece)
            environment.check(size)
            pieces.append(piece)
        return "".join(pieces)


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Has loops and joined strings pass through the environment's checks."""

    def visit_For(self, node: jinja2.nodes.For, frame: jinja2.compiler.Frame) -> None:
        steps = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("steps"), [node.iter], [], None, None)
        node.iter = steps.set_lineno(node.lineno).set_environment(self.environment)
        super().visit_For(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.checked(")
        super().visit_Concat(node, frame)
        self.write(")")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The names and rules that templates on the Hugging Face hub are written for, and the limits of one rendering."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self, limits: TemplateLimits) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
        self._limits = limits
        self._deadline = time.monotonic() + limits.seconds

    def check(self, size: int = 0) -> None:
        """Raises TemplateLimitError when the time is up, or `size` is more than anything may have."""
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"the model's chat template took longer than {self._limits.seconds:g} seconds")
        if size > self._limits.size:
            raise TemplateLimitError(
                f"the model's chat template made a text longer than {self._limits.size} characters"
            )

    def checked(self, value: Any) -> Any:
        if isinstance(value, int) and value.bit_length() > _LARGEST_NUMBER:
            raise TemplateLimitError(f"the model's chat template made a number of {value.bit_length()} bits")
        self.check(len(value) if isinstance(value, (str, list, tuple)) else 0)
        return value

    def steps(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop."""
        for item in items:
            self.check()
            yield item

    def call(self, context: jinja2.runtime.Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check()
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, (int, float)) and abs(right) > _LARGEST_EXPONENT:
            raise TemplateLimitError(f"the model's chat template raises to the power of {right}")
        if operator == "*":  # before it is made, since one multiplication can make anything
            for sequence, factor in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(factor, int):
                    self.check(len(sequence) * factor)
        return self.checked(super().call_binop(context, operator, left, right))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a prompt is not.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it prints what it holds."""

    tags: set[str] = {"generation"}  # noqa: RUF012  the attribute that Jinja reads

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        caller: Callable[..., jinja2.nodes.Expr] = self.call_method
        return jinja2.nodes.CallBlock(caller("_print"), [], [], body).set_lineno(line)

    def _print(self, caller: Callable[[], str]) -> str:
        return caller()
