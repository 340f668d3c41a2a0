"""Errors as OpenAI's API shapes them. The Python API raises them, the server turns them into responses."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxserve.engine.request import EngineStoppedError, QueueFullError, RequestError, RequestOutput


class ApiError(Exception):
    """A request that could not be served.

    Attributes:
        message: for people; holds no path and no traceback.
        param: the request's field at fault, if one is, such as "messages[0].content".
        code: for programs, such as "context_length_exceeded".
        status_code: of the HTTP response.
        type: OpenAI's class of error.
        retry_after: seconds after which trying again makes sense, if it does.
    """

    status_code: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    retry_after: ClassVar[int | None] = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The error object that goes over the wire."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequestError(ApiError):
    """The request can never be served as it is."""

    status_code = 400
    type = "invalid_request_error"


class AuthenticationError(ApiError):
    """No API key came with the request, or a wrong one."""

    status_code = 401
    type = "invalid_request_error"


class NotFoundError(ApiError):
    """No such model or route."""

    status_code = 404
    type = "invalid_request_error"


class MethodNotAllowedError(ApiError):
    """The route exists, but not for this HTTP method."""

    status_code = 405
    type = "invalid_request_error"


class RequestTimeoutError(ApiError):
    """The request did not come whole in time."""

    status_code = 408
    type = "invalid_request_error"


class RequestTooLargeError(ApiError):
    """The body is longer than the server accepts."""

    status_code = 413
    type = "invalid_request_error"


class RateLimitError(ApiError):
    """Too many requests wait already."""

    status_code = 429
    type = "rate_limit_error"
    retry_after = 1


class UnavailableError(ApiError):
    """The server loads its model, drains, or has lost its engine."""

    status_code = 503
    type = "server_error"
    retry_after = 5


class InternalServerError(ApiError):
    """A fault of the server; what happened is in its log, under the request's id."""


def from_error_output(output: RequestOutput) -> ApiError:
    """What is made of an answer that ended with an error in the engine; details of the engine's own are in the log."""
    if output.is_constraint_failure:
        return BadRequestError(f"{output.error}: make the grammar or schema simpler", code="invalid_grammar")
    if output.is_retryable:
        return UnavailableError(
            "the engine stopped before this answer was complete: try again shortly", code="engine_error"
        )
    return InternalServerError("the engine stopped before this answer was complete", code="engine_error")


def from_engine_error(error: RequestError | QueueFullError | EngineStoppedError) -> ApiError:
    """What a refusal by the engine is called in the protocol."""
    if isinstance(error, RequestError):
        return BadRequestError(str(error), param=error.parameter, code=error.code)
    if isinstance(error, QueueFullError):
        return RateLimitError(str(error) or "too many requests are waiting: try again later", code="queue_full")
    return UnavailableError(str(error) or "the engine takes no new requests", code="engine_stopped")
