"""The socket that the server listens on: a TCP port or a Unix socket."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator

from jaxserve.config import ServerConfig

_BACKLOG = 2048  # listening starts at once: connections that come before the event loop runs wait, and are not refused


@contextlib.contextmanager
def listener(config: ServerConfig) -> Iterator[socket.socket]:
    """A socket that listens where the config says, closed (and its file removed) at the end.

    Raises:
        RuntimeError: it cannot listen there.
    """
    where = config.uds or f"{config.host}:{config.port}"
    try:
        bound = bind_unix(config.uds) if config.uds else bind(config.host, config.port)
    except OSError as error:
        raise RuntimeError(f"cannot listen on {where}: {error.strerror or error}") from error
    try:
        yield bound
    finally:
        bound.close()
        if config.uds:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(config.uds)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on the address.

    Raises:
        OSError: the port is in use, the address is not ours, or the name has no address.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound


def bind_unix(path: str) -> socket.socket:
    """A Unix socket that listens at `path`. What a server that is gone left there is replaced.

    Raises:
        OSError: something else is there, a server answers there, or the folder does not take it.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(errno.EEXIST, "a file that is no socket is there")
        _remove_if_dead(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(path)
        bound.listen(_BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound


def _remove_if_dead(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def shown_address(bound: socket.socket, config: ServerConfig) -> str:
    """Where clients find the server."""
    scheme = "https" if config.ssl_certfile else "http"
    if config.uds:
        return f"{scheme}+unix://{config.uds}"
    host, port = bound.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{config.root_path}"
