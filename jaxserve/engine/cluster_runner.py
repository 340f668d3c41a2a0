"""Runners of a model that several hosts share: the first one tells the others what it launches, and they launch the same."""

from __future__ import annotations

import logging
import os
import pickle
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from jaxserve.engine.cluster import ClusterError, Follower, Leader
from jaxserve.engine.runner_protocol import Runner
from jaxserve.engine.schedule import DraftedTokens, SampledTokens, ScheduledBatch
from jaxserve.engine.step_wire import StepDecoder, encode_step
from jaxserve.engine.token_masks import is_constrained

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_FORWARD, _MASKS = b"F"[0], b"M"[0]
_STUCK_SECONDS = 10.0  # after which a host gives up on a device that waits for one that is gone


class LeadingRunner:
    """The first host's runner."""

    def __init__(self, runner: Runner, leader: Leader) -> None:
        self._runner = runner
        self._leader = leader

    def launch_forward(self, batch: ScheduledBatch) -> Any:
        self._leader.send(bytes((_FORWARD,)) + encode_step(batch))
        return self._runner.launch_forward(batch)

    def launch_sample(self, logits: Any, masks: np.ndarray | None = None) -> Any:
        if masks is not None:  # else the others have launched the sampling with the rest of the step
            self._leader.send(bytes((_MASKS,)) + pickle.dumps(masks, pickle.HIGHEST_PROTOCOL))
        return self._runner.launch_sample(logits, masks)

    def is_ready(self, pending: Any) -> bool:
        return self._runner.is_ready(pending)

    def fetch_drafts(self, logits: Any) -> DraftedTokens:
        """Waits for a step's drafts.

        Raises:
            ClusterError: the devices failed since a host is gone.
        """
        return self._wait(self._runner.fetch_drafts, logits)

    def fetch(self, pending: Any) -> SampledTokens:
        """Waits for a step's tokens.

        Raises:
            ClusterError: the devices failed since a host is gone.
        """
        return self._wait(self._runner.fetch, pending)

    def close(self) -> None:
        self._leader.close()
        self._runner.close()

    def _wait(self, fetch: Callable[[Any], ResultT], launched: Any) -> ResultT:
        try:
            return fetch(launched)
        except Exception as error:
            raise self._leader.why(error) from error


def follow(runner: Runner, link: Follower) -> None:
    """Launches what the first host launches, until that says that it was all.

    Raises:
        ClusterError: the first host is gone. If the devices wait for it, the process ends by itself.
    """
    messages: queue.SimpleQueue[bytes | ClusterError | None] = queue.SimpleQueue()
    ended = threading.Event()
    threading.Thread(target=_receive, args=(link, messages, ended), name="jaxserve-leader", daemon=True).start()
    try:
        _launch_all(runner, messages)
    except Exception as error:
        ended.set()
        link.close(f"{type(error).__name__}: {error}")
        raise
    finally:
        ended.set()
        runner.close()
    link.close()


def _launch_all(runner: Runner, messages: queue.SimpleQueue[bytes | ClusterError | None]) -> None:
    decoder = StepDecoder()
    logits: Any = None  # of the forward pass that was launched last
    before: Any = None  # tokens that were launched last
    while (message := messages.get()) is not None:
        if isinstance(message, ClusterError):
            raise message
        masks: np.ndarray | None = None
        if message[0] == _FORWARD:
            batch = decoder.decode_step(message[1:])
            logits = runner.launch_forward(batch)
            if is_constrained(batch):
                continue
        else:
            masks = pickle.loads(message[1:])
        tokens = runner.launch_sample(logits, masks)
        if before is not None:
            runner.fetch(before)  # raises what went wrong on the device; the first host waits for it as well
        before = tokens
    if before is not None:
        runner.fetch(before)


def _receive(link: Follower, messages: queue.SimpleQueue[bytes | ClusterError | None], ended: threading.Event) -> None:
    try:
        while (message := link.receive()) is not None:
            messages.put(message)
        messages.put(None)
    except ClusterError as error:
        if ended.is_set():
            return
        messages.put(error)
        if not ended.wait(_STUCK_SECONDS):
            logger.critical("%s; the devices wait for it, so that this process ends at once", error)
            logging.shutdown()
            os._exit(1)
