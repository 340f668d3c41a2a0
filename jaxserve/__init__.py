"""Serve Llama-family language models with JAX.

The names below are the public API. They are imported when they are first used: `import jaxserve` alone brings no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.api import AsyncEngine as AsyncEngine
    from jaxserve.api import Engine as Engine
    from jaxserve.api import GeneratedTokens as GeneratedTokens
    from jaxserve.config import EngineConfig as EngineConfig
    from jaxserve.config import ServerConfig as ServerConfig
    from jaxserve.protocol.errors import ApiError as ApiError
    from jaxserve.protocol.errors import BadRequestError as BadRequestError
    from jaxserve.protocol.errors import InternalServerError as InternalServerError
    from jaxserve.protocol.errors import NotFoundError as NotFoundError
    from jaxserve.protocol.errors import RateLimitError as RateLimitError
    from jaxserve.protocol.errors import UnavailableError as UnavailableError
    from jaxserve.sampling_params import SamplingParams as SamplingParams

_HOME = {
    "ApiError": "jaxserve.protocol.errors",
    "AsyncEngine": "jaxserve.api",
    "BadRequestError": "jaxserve.protocol.errors",
    "Engine": "jaxserve.api",
    "EngineConfig": "jaxserve.config",
    "GeneratedTokens": "jaxserve.api",
    "InternalServerError": "jaxserve.protocol.errors",
    "NotFoundError": "jaxserve.protocol.errors",
    "RateLimitError": "jaxserve.protocol.errors",
    "SamplingParams": "jaxserve.sampling_params",
    "ServerConfig": "jaxserve.config",
    "UnavailableError": "jaxserve.protocol.errors",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
