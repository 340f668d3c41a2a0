"""Compiles grammars in threads of its own and keeps the last ones."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from jaxserve.structured.errors import GrammarError
from jaxserve.structured.grammar import CompiledGrammar, Grammar, compile_grammar
from jaxserve.structured.vocabulary import Vocabulary, make_vocabulary
from jaxserve.text.tokenizer import Tokenizer

_THREADS = 2
_KEPT = 128  # grammars
_TIME_LIMIT = 10.0  # seconds


class GrammarCompiler:
    """Compiles for one tokenizer. May be used from several event loops and threads.

    The library bounds the work of one grammar; one that still takes longer than the time limit is refused, and its thread
    goes on until that bound.
    """

    def __init__(self, tokenizer: Tokenizer, *, time_limit: float = _TIME_LIMIT) -> None:
        self._tokenizer = tokenizer
        self._time_limit = time_limit
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None  # made when the first grammar comes
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxserve-grammars")

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The grammar as a constraint; several calls for one grammar share the work.

        Raises:
            GrammarError: it is wrong, asks for what cannot be enforced, or takes too long.
        """
        waiting = asyncio.shield(asyncio.wrap_future(self._future(grammar)))
        try:
            return await asyncio.wait_for(waiting, self._time_limit)
        except TimeoutError:
            raise GrammarError(f"it takes more than {self._time_limit:g} s to compile: make it simpler") from None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _future(self, grammar: Grammar) -> Future[CompiledGrammar]:
        with self._lock:
            future = self._compiled.get(grammar)
            if future is None:
                future = self._compiled[grammar] = self._threads.submit(self._compile, grammar)
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return future

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        return compile_grammar(grammar, self._make_vocabulary())

    def _make_vocabulary(self) -> Vocabulary:
        with self._lock:
            vocabulary = self._vocabulary
        if vocabulary is None:
            vocabulary = make_vocabulary(self._tokenizer)
            with self._lock:
                self._vocabulary = vocabulary
        return vocabulary
