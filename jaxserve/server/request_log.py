"""What requests ask for, in the log: by default in numbers and sizes, never in what they say."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("jaxserve.server.requests")

_SHOWN_STRINGS = frozenset({"model"})  # of fields of this name the value is logged; it was checked to be this server's


class RequestLog:
    """Logs requests that passed validation.

    Args:
        content: whether prompts and all else that a client wrote are logged in full.
    """

    def __init__(self, *, content: bool) -> None:
        self._content = content

    def log(self, request_id: str, path: str, body: Mapping[str, Any]) -> None:
        shown = body if self._content else {name: _outline(name, value) for name, value in body.items()}
        logger.info("request %s %s %s", request_id, path, json.dumps(shown, ensure_ascii=True))


def _outline(name: str, value: object) -> object:
    """Numbers as they are, of the rest only the size: any text may be private, a stop string or a tool's name too."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return value if name in _SHOWN_STRINGS else f"<{len(value)} characters>"
    if isinstance(value, dict):
        return f"<{len(value)} fields>"
    return f"<{len(value)} items>" if isinstance(value, list) else f"<{type(value).__name__}>"
