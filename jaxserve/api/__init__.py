"""The Python API: an engine in this process, with the calls and objects of the `openai` package.

    engine = Engine("smollm2-135m-instruct")
    for chunk in engine.chat.completions.create(messages=[{"role": "user", "content": "Hello"}], stream=True):
        print(chunk.choices[0].delta.content or "", end="")

`Engine` blocks, and may be used from several threads; `AsyncEngine` has the same calls, awaited. Options of `create`
are those of the HTTP routes, with the same checks: `BadRequestError` names the one at fault.
"""

from __future__ import annotations

from jaxserve.api.asynchronous import AsyncEngine as AsyncEngine
from jaxserve.api.asynchronous import AsyncStream as AsyncStream
from jaxserve.api.asynchronous import GeneratedTokens as GeneratedTokens
from jaxserve.api.blocking import Engine as Engine
from jaxserve.api.blocking import Stream as Stream
