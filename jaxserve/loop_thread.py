"""An event loop for code that has none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class LoopThread:
    """Runs an event loop in a thread of its own; any thread may hand it work."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="jaxserve-api", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancels a task of the loop, from any thread."""
        if not task.done() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(task.cancel)

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The work's result; interrupting the wait (Ctrl-C) cancels it."""
        if not self.is_running:
            work.close()
            raise RuntimeError("this engine was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def stop(self) -> None:
        """Cancels what still runs on the loop, and ends the thread."""
        self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.get_running_loop().shutdown_default_executor()
