"""Where the server keeps the service that it serves: none while the model loads, and one from then on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Literal, TypeVar

from jaxserve.protocol.errors import UnavailableError
from jaxserve.protocol.service import OpenAIService

ResultT = TypeVar("ResultT")
Phase = Literal["loading", "ready", "draining", "failed", "restarting"]

_REASONS: dict[Phase, str] = {
    "loading": "the model is still loading: try again shortly",
    "draining": "the server is shutting down and takes no new work",
    "failed": "the engine has failed; see the server's log",
    "restarting": "the engine has failed and is built anew: try again shortly",
}


class ServiceSlot:
    """Holds the service once there is one. The server listens before that, so that probes get an answer at once."""

    def __init__(self, service: OpenAIService | None = None) -> None:
        self._service = service
        self._draining = False
        self._restarting = False
        self._limits: set[asyncio.Timeout] = set()  # of what ends when draining starts

    @property
    def service(self) -> OpenAIService | None:
        return self._service

    @property
    def phase(self) -> Phase:
        if self._service is not None and self._service.engine.failure is not None:
            return "failed"
        if self._draining:
            return "draining"
        if self._service is None:
            return "restarting" if self._restarting else "loading"
        return "ready" if self._service.engine.is_ready else "draining"

    def fill(self, service: OpenAIService) -> None:
        """The model is loaded."""
        self._service = service
        if self._draining:
            service.engine.start_draining()

    def empty(self) -> None:
        """The engine failed and will be built anew; until then there is no service."""
        self._service = None
        self._restarting = True

    def start_draining(self) -> None:
        """No new work from now on; what runs goes on."""
        self._draining = True
        for limit in self._limits:
            limit.reschedule(0.0)
        if self._service is not None:
            self._service.engine.start_draining()

    async def before_draining(self, work: Awaitable[ResultT]) -> ResultT:
        """What `work` gives, unless the server begins to shut down first: what has not come whole by then is new work.

        Raises:
            UnavailableError: it did.
        """
        limit = asyncio.timeout(0.0 if self._draining else None)
        self._limits.add(limit)
        try:
            async with limit:
                return await work
        except TimeoutError:
            raise self._unavailable() from None
        finally:
            self._limits.discard(limit)

    def loaded(self) -> OpenAIService:
        """The service, whether or not it takes new work.

        Raises:
            UnavailableError: the model is still loading.
        """
        if self._service is None:
            raise self._unavailable()
        return self._service

    def for_work(self) -> OpenAIService:
        """The service, if it takes new work.

        Raises:
            UnavailableError: it loads, drains, or has failed.
        """
        if self._service is None or self.phase != "ready":
            raise self._unavailable()
        return self._service

    def _unavailable(self) -> UnavailableError:
        phase = self.phase
        return UnavailableError(_REASONS[phase], code=phase)
