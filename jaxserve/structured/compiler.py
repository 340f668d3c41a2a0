"""Compiles grammars in threads of its own, or has them compiled elsewhere, and keeps the last ones."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from jaxserve.constraint import Constraint
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.grammar import CompiledGrammar, Grammar, compile_grammar
from jaxserve.structured.vocabulary import Vocabulary, make_vocabulary
from jaxserve.text.tokenizer import Tokenizer

_THREADS = 2
_KEPT = 128  # grammars
_TIME_LIMIT = 10.0  # seconds


class Compiler(Protocol):
    """Makes constraints of grammars."""

    async def compile(self, grammar: Grammar) -> Constraint:
        """The grammar as a constraint; several calls for one grammar share the work.

        Raises:
            GrammarError: it is wrong, asks for what cannot be enforced, or takes too long.
        """
        ...

    def close(self) -> None: ...


class ForwardingCompiler:
    """Asks whoever compiles grammars and keeps what came of the last ones. Several event loops and threads may use it.

    Args:
        submit: begins to compile a grammar.
        time_limit: seconds after which a grammar is refused that is not compiled yet.
    """

    def __init__(self, submit: Callable[[Grammar], Future[Constraint]], *, time_limit: float = _TIME_LIMIT) -> None:
        self._submit = submit
        self._time_limit = time_limit
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, Future[Constraint]] = OrderedDict()

    async def compile(self, grammar: Grammar) -> Constraint:
        """As `Compiler.compile`."""
        waiting = asyncio.shield(asyncio.wrap_future(self.future(grammar)))
        try:
            return await asyncio.wait_for(waiting, self._time_limit)
        except TimeoutError:
            raise GrammarError(f"it takes more than {self._time_limit:g} s to compile: make it simpler") from None

    def future(self, grammar: Grammar) -> Future[Constraint]:
        """The constraint, as soon as there is one."""
        with self._lock:
            future = self._compiled.get(grammar)
            if future is None:
                future = self._compiled[grammar] = self._submit(grammar)
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return future

    def close(self) -> None:
        """Nothing runs here."""


class GrammarCompiler(ForwardingCompiler):
    """Compiles for one tokenizer (or what loads it, when the first grammar comes), in threads of its own.

    The library bounds the work of one grammar; one that still takes longer than the time limit is refused, and its thread
    goes on until that bound.
    """

    def __init__(self, tokenizer: Tokenizer | Callable[[], Tokenizer], *, time_limit: float = _TIME_LIMIT) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxserve-grammars")
        super().__init__(lambda grammar: self._threads.submit(self._compile, grammar), time_limit=time_limit)
        self._tokenizer = tokenizer
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None  # made when the first grammar comes

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        return compile_grammar(grammar, self._make_vocabulary())

    def _make_vocabulary(self) -> Vocabulary:
        with self._vocabulary_lock:
            vocabulary = self._vocabulary
        if vocabulary is None:
            tokenizer = self._tokenizer if isinstance(self._tokenizer, Tokenizer) else self._tokenizer()
            vocabulary = make_vocabulary(tokenizer)
            with self._vocabulary_lock:
                self._vocabulary = vocabulary
        return vocabulary
