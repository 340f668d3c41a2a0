"""Grammars that end a process, or would never end, are refused, and nobody else notices."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from jaxserve.constraint import Constraint
from jaxserve.engine.request import EngineStoppedError, QueueFullError
from jaxserve.structured import trial_process
from jaxserve.structured.compiler import ForwardingCompiler, GrammarCompiler
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.grammar_source import Grammar
from jaxserve.structured.library_grammar import first_line
from jaxserve.structured.trial_process import TrialSetup
from jaxserve.structured.trials import GrammarTrials
from jaxserve.structured.vocabulary import library_special_ids, library_tokens
from jaxserve.text.tokenizer import Tokenizer
from tests.fakes import byte_tokenizer
from tests.structured.grammars import byte_vocabulary, compiled, refused_at

ROOT = Path(__file__).parents[2]
SETUP = TrialSetup(library_tokens(byte_tokenizer()), library_special_ids(byte_tokenizer()), 1 << 30, 20.0, 512 << 10)


def endless(number: int) -> Grammar:
    """A schema that is compiled for ever; each number another."""
    parts = [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949, 9941)]
    return Grammar.of_schema({"allOf": parts, "title": str(number)})


def linked(count: int, link: Callable[[dict[str, Any]], dict[str, Any]]) -> Grammar:
    """A schema of so many definitions, each of which refers to the next."""
    definitions = {f"d{place}": link({"$ref": f"#/$defs/d{place + 1}"}) for place in range(count)}
    return Grammar.of_schema({"$defs": {**definitions, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"})


DEEP = {
    "references": linked(3000, lambda next_one: next_one),
    "items": linked(1200, lambda next_one: {"type": "array", "items": next_one, "minItems": 1}),
    "alternatives": linked(1200, lambda next_one: {"anyOf": [next_one, {"type": "null"}]}),
    "objects": linked(1500, lambda next_one: {"type": "object", "properties": {"a": next_one}, "required": ["a"]}),
    "rules": Grammar("lark", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(8000)) + 'r8000: "a"\n'),
    "terminals": Grammar("lark", "start: T0\n" + "".join(f"T{i}: T{i + 1}\n" for i in range(8000)) + 'T8000: "a"\n'),
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(byte_tokenizer(), time_limit=20.0)
    yield compiler
    compiler.close()


@pytest.mark.anyio
@pytest.mark.parametrize("shape", DEEP)
async def test_what_nests_too_deep_is_refused(compiler: GrammarCompiler, shape: str) -> None:
    with pytest.raises(GrammarError, match="too deep"):
        await compiler.compile(DEEP[shape])
    assert await compiler.compile(Grammar("regex", f"after {shape}"))


@pytest.mark.anyio
async def test_what_nests_as_much_as_people_write_is_compiled(compiler: GrammarCompiler) -> None:
    schema = linked(60, lambda next_one: {"type": "object", "properties": {"a": next_one}, "required": ["a"]})
    rule = await compiler.compile(schema)
    assert refused_at(rule, '{"a": ' * 60 + "3" + "}" * 60) is None


@pytest.mark.anyio
async def test_a_fault_in_the_library_tells_clients_nothing_of_it() -> None:
    message = "panic: assertion failed: symbols.len()\n<backtrace>\n 1: call at /home/who/object.c:1"
    compiler = GrammarCompiler(byte_tokenizer(), time_limit=20.0)
    try:
        with pytest.raises(GrammarError) as refused:
            await compiler.compile(Grammar.of_schema({"properties": {f"p{place}": {} for place in range(16_000)}}))
    finally:
        compiler.close()
    for text in (str(refused.value), first_line(message)):
        assert "simpler" in text and "/" not in text and "backtrace" not in text and "panic" not in text
    assert first_line("wrong at 1 <backtrace>\n at /home") == first_line("wrong at 1\n<state>\nx") == "wrong at 1"


@pytest.mark.anyio
async def test_what_takes_too_long_is_refused_and_holds_no_other_up_for_longer() -> None:
    compiler = GrammarCompiler(byte_tokenizer(), time_limit=1.0)
    try:
        many = [asyncio.create_task(compiler.compile(endless(number))) for number in range(8)]  # more than threads
        await asyncio.sleep(0)
        rule = await compiler.compile(Grammar("regex", "a+"))  # it waits longer for its turn than it may take
        assert refused_at(rule, "aaa") is None
        for refused in await asyncio.gather(*many, return_exceptions=True):
            assert isinstance(refused, GrammarError) and "more than 1 s" in str(refused)
    finally:
        compiler.close()


@pytest.mark.anyio
async def test_what_takes_too_much_memory_is_refused() -> None:
    compiler = GrammarCompiler(byte_tokenizer(), time_limit=60.0, memory_limit=40 << 20)
    try:
        with pytest.raises(GrammarError, match="40 MiB"):
            await compiler.compile(endless(0))
        assert await compiler.compile(Grammar("regex", "a+"))
    finally:
        compiler.close()


@pytest.mark.anyio
async def test_one_more_than_may_wait_is_refused_and_may_come_again() -> None:
    compiler = GrammarCompiler(byte_tokenizer(), time_limit=0.5, max_waiting=1)
    try:
        first = asyncio.create_task(compiler.compile(endless(0)))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await compiler.compile(Grammar("regex", "a+"))
        with pytest.raises(GrammarError):
            await first
        assert await compiler.compile(Grammar("regex", "a+"))
    finally:
        compiler.close()


@pytest.mark.anyio
async def test_the_end_waits_for_no_grammar() -> None:
    compiler = GrammarCompiler(byte_tokenizer(), time_limit=3600.0)
    await compiler.compile(Grammar("regex", "a"))
    tried = [asyncio.create_task(compiler.compile(endless(number))) for number in range(8)]  # some wait for their turn
    while not any(b"R" in state_of(process) for process in descendants(os.getpid())):
        await asyncio.sleep(0.01)
    compiler.close()
    for refused in await asyncio.gather(*tried, return_exceptions=True):
        assert isinstance(refused, EngineStoppedError)
    with pytest.raises(EngineStoppedError):
        await compiler.compile(Grammar("regex", "ab"))


@pytest.mark.anyio
async def test_processes_that_others_have_ended_are_started_anew() -> None:
    compiler = GrammarCompiler(byte_tokenizer())
    before = set(descendants(os.getpid()))
    try:
        await compiler.compile(Grammar("regex", "a"))
        for process in set(descendants(os.getpid())) - before:
            os.kill(process, signal.SIGKILL)
        assert refused_at(await compiler.compile(Grammar("regex", "ab")), "ab") is None
    finally:
        compiler.close()


def test_a_process_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no process is left")

    trials = GrammarTrials(lambda: SETUP)
    try:
        with monkeypatch.context() as patched:
            patched.setattr("subprocess.Popen", refuse)
            with pytest.raises(OSError, match="no process"):
                trials.try_out(Grammar("regex", "a"))
        gc.collect()  # which would tell of sockets that nobody closed
        assert trials.try_out(Grammar("regex", "a"))
    finally:
        trials.close()


def test_a_worker_without_memory_for_its_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever asked would wait for the whole time limit, and be told of that."""
    ended: list[int] = []

    def end(code: int) -> None:
        ended.append(code)
        raise SystemExit

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    ours, theirs = socket.socketpair()
    with ours, theirs:
        tokenizer = byte_vocabulary().tokenizer
        worker = trial_process._Worker(theirs, tokenizer, SETUP)
        worker._grammars.put(b'{"kind": "regex", "source": "a"}')
        monkeypatch.setattr(trial_process, "_limit_cpu_time", lambda seconds: None)
        monkeypatch.setattr(trial_process, "send_message", fail)
        monkeypatch.setattr("os._exit", end)
        with pytest.raises(SystemExit):
            worker._try_all()
    assert ended == [1]


def test_they_end_with_the_process_that_asks() -> None:
    script = """
import asyncio
from tests.structured.test_trials import *
async def main():
    compiler = GrammarCompiler(byte_tokenizer(), time_limit=3600.0, memory_limit=1 << 40)
    await compiler.compile(Grammar("regex", "a"))
    asyncio.create_task(compiler.compile(endless(0)))
    await asyncio.sleep(0.1)
    print("asked", flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"asked\n"
        processes = descendants(parent.pid)
        parent.kill()
    assert len(processes) >= 2
    deadline = time.monotonic() + 10
    while any(state_of(process) not in (b"", b"Z") for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.anyio
async def test_what_nobody_waits_for_any_more_is_not_compiled() -> None:
    asked: list[Future[Constraint]] = []

    def submit(grammar: Grammar) -> Future[Constraint]:
        del grammar
        asked.append(Future())
        return asked[-1]

    compiler, grammar = ForwardingCompiler(submit), Grammar("regex", "a")
    calls = [asyncio.create_task(compiler.compile(grammar)) for _ in range(2)]
    await asyncio.sleep(0)
    for call, is_last in zip(calls, (False, True), strict=True):
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        assert asked[0].cancelled() is is_last
    again = asyncio.create_task(compiler.compile(grammar))
    await asyncio.sleep(0)
    asked[1].set_exception(QueueFullError("later"))
    with pytest.raises(QueueFullError):
        await again
    again = asyncio.create_task(compiler.compile(grammar))
    await asyncio.sleep(0)
    asked[2].set_result(rule := compiled(grammar))
    assert await again is rule is await compiler.compile(grammar) and len(asked) == 3


@pytest.mark.anyio
async def test_what_is_too_long_is_refused_without_being_sent_or_kept() -> None:
    asked: list[Grammar] = []

    def submit(grammar: Grammar) -> Future[Constraint]:
        asked.append(grammar)
        return Future()

    compiler = ForwardingCompiler(submit)
    with pytest.raises(GrammarError, match="256001 characters"):
        await asyncio.wait_for(compiler.compile(Grammar("regex", "a" * 256_001)), 5)
    assert asked == []


def test_the_end_and_a_grammar_that_comes_meanwhile_do_not_wait_for_each_other() -> None:
    may_load = threading.Event()

    def load() -> Tokenizer:
        may_load.wait()
        return byte_tokenizer()

    compiler = GrammarCompiler(load)
    waiting = [compiler.future(Grammar("regex", str(number))) for number in range(16)]  # more than threads

    def ask() -> None:
        with suppress(EngineStoppedError):
            compiler.future(Grammar("regex", "a"))

    asker = threading.Thread(target=ask, daemon=True)

    def ask_meanwhile(_: Future[Constraint]) -> None:
        asker.start()
        asker.join(0.5)  # or until it waits for the end

    waiting[-2].add_done_callback(ask_meanwhile)
    closer = threading.Thread(target=compiler.close, daemon=True)
    closer.start()
    closer.join(20)
    is_closed = not closer.is_alive()
    may_load.set()
    assert is_closed and waiting[-1].cancelled()
    asker.join(20)
    assert not asker.is_alive()


def descendants(process: int) -> list[int]:
    """The processes that it and its threads have started, and those that these have."""
    found: list[int] = []
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *descendants(child)]
    return found


def state_of(process: int) -> bytes:
    """A letter as in /proc; b"": it is gone. R of any thread is R."""
    states = []
    for thread in Path(f"/proc/{process}/task").glob("*/stat"):
        with suppress(OSError):
            states.append(thread.read_bytes().rpartition(b")")[2].split()[0])
    return b"R" if b"R" in states else b"".join(states[:1])


@pytest.mark.anyio
async def test_what_is_waited_for_is_shared_and_kept_however_much_else_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.structured.compiler._KEPT", 2)
    asked: dict[str, Future[Constraint]] = {}

    def submit(grammar: Grammar) -> Future[Constraint]:
        assert grammar.source not in asked or asked[grammar.source].done(), "the same grammar twice at once"
        return asked.setdefault(grammar.source, Future())

    compiler = ForwardingCompiler(submit)
    calls = [asyncio.create_task(compiler.compile(Grammar("regex", letter))) for letter in "abcda"]
    await asyncio.sleep(0)
    calls[0].cancel()
    await asyncio.gather(calls[0], return_exceptions=True)
    assert not asked["a"].cancelled()  # the last call still waits for it
    for future in asked.values():
        future.set_exception(GrammarError("wrong"))
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, GrammarError) for result in results[1:])
    # Of those that are done, only the last are kept: beside "x", "a" is.
    asked.clear()
    for letter in "xad":
        compiler.future(Grammar("regex", letter))
    assert list(asked) == ["x", "d"]
