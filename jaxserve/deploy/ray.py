"""A Ray Serve application: replicas of the whole server, on whatever machines a Ray cluster has. Needs the extra `ray`.

    from ray import serve
    from jaxserve.deploy.ray import build_app

    serve.run(build_app("llama-3-8b", EngineConfig(tensor_parallel_size=2), num_replicas=4))

or in a Serve config file, with `import_path: jaxserve.deploy.ray:app` and the arguments of `app`.
"""

# pyright: reportAttributeAccessIssue=false
# Where Ray is not installed, pyright takes this very file for it.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ray import serve
from starlette.applications import Starlette

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.progress import NoProgress
from jaxserve.protocol.launch import launch
from jaxserve.protocol.service import OpenAIService
from jaxserve.server.app import create_app

# Requests that one replica is given at once: its engine queues and schedules them far better than a proxy can.
MAX_ONGOING_REQUESTS = 1024
_HEALTH_CHECK_SECONDS = 2.0


class ServerReplica:
    """One process with one engine (or several, see `EngineConfig.data_parallel_size`) and the server's routes over it.

    Args:
        load: makes the service, in the process that it will live in.
        config: keys, limits and logging of the routes. Addresses, TLS and time limits of connections are Ray's.
    """

    def __init__(self, load: Callable[[], OpenAIService], config: ServerConfig) -> None:
        self._service = load()
        self._config = config

    def __serve_build_asgi_app__(self) -> Starlette:
        return create_app(self._service, self._config)

    def check_health(self) -> None:
        """Called by Ray, which replaces a replica whose engine has failed."""
        failure = self._service.engine.failure
        if failure is not None:
            raise RuntimeError(f"the engine failed: {failure}") from failure

    def __del__(self) -> None:
        service = getattr(self, "_service", None)
        if service is not None:
            service.close()


def build_app(
    model: str,
    engine_config: EngineConfig | None = None,
    server_config: ServerConfig | None = None,
    *,
    num_replicas: int = 1,
    ray_actor_options: dict[str, Any] | None = None,
) -> serve.Application:
    """An application for `serve.run`, with OpenAI's routes at its prefix.

    Args:
        model: a known name, a local folder or file, or "hf:ORG/NAME"; every machine must be able to get it.
        num_replicas: processes with the model.
        ray_actor_options: what Ray sets aside for each; None: as many GPUs as the engine's devices, none with
            `device="cpu"`.

    A replica that dies ends the requests it was at with status 500, which clients may send again; Ray starts another while
    the rest go on.
    """
    engine_config = engine_config or EngineConfig()
    server_config = server_config or ServerConfig()
    load = partial(
        launch,
        model,
        engine_config,
        NoProgress(),
        server_config.served_model_name,
        allow_special_tokens_in_content=server_config.allow_special_tokens_in_content,
        pinned_prompt=server_config.pinned_prompt,
        pinned_prompt_name=server_config.pinned_prompt_name,
    )
    return application_of(load, engine_config, server_config, num_replicas, ray_actor_options)


def application_of(
    load: Callable[[], OpenAIService],
    engine_config: EngineConfig,
    server_config: ServerConfig,
    num_replicas: int,
    ray_actor_options: dict[str, Any] | None,
) -> serve.Application:
    """As `build_app`, for a service that is made in another way."""
    num_devices = engine_config.tensor_parallel_size * engine_config.data_parallel_size
    deployment = serve.deployment(
        serve.ingress()(ServerReplica),
        name="jaxserve",
        num_replicas=num_replicas,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        health_check_period_s=_HEALTH_CHECK_SECONDS,
        graceful_shutdown_timeout_s=server_config.shutdown_timeout,
        ray_actor_options=ray_actor_options
        if ray_actor_options is not None
        else {"num_gpus": 0 if engine_config.device == "cpu" else num_devices},
    )
    return deployment.bind(load, server_config)


def app(arguments: dict[str, Any]) -> serve.Application:
    """The application of a Serve config file, from its `args`.

    Args:
        arguments: "model", and what is to be set of "engine" (fields of `EngineConfig`), "server" (of `ServerConfig`),
            "num_replicas" and "ray_actor_options".

    Raises:
        TypeError: an argument or a field that there is none of; ValueError: one that is not valid.
    """
    others = dict(arguments)
    engine = EngineConfig(**others.pop("engine", {}))
    server = ServerConfig(**others.pop("server", {}))
    return build_app(others.pop("model"), engine, server, **others)
