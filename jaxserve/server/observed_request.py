"""One request for an answer, from its arrival on: counted in the metrics and, where traces are kept, told to its span."""

from __future__ import annotations

import time

from jaxserve.protocol.observer import RequestCourse
from jaxserve.server.metrics import Metrics
from jaxserve.server.traces import RequestSpan


class ObservedRequest:
    """A `RequestObserver`. Made when the request has been received.

    Args:
        request_id: its `x-request-id`.
        span: None: no traces are kept.
    """

    def __init__(self, metrics: Metrics, request_id: str, span: RequestSpan | None) -> None:
        self.arrival = time.monotonic()
        self.request_id: str | None = request_id
        self._span = span
        self.first_token = metrics.first_token
        self.next_tokens = metrics.next_tokens
        self._finished = metrics.finished

    def finished(self, course: RequestCourse) -> None:
        self._finished(course)
        if self._span is not None:
            self._span.add_course(course)
