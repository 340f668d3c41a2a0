"""Tries grammars in processes of their own, before one is compiled where it could harm others."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict

from jaxserve.engine.request import EngineStoppedError
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.grammar_source import Grammar
from jaxserve.structured.trial_process import (
    HELLO,
    TrialSetup,
    receive_bytes,
    receive_message,
    send_message,
)

logger = logging.getLogger(__name__)

_START_SECONDS = 120.0  # what the process gets to start in and to take the vocabulary in
_MAIN = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from jaxserve.structured.trial_process import main
main()
"""


class GrammarTrials:
    """Says whether grammars can be compiled, in reasonable time and memory. Any thread may ask; each gets its own worker.

    Args:
        make_setup: the vocabulary and the limits; called when the first grammar comes.
    """

    def __init__(self, make_setup: Callable[[], TrialSetup]) -> None:
        self._make_setup = make_setup
        self._lock = threading.Lock()
        self._start_lock = threading.Lock()
        self._setup: TrialSetup | None = None
        self._processes: list[_Process] = []  # one, or none before the first grammar
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._is_closed = False
        self._let_go = weakref.finalize(self, _close_all, self._idle, self._processes)  # if nobody closes this

    def try_out(self, grammar: Grammar) -> str:
        """Has a worker compile it.

        Returns:
            What it is for the library, as `library_grammar` has it.

        Raises:
            GrammarError: it is wrong, takes too long or too much memory, or nests too deep.
            EngineStoppedError: this was closed.
            RuntimeError: the process does not start, or failed.
        """
        message = json.dumps(asdict(grammar)).encode()
        channel = self._take_idle()
        if channel is not None:
            reply = self._ask(channel, message)
            if reply is not None:
                return reply
        # A worker that was there before may have ended for another reason. What a new one ends of is this grammar.
        reply = self._ask(self._new_worker(), message)
        if reply is not None:
            return reply
        megabytes = self._limits().memory_limit >> 20
        raise GrammarError(
            f"it nests too deep to compile, or takes more than {megabytes} MiB of memory: make it simpler"
        )

    def close(self) -> None:
        """Ends the processes; grammars that are being tried are given up."""
        with self._lock:
            self._is_closed = True
            for channel in self._busy:
                with contextlib.suppress(OSError):  # its worker has ended
                    channel.shutdown(socket.SHUT_RDWR)  # whoever waits for it wakes up, and closes it
        self._let_go()

    def _ask(self, channel: socket.socket, message: bytes) -> str | None:
        """What the worker says; None: it has ended."""
        limit = self._limits().time_limit
        is_kept = False
        try:
            channel.settimeout(limit)
            send_message(channel, message)
            answer = receive_message(channel)
            if answer is None:
                self._check_open()
                return None
            reply = json.loads(answer)
            is_kept = not reply["is_worn"]
        except TimeoutError:
            raise GrammarError(f"it takes more than {limit:g} s to compile: make it simpler") from None
        except (BrokenPipeError, ConnectionResetError):
            self._check_open()
            return None
        finally:
            self._give_back(channel, is_kept=is_kept)
        if "fault" in reply:
            raise RuntimeError(f"a grammar could not be tried:\n{reply['fault']}")
        if "error" in reply:
            raise GrammarError(reply["error"], reply["path"])
        return reply["source"]

    def _take_idle(self) -> socket.socket | None:
        with self._lock:
            if self._is_closed or not self._idle:
                return None
            channel = self._idle.pop()
            self._busy.add(channel)
            return channel

    def _give_back(self, channel: socket.socket, *, is_kept: bool) -> None:
        with self._lock:
            self._busy.discard(channel)
            if is_kept and not self._is_closed:
                self._idle.append(channel)
                return
        channel.close()  # which ends the worker, whatever it is at

    def _new_worker(self) -> socket.socket:
        for _ in range(2):
            process = self._running()
            channel = process.fork_worker()
            if channel is not None:
                with self._lock:
                    self._busy.add(channel)
                if self._is_closed:
                    self._give_back(channel, is_kept=False)
                self._check_open()
                return channel
            self._check_open()
            logger.warning("the process that tries grammars has ended (%s): it is started anew", process.close())
            with self._lock, contextlib.suppress(ValueError):  # another has found it before
                self._processes.remove(process)
        raise RuntimeError("the process that tries grammars does not start")

    def _running(self) -> _Process:
        """The process, started if need be."""
        with self._start_lock:
            self._check_open()
            with self._lock:
                if self._processes:
                    return self._processes[0]
            process = _Process(self._limits())
            with self._lock:
                if not self._is_closed:
                    self._processes.append(process)
                    return process
            process.close()
            raise EngineStoppedError("the engine has stopped")

    def _limits(self) -> TrialSetup:
        if self._setup is None:
            self._setup = self._make_setup()  # once: whoever comes first starts the process, with a lock
        return self._setup

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineStoppedError("the engine has stopped")


def _close_all(channels: list[socket.socket], processes: list[_Process]) -> None:
    while channels:
        channels.pop().close()
    while processes:
        processes.pop().close()


class _Process:
    """The process that knows the vocabulary, and forks workers."""

    def __init__(self, setup: TrialSetup) -> None:
        self._lock = threading.Lock()  # one message at a time
        self._control, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _MAIN, json.dumps(sys.path)], stdin=theirs.fileno(), start_new_session=True
                )
        except BaseException:
            self._control.close()
            raise
        self._control.settimeout(_START_SECONDS)
        with contextlib.suppress(OSError):  # it has ended, which whoever wants a worker finds
            send_message(self._control, pickle.dumps(setup))

    def fork_worker(self) -> socket.socket | None:
        """A channel to a new worker, which is ready; None: the process has ended."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                socket.send_fds(self._control, [HELLO], [theirs.fileno()])
            ours.settimeout(_START_SECONDS)
            if receive_bytes(ours, len(HELLO)) == HELLO:
                return ours
        except OSError:  # closed, ended, or slower than can be waited for
            pass
        ours.close()
        return None

    def close(self) -> str:
        """Ends it, but not its workers, which end when their channels do; returns how it ended."""
        self._control.close()
        code = self._process.poll()
        self._process.kill()
        self._process.wait()
        return "it did not answer" if code is None else f"exit code {code}"
