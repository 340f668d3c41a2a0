"""How the HTTP server exposes an engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

AccessLog = Literal["json", "text", "none"]
EngineProcess = Literal["auto", "on", "off"]
ToolCallFormat = Literal["hermes", "llama3_json", "mistral", "pythonic"]


@dataclass(frozen=True)
class ServerConfig:
    """How the HTTP server exposes an engine. Flag names of `jaxserve serve` are these with dashes.

    Attributes:
        uds: path of a Unix socket to listen on, in place of host and port.
        ssl_certfile, ssl_keyfile: PEM files; with them the server speaks HTTPS.
        root_path: what a proxy in front puts before every path, such as "/llm"; "" for none.
        api_keys: any of them opens every route; none: everyone may come in.
        admin_api_keys: any of them opens the routes for administrators as well; if there are only other keys, nobody does.
        pinned_prompt: a system prompt that is computed at start and kept in the prefix cache.
        pinned_prompt_name: what errors call it, such as the file that it was read from.
        allowed_origins: web origins whose pages may call the server, such as "https://chat.example"; "*": all of them.
        served_model_name: what clients call the model; None: the name that it was asked for by.
        allow_special_tokens_in_content: whether what messages say may make control tokens, as Hugging Face has it.
        tool_call_parser: how the model writes calls of tools; None: told by its chat template.
        shutdown_timeout: seconds that running answers get after SIGTERM.
        stalled_client_timeout: seconds after which a client is cut off that takes nothing of its answer, sends nothing of
            its request's body, or has not sent its request's head.
        timeout_keep_alive: seconds that a connection is kept after an answer, for the next request.
        max_connections: one more gets status 503; None: what the limit on open files leaves room for.
        engine_process: whether the engine gets a process of its own, which its steps need not share with the server's
            work; "auto": on anything but a CPU.
        restart_engine: whether a failed engine is built anew; otherwise the process ends.
        otlp_traces_endpoint: URL that OpenTelemetry spans are sent to, one for each request; None: none are made.
        access_log: one line for each answer.
        log_requests: log what each request asks for, without a word of what it says.
        log_requests_content: log all of each request, prompts included.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    root_path: str = ""
    api_keys: tuple[str, ...] = ()
    admin_api_keys: tuple[str, ...] = ()
    pinned_prompt: str | None = None
    pinned_prompt_name: str = "pinned_prompt"
    allowed_origins: tuple[str, ...] = ()
    served_model_name: str | None = None
    allow_special_tokens_in_content: bool = False
    tool_call_parser: ToolCallFormat | None = None
    shutdown_timeout: float = 30.0
    stalled_client_timeout: float = 60.0
    timeout_keep_alive: float = 75.0
    max_connections: int | None = None
    engine_process: EngineProcess = "auto"
    restart_engine: bool = False
    max_body_bytes: int = 16 * 1024 * 1024
    otlp_traces_endpoint: str | None = None
    access_log: AccessLog = "text"
    log_requests: bool = False
    log_requests_content: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port} must lie in 0..65535 (0: any free port)")
        if any(not key for key in (*self.api_keys, *self.admin_api_keys)):
            raise ValueError("an API key must not be empty")
        for name, keys in (("api_keys", self.api_keys), ("admin_api_keys", self.admin_api_keys)):
            for place, key in enumerate(keys, start=1):
                if key.split() != [key]:  # the key itself is no matter for a log
                    raise ValueError(
                        f"{name}: number {place} of {len(keys)} has white space around or in it: take it out"
                    )
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile go together: give both, or none")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"root_path={self.root_path!r} must start with a slash and not end with one")
        for origin in self.allowed_origins:
            if origin != "*" and (not re.fullmatch(r"https?://[^/\s]+", origin) or "*" in origin):
                raise ValueError(f"allowed origin {origin!r} must be '*' or look like 'https://chat.example:8443'")
        if self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout={self.shutdown_timeout} must not be negative")
        if self.stalled_client_timeout <= 0:
            raise ValueError(f"stalled_client_timeout={self.stalled_client_timeout} must be positive")
        if self.timeout_keep_alive <= 0:
            raise ValueError(f"timeout_keep_alive={self.timeout_keep_alive} must be positive")
        if self.max_connections is not None and self.max_connections < 1:
            raise ValueError(f"max_connections={self.max_connections} must be at least 1")
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes={self.max_body_bytes} must be at least 1")
        if self.otlp_traces_endpoint is not None and not re.fullmatch(
            r"https?://[^/\s]+\S*", self.otlp_traces_endpoint
        ):
            raise ValueError(
                f"otlp_traces_endpoint={self.otlp_traces_endpoint!r} must be a URL like 'http://localhost:4318/v1/traces'"
            )
        if self.engine_process not in get_args(EngineProcess):
            raise ValueError(f"engine_process={self.engine_process!r} must be auto, on or off")
        if self.access_log not in ("json", "text", "none"):
            raise ValueError(f"access_log={self.access_log!r} must be json, text or none")
        if self.log_requests_content and not self.log_requests:
            raise ValueError("log_requests_content needs log_requests")
