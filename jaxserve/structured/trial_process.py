"""The processes in which grammars are tried: what one of them does to a process, it does to these.

`GrammarTrials` starts one process that knows the vocabulary, which takes a second where that is large. Whenever it is sent
one end of a socket, it forks a worker, which tries the grammars that come on that socket, one after the other. A worker
ends when its socket is closed, be it in the middle of a grammar; so the end of whoever asked ends all of them.

No jax here, nor what is slow to import or starts threads: the process forks.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import resource
import signal
import socket
import struct
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llguidance

from jaxserve.structured.errors import GrammarError
from jaxserve.structured.grammar_source import Grammar
from jaxserve.structured.library_grammar import first_line, library_grammar, make_matcher

HELLO = b"w"
_NICENESS = 5
_CPU_SECONDS = 2.0  # beyond the time limit, after which the kernel ends a worker that nobody has ended
_RENEWED_AFTER = 1 / 4  # of the memory limit: so much more may lie about in a worker after a grammar
_STDERR = 2
_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class TrialSetup:
    """What the process is told first.

    Attributes:
        tokens: the bytes of each token, by id; the last is the end of text.
        special_token_ids: those that are no text.
        memory_limit: bytes of address space that a grammar may take.
        time_limit: seconds.
        stack_bytes: of the thread that tries grammars: less than there is where they are compiled afterwards, so that what
            nests too deep ends here. Only compiling recurses, walking along a grammar does not.
    """

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    memory_limit: int
    time_limit: float
    stack_bytes: int


class LongestTokens:
    """What `llguidance.TokenizerWrapper` looks for; where the model's own tokenizer has a say, other tokens will do here."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int]) -> None:
        self.tokens, self.special_token_ids = list(tokens), list(special_token_ids)
        self.eos_token_id = len(self.tokens) - 1
        special = frozenset(special_token_ids)
        self._ids = {token: place for place, token in enumerate(self.tokens) if place not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        found: list[int] = []
        position = 0
        while position < len(text):
            for length in range(min(self._longest, len(text) - position), 0, -1):
                token = self._ids.get(text[position : position + length])
                if token is not None:
                    found.append(token)
                    position += length
                    break
            else:
                position += 1  # a byte that no token has
        return found


def send_message(channel: socket.socket, message: bytes) -> None:
    channel.sendall(_LENGTH.pack(len(message)) + message)


def receive_message(channel: socket.socket) -> bytes | None:
    """None: the other end was closed."""
    head = receive_bytes(channel, _LENGTH.size)
    return None if head is None else receive_bytes(channel, _LENGTH.unpack(head)[0])


def receive_bytes(channel: socket.socket, count: int) -> bytes | None:
    """Exactly so many; None: the other end was closed."""
    parts: list[bytes] = []
    while count:
        try:
            part = channel.recv(min(count, 1 << 20))
        except ConnectionResetError:
            part = b""
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def main() -> None:
    """Of the process that forks; its standard input is a socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how workers ended
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICENESS)
    control = socket.socket(fileno=0)
    message = receive_message(control)
    if message is None:
        return
    setup: TrialSetup = pickle.loads(message)
    words = llguidance.TokenizerWrapper(LongestTokens(setup.tokens, setup.special_token_ids))
    tokenizer = llguidance.LLTokenizer(words, slices=llguidance.LLTokenizer.json_slices())
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        channel = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            control.close()
            _Worker(channel, tokenizer, setup).run()
        channel.close()


class _Worker:
    """Tries grammars until its socket is closed."""

    def __init__(self, channel: socket.socket, tokenizer: llguidance.LLTokenizer, setup: TrialSetup) -> None:
        self._channel = channel
        self._tokenizer = tokenizer
        self._setup = setup
        self._grammars: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._start_bytes = _address_space()

    def run(self) -> None:
        """Does not return."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)  # the library writes there what it dies of
        if self._start_bytes:
            _limit(resource.RLIMIT_AS, self._start_bytes + self._setup.memory_limit)
        threading.stack_size(self._setup.stack_bytes)
        threading.Thread(target=self._try_all, daemon=True).start()
        self._channel.sendall(HELLO)
        while (message := receive_message(self._channel)) is not None:
            self._grammars.put(message)
        os._exit(0)

    def _try_all(self) -> None:
        while True:
            message = self._grammars.get()
            _limit_cpu_time(self._setup.time_limit + _CPU_SECONDS)
            try:
                reply = self._try(message)
                is_worn = _address_space() > self._start_bytes + _RENEWED_AFTER * self._setup.memory_limit
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was given up
                    send_message(self._channel, json.dumps({**reply, "is_worn": is_worn}).encode())
            except MemoryError:  # else nobody would answer; so it ends as where the library runs out of memory
                os._exit(1)

    def _try(self, message: bytes) -> dict[str, Any]:
        try:
            source = library_grammar(Grammar(**json.loads(message)))
            make_matcher(source, self._tokenizer)
        except GrammarError as error:
            return {"error": str(error), "path": error.path}
        except MemoryError:
            raise
        except Exception:
            return {"fault": traceback.format_exc()}
        except BaseException as error:  # the library's panics are no `Exception`
            return {"error": first_line(f"panic: {error}"), "path": ""}
        return {"source": source}


def _address_space() -> int:
    """Bytes; 0 where the system does not tell, and then does not limit them either."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return 0


def _limit_cpu_time(seconds: float) -> None:
    """Has the kernel end this process once it has used so much more of it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + seconds) + 1)


def _limit(kind: int, limit: int) -> None:
    """Sets a limit, or leaves it at the most that whoever started this allows."""
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
