"""Work in a thread that the interpreter does not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

ResultT = TypeVar("ResultT")


class ThreadCall(Generic[ResultT]):
    """Runs `work` in a thread of its own; `result` has what it returned or raised. Made on a running event loop."""

    def __init__(self, work: Callable[[], ResultT]) -> None:
        self.result: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._work = work
        self._thread = threading.Thread(target=self._run, name="jaxserve-call", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            result = self._work()
        except Exception as error:
            self._report(self.result.set_exception, error)
        else:
            self._report(self.result.set_result, result)

    def _report(self, setter: Callable[[Any], None], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process was stopped meanwhile
            self.result.get_loop().call_soon_threadsafe(lambda: None if self.result.done() else setter(value))
