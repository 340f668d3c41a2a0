"""Who is next: the policies by which sequences wait for their turn. Host only."""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from jaxserve.config import SchedulingPolicy
from jaxserve.engine.request import Request
from jaxserve.engine.sequence import Sequence

turn_of = attrgetter("turn")


@dataclass(frozen=True)
class SchedulingOrder:
    """A policy, as seconds that a request's place in the queue is moved by.

    A request stands where one without handicap would stand that came `handicap` seconds after it. That is aging: nobody
    who arrives more than the difference of two handicaps after a request is served before it, so that none starves.

    Attributes:
        policy: "fcfs": first come, first served, but that of those who come within the time that computing a prompt takes
            the shorter ones go first: in a burst they would all wait for the long ones. "priority": smaller `priority`
            first, as vLLM has it. "sjf": shortest prompt first.
        seconds_per_priority: of waiting that outweigh one step of priority near 0; less, the further from it.
        most_priority_seconds: that no priority comes to, however large: twice as many outweigh any two.
        seconds_per_token: of waiting that outweigh one more prompt token under "sjf".
        fcfs_seconds_per_token: and under "fcfs": about what a GPU takes to compute it.
    """

    policy: SchedulingPolicy = "fcfs"
    seconds_per_priority: float = 60.0
    most_priority_seconds: float = 3600.0
    seconds_per_token: float = 0.005
    fcfs_seconds_per_token: float = 1e-5

    def handicap(self, request: Request) -> float:
        """Seconds by which later requests may overtake this one, all else being equal."""
        if self.policy == "priority":
            # Steps get smaller rather than end somewhere, so that large priorities keep their order among themselves.
            seconds = request.priority * self.seconds_per_priority
            return seconds / (1.0 + abs(seconds) / self.most_priority_seconds)
        if self.policy == "sjf":
            return len(request.prompt_token_ids) * self.seconds_per_token
        return len(request.prompt_token_ids) * self.fcfs_seconds_per_token


class WaitingQueue:
    """Sequences without a slot, next one first.

    `Sequence.turn` keeps a sequence's place: a preempted one comes back to where it stood. Under "sjf" it comes back before
    all that have not begun, for somebody is reading its answer.
    """

    def __init__(self, order: SchedulingOrder) -> None:
        self._order = order
        self._numbers = itertools.count()
        self._queue: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    @property
    def first(self) -> Sequence:
        return self._queue[0]

    def add(self, sequence: Sequence) -> None:
        """A new sequence takes its place."""
        request = sequence.request
        sequence.turn = (request.arrival_time + self._order.handicap(request), next(self._numbers))
        insort(self._queue, sequence, key=turn_of)

    def add_preempted(self, sequence: Sequence) -> None:
        """One that has run comes back."""
        if self._order.policy == "sjf":
            sequence.turn = (float("-inf"), sequence.turn[1])
        insort(self._queue, sequence, key=turn_of)

    def remove(self, sequence: Sequence) -> None:
        self._queue.remove(sequence)

    def pop(self) -> Sequence:
        return self._queue.pop(0)
