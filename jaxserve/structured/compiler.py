"""Compiles grammars, or has them compiled elsewhere, and keeps the last ones."""

from __future__ import annotations

import asyncio
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from jaxserve.constraint import Constraint
from jaxserve.engine.request import EngineStoppedError, QueueFullError
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.grammar import CompiledGrammar, compile_source
from jaxserve.structured.grammar_source import Grammar, check_length
from jaxserve.structured.trial_process import TrialSetup
from jaxserve.structured.trials import GrammarTrials
from jaxserve.structured.vocabulary import Vocabulary, library_special_ids, library_tokens, make_vocabulary
from jaxserve.text.tokenizer import Tokenizer

_THREADS = 6  # of which each may hold a worker for as long as the time limit
_MAX_WAITING = 512  # grammars
_KEPT = 512  # grammars, 0.1 MB of memory each as people write them: of a request with 128 tools each has one
_KEPT_CHARACTERS = 4_000_000  # of all of them: long ones take up to 250 bytes of memory for each
_TIME_LIMIT = 10.0  # seconds
_UNLIMITED_STACK = 2 << 20  # bytes that threads have where there is no limit
_MIN_STACK, _MAX_STACK = 256 << 10, 4 << 20  # bytes; nested objects take up to 10,000 each
_MEMORY_LIMIT = 1 << 30  # bytes; large grammars take a tenth of it


class Compiler(Protocol):
    """Makes constraints of grammars."""

    async def compile(self, grammar: Grammar) -> Constraint:
        """The grammar as a constraint; several calls for one grammar share the work, which ends with the last of them.

        Raises:
            GrammarError: it is wrong, asks for what cannot be enforced, or takes too much time or memory.
            QueueFullError: too many others wait to be compiled.
            EngineStoppedError: whoever would compile it has ended.
        """
        ...

    def prepare(self) -> None:
        """Begins what the first grammar would have to wait for: some seconds for a large vocabulary."""
        ...

    def close(self) -> None: ...


@dataclass
class _Entry:
    """What became of a grammar, and how many calls wait for it."""

    future: Future[Constraint]
    num_waiting: int = 0


class ForwardingCompiler:
    """Asks whoever compiles grammars and keeps what came of the last ones. Several event loops and threads may use it.

    Args:
        submit: begins to compile a grammar. If its future can be cancelled, it is when nobody waits for it any more.
    """

    def __init__(self, submit: Callable[[Grammar], Future[Constraint]]) -> None:
        self._submit = submit
        self._lock = threading.RLock()
        self._entries: OrderedDict[Grammar, _Entry] = OrderedDict()

    async def compile(self, grammar: Grammar) -> Constraint:
        """As `Compiler.compile`."""
        check_length(grammar)  # before it is kept
        with self._lock:
            entry = self._entry(grammar)
            entry.num_waiting += 1
        try:
            return await asyncio.shield(asyncio.wrap_future(entry.future))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if entry.future.cancelled() and task is not None and not task.cancelling():
                raise EngineStoppedError("the engine has stopped") from None
            raise
        finally:
            with self._lock:
                entry.num_waiting -= 1
                if not entry.num_waiting and entry.future.cancel():
                    self._forget(grammar, entry)

    def future(self, grammar: Grammar) -> Future[Constraint]:
        """The constraint, as soon as there is one. Nothing but `drop` cancels it.

        Raises:
            QueueFullError: too many others wait.
            EngineStoppedError: this was closed.
        """
        with self._lock:
            entry = self._entry(grammar)
            entry.num_waiting += 1
            return entry.future

    def drop(self, grammar: Grammar) -> None:
        """Takes one call of `future` back."""
        with self._lock:
            entry = self._entries.get(grammar)
            if entry is not None:
                entry.num_waiting -= 1
                if entry.num_waiting <= 0 and entry.future.cancel():
                    self._forget(grammar, entry)

    def prepare(self) -> None:
        """As `Compiler.prepare`."""
        self.future(Grammar("regex", "a"))  # what goes wrong with it is told to the first that asks for a grammar

    def close(self) -> None:
        """Nothing runs here."""

    def _entry(self, grammar: Grammar) -> _Entry:
        entry = self._entries.get(grammar)
        if entry is None:
            entry = self._entries[grammar] = _Entry(self._submit(grammar))
            entry.future.add_done_callback(lambda future: self._keep_or_forget(grammar, entry))
            self._forget_oldest()
        if grammar in self._entries:  # else it failed at once
            self._entries.move_to_end(grammar)
        return entry

    def _forget_oldest(self) -> None:
        """Those that are too many. Whoever comes for one that still compiles is to share it; those are limited elsewhere."""
        too_many = len(self._entries) - _KEPT
        too_long = sum(len(grammar.source) for grammar in self._entries) - _KEPT_CHARACTERS
        for grammar, entry in [*self._entries.items()]:
            if too_many <= 0 and too_long <= 0:
                break
            if entry.future.done():
                del self._entries[grammar]
                too_many -= 1
                too_long -= len(grammar.source)

    def _keep_or_forget(self, grammar: Grammar, entry: _Entry) -> None:
        """What is wrong with a grammar stays so; what else kept it from being compiled may be over the next time."""
        if entry.future.cancelled() or not isinstance(entry.future.exception(), (GrammarError, type(None))):
            self._forget(grammar, entry)

    def _forget(self, grammar: Grammar, entry: _Entry) -> None:
        with self._lock:
            if self._entries.get(grammar) is entry:
                del self._entries[grammar]


class GrammarCompiler(ForwardingCompiler):
    """Compiles for one tokenizer (or what loads it, when the first grammar comes), in threads of its own.

    Each grammar is compiled in another process first, which it may end, or keep busy until the time limit; only what is
    known to compile is compiled in this one.

    Args:
        time_limit: seconds of one grammar, from its turn on.
        memory_limit: bytes that one may take.
        max_waiting: grammars that may wait for their turn, or have it; one more is refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | Callable[[], Tokenizer],
        *,
        time_limit: float = _TIME_LIMIT,
        memory_limit: int = _MEMORY_LIMIT,
        max_waiting: int = _MAX_WAITING,
    ) -> None:
        super().__init__(self._begin)
        self._tokenizer = tokenizer
        self._load_lock = threading.Lock()
        self._limits = memory_limit, time_limit
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._count_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxserve-grammars")
        self._trials = GrammarTrials(self._setup)
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None  # made when the first grammar comes

    def close(self) -> None:
        """Grammars that wait are not compiled any more, and those that are tried are given up."""
        self._trials.close()
        # With the lock, which what is cancelled wants: else whoever submits a grammar may have it, and wait for this.
        with self._lock:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, grammar: Grammar) -> Future[Constraint]:
        with self._count_lock:
            if self._num_waiting >= self._max_waiting:
                raise QueueFullError(f"{self._num_waiting} grammars wait to be compiled already: try again later")
            try:
                future: Future[Constraint] = self._threads.submit(self._compile, grammar)
            except RuntimeError:  # they were shut down
                raise EngineStoppedError("the engine has stopped") from None
            self._num_waiting += 1
        future.add_done_callback(self._count_done)
        return future

    def _count_done(self, future: Future[Constraint]) -> None:
        del future
        with self._count_lock:
            self._num_waiting -= 1

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        return compile_source(self._trials.try_out(grammar), self._make_vocabulary())

    def _setup(self) -> TrialSetup:
        tokenizer = self._load()
        return TrialSetup(
            library_tokens(tokenizer), library_special_ids(tokenizer), *self._limits, _trial_stack_bytes()
        )

    def _make_vocabulary(self) -> Vocabulary:
        tokenizer = self._load()
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = make_vocabulary(tokenizer)
            return self._vocabulary

    def _load(self) -> Tokenizer:
        with self._load_lock:
            if not isinstance(self._tokenizer, Tokenizer):
                self._tokenizer = self._tokenizer()
            return self._tokenizer


def _trial_stack_bytes() -> int:
    """Half of what threads have here."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    own = threading.stack_size() or (_UNLIMITED_STACK if soft == resource.RLIM_INFINITY else soft)
    return max(_MIN_STACK, min(_MAX_STACK, own // 2 // 4096 * 4096))
