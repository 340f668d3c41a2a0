"""An OpenAI endpoint: how it is asked, and what it says of itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from jaxserve.bench.endpoint_url import split_url
from jaxserve.bench.records import Snapshot
from jaxserve.bench.workload import Prompts
from jaxserve.bench.workload_files import Task
from jaxserve.engine.draft_stats import SpeculativeStats
from jaxserve.json_fields import from_json

_SECONDS = 10.0  # for an answer that is no stream


@dataclass(frozen=True)
class EndpointOptions:
    """How an endpoint is asked.

    Attributes:
        url: of the server, with or without a final /v1.
        model: None: the first one that the endpoint lists.
        form: "token-ids": prompts of token ids to /v1/completions, which not every server takes; "text": words to the same
            route; "chat": words to /v1/chat/completions.
        ignore_eos: ask for answers of the full length; a field that OpenAI itself does not know.
        extra_body: further fields of every request.

    Raises:
        ValueError: the URL is none.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    form: Literal["token-ids", "text", "chat"] = "token-ids"
    temperature: float = 0.0
    ignore_eos: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        split_url(self.url)

    @property
    def root(self) -> str:
        """The server's URL without /v1."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def first_model(options: EndpointOptions) -> str:
    """The first model that the endpoint lists.

    Raises:
        RuntimeError: it cannot be reached, or lists none.
    """
    try:
        answer = httpx.get(f"{options.root}/v1/models", headers=options.headers, timeout=_SECONDS)
        answer.raise_for_status()
        return answer.json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise RuntimeError(
            f"cannot learn which model {options.root} serves ({error}): give --served-model-name"
        ) from None


def request_of(
    options: EndpointOptions, model: str, prompts: Prompts, task: Task, index: int
) -> tuple[str, dict[str, Any]]:
    """Path, from the server's root, and body of the `index`-th request."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": task.output,
        "temperature": options.temperature,
        "seed": index,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.ignore_eos and task.json_schema is None:
        body["ignore_eos"] = True
    if task.json_schema is not None:
        schema = {"name": "answer", "schema": json.loads(task.json_schema), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    body |= options.extra_body
    if options.form == "chat" or task.json_schema is not None:
        messages = [{"role": "user", "content": prompts.text(task, index)}]
        return "/v1/chat/completions", {"messages": messages, **body}
    is_text = options.form == "text" or task.text is not None
    prompt = prompts.text(task, index) if is_text else prompts.token_ids(task, index)
    return "/v1/completions", {"prompt": prompt, **body}


class EndpointStats:
    """Reads /stats, where the endpoint has it as jaxserve does; one that does not is asked once only."""

    def __init__(self, options: EndpointOptions) -> None:
        self._client = httpx.Client(base_url=options.root, headers=options.headers, timeout=_SECONDS)
        self._known: bool | None = None  # None: not tried yet

    def read(self) -> dict[str, Any] | None:
        if self._known is False:
            return None
        try:
            answer = self._client.get("/stats")
            stats = answer.json() if answer.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            stats = {}
        known = isinstance(stats, dict) and "num_free_pages" in stats and "busy_s" in stats
        if self._known is None:
            self._known = known
        return stats if known else None

    def busy_times(self) -> tuple[float, float] | None:
        stats = self.read()
        return None if stats is None else (stats["busy_s"], stats["device_idle_s"])

    def speculation(self) -> SpeculativeStats | None:
        drafted = (self.read() or {}).get("speculative")
        return None if drafted is None else from_json(SpeculativeStats, drafted, ignore_unknown=True)

    def snapshot(self, seconds: float) -> Snapshot | None:
        stats = self.read()
        if stats is None:
            return None
        return Snapshot(
            time=seconds,
            num_running=stats["num_running"],
            num_waiting=stats["num_waiting"],
            used_pages=stats["num_pages"] - stats["num_free_pages"],
            num_pages=stats["num_pages"],
            generation_tokens=stats["generation_tokens"],
            prompt_tokens=stats["prompt_tokens"],
            num_steps=stats["num_steps"],
            host_s=stats.get("host_s", 0.0),
        )

    def close(self) -> None:
        self._client.close()
