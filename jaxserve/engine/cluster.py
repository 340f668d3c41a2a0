"""Several hosts that run one model together: how they find one another, and how the first one leads the others.

Every host has a process with the same model, mesh and programs. The first one schedules and serves; before it launches
anything it sends what it launches to the others, which launch the same.
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxserve.config import EngineConfig

logger = logging.getLogger(__name__)

_KEY_BYTES = 32
_JOIN_SECONDS = 300  # that the hosts have to come together
_HEARTBEAT_SECONDS = 30
_END_SECONDS = 10
_STOP = b"stop"


class ClusterError(RuntimeError):
    """A host of several that run one model is gone, or did not come."""


class Leader:
    """The first host's ends of the connections. `send` is called by one thread."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = tuple(connections)
        self._on_loss: Callable[[ClusterError], None] = lambda error: logger.critical("%s", error)
        self._ends = False
        self._lost = threading.Event()
        self.loss: ClusterError | None = None
        for rank, connection in enumerate(self._connections, start=1):
            name = f"jaxserve-follower-{rank}"
            threading.Thread(target=self._watch, args=(rank, connection), name=name, daemon=True).start()

    def on_loss(self, call: Callable[[ClusterError], None]) -> None:
        """Has a function called, in a thread of its own, when a host is lost."""
        self._on_loss = call
        if self.loss is not None:
            call(self.loss)

    def agree(self, plan: Any) -> Any:
        """Tells the others what the first host has planned."""
        self.send(pickle.dumps(plan))
        return plan

    def send(self, message: bytes) -> None:
        """Raises:
        ClusterError: a host is gone.
        """
        if self.loss is not None:  # it says why before its end of the connection is closed
            raise self.loss
        try:
            for connection in self._connections:
                connection.send_bytes(message)
        except OSError as error:
            raise self.why(error) from error

    def why(self, error: Exception) -> Exception:
        """The loss of a host, if that is what an error comes of; else the error."""
        self._lost.wait(1.0)  # the device may notice before the connection does
        return self.loss or error

    def close(self) -> None:
        """Lets the others end."""
        if self._ends:
            return
        self._ends = True
        for connection in self._connections:
            try:
                connection.send_bytes(_STOP)
            except OSError as error:
                logger.warning("a host was gone before the end: %s", error)

    def _watch(self, rank: int, connection: Connection) -> None:
        """Waits for the end of a connection, on which nothing ever comes but why."""
        reason = "its process has ended"
        try:
            reason = connection.recv_bytes().decode()
        except (OSError, EOFError) as error:
            logger.debug("host %d sends nothing any more: %s", rank, error)
        if self._ends:
            return
        self.loss = ClusterError(
            f"host {rank} of {len(self._connections) + 1} is gone ({reason}): the model cannot run without it; "
            "start all hosts again"
        )
        self._lost.set()
        self._on_loss(self.loss)


class Follower:
    """Another host's end of its connection."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank = rank
        self._connection = connection

    def agree(self, plan: Any) -> Any:
        """What the first host has planned, in place of what this one has."""
        del plan
        return pickle.loads(self._receive())

    def receive(self) -> bytes | None:
        """The next message; None: that was all.

        Raises:
            ClusterError: the first host is gone.
        """
        message = self._receive()
        return None if message == _STOP else message

    def close(self, reason: str | None = None) -> None:
        """Ends the connection.

        Args:
            reason: why, if that is not the first host's will.
        """
        try:
            if reason is not None:
                self._connection.send_bytes(reason.encode())
        except OSError as error:
            logger.warning("the first host cannot be told: %s", error)
        # Not closed, since another thread may be receiving, which would not notice.
        with socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> bytes:
        try:
            return self._connection.recv_bytes()
        except (OSError, EOFError) as error:
            raise ClusterError("host 0 is gone, which leads: start all hosts again") from error


def join_cluster(config: EngineConfig) -> Leader | Follower | None:
    """Waits until all hosts are there. Before anything else has used a device.

    Returns:
        This host's part; None: there is but one host.

    Raises:
        RuntimeError: the hosts did not come together in time.
    """
    if config.nnodes == 1:
        return None
    address = f"{config.master_addr}:{config.master_port}"
    logger.info("host %d of %d, waiting for the others at %s", config.node_rank, config.nnodes, address)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # what devices of the CPU talk by
    jax.distributed.initialize(
        address,
        num_processes=config.nnodes,
        process_id=config.node_rank,
        initialization_timeout=_JOIN_SECONDS,
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=_END_SECONDS,
    )
    if config.node_rank == 0:
        return _lead(config)
    return _follow(config)


def _lead(config: EngineConfig) -> Leader:
    """Listens at a port and with a key that only those learn who have joined."""
    key = secrets.token_bytes(_KEY_BYTES)
    with Listener((config.master_addr, 0), backlog=config.nnodes, authkey=key) as listener:
        port = listener.address[1]
        _share(np.frombuffer(key + int(port).to_bytes(2, "big"), np.uint8))  # pyright: ignore[reportArgumentType]
        connections: dict[int, Connection] = {}
        while len(connections) < config.nnodes - 1:
            connection = listener.accept()
            connections[int(connection.recv_bytes())] = without_delay(connection)
    return Leader([connections[rank] for rank in sorted(connections)])


def _follow(config: EngineConfig) -> Follower:
    shared = _share(np.zeros(_KEY_BYTES + 2, np.uint8)).tobytes()
    port = int.from_bytes(shared[_KEY_BYTES:], "big")
    connection = connect(config.master_addr, port, shared[:_KEY_BYTES])
    connection.send_bytes(str(config.node_rank).encode())
    return Follower(config.node_rank, connection)


def _share(data: np.ndarray) -> np.ndarray:
    """What host 0 gives, on every host."""
    return np.asarray(multihost_utils.broadcast_one_to_all(data), np.uint8)


def connect(address: str, port: int, key: bytes) -> Connection:
    """A connection to the first host, each of whose ends has shown the other that it knows the key."""
    return without_delay(Client((address, port), authkey=key))


def without_delay(connection: Connection) -> Connection:
    """Sends small messages at once, in place of waiting until the one before was acknowledged."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
