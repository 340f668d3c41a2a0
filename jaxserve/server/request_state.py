"""What is kept in the state of a request, for whoever else deals with it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, MutableMapping
from typing import Any

OVER_LIMIT = "over_limit"  # there where the request's connection is one too many
REFUSED = "refused"  # an ApiError: what the connection has told the client in the app's place

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def request_id_of(scope: MutableMapping[str, Any]) -> str:
    """The request's id: the client's `x-request-id`, if it sent a usable one, else one that is made here and kept.

    The id is for logs and for the client; the engine has ids of its own, so two requests may well bring the same one.
    """
    state = scope.setdefault("state", {})
    if "request_id" not in state:
        state["request_id"] = _sent_id(scope["headers"]) or uuid.uuid4().hex
    return state["request_id"]


def _sent_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode("ascii")
    return None
