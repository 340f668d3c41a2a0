"""Noticing that a client has gone away: a plain handler is watched for it, like a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from jaxserve.server.errors import ClientDisconnectedError

ResultT = TypeVar("ResultT")


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client is gone. The request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The work's result; cancels it when the client goes away.

    Raises:
        ClientDisconnectedError: the client went away first.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(wait_for_disconnect(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnectedError
        return worker.result()
    finally:
        await _cancel(worker, watcher)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
