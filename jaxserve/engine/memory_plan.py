"""Where a device's memory goes, for people: measured once everything is loaded and compiled. Host only."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.engine.limits import SchedulerLimits
from jaxserve.wording import plural

_GIB = 1024**3


class OutOfMemoryError(RuntimeError):
    """The model or its KV cache does not fit the device."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one device.

    Attributes:
        slots: what the device keeps of each sequence that runs, apart from keys and values.
        work_space: what the neediest compiled program takes beside its arguments, activations included.
        staging: what pages take at most on their way to host memory and back.
        results: what steps give, which later ones write over, and the memory that devices exchange sums through.
        evicted: what pages take at most that were evicted to host memory, where that is the device's own.
    """

    weights: int
    kv_cache: int
    slots: int
    work_space: int
    staging: int = 0
    results: int = 0
    evicted: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.slots + self.work_space + self.staging + self.results + self.evicted


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory for KV pages, and how many those are."""

    num_bytes: int
    num_pages: int


@dataclass(frozen=True)
class MemoryPlan:
    """What the engine takes of each device, and what that is good for.

    Attributes:
        usable: bytes of one device that may be taken.
        usable_as: what those are, in words.
        host: what is taken beside the device; None: nothing.
    """

    device: str
    use: MemoryUse
    usable: int
    usable_as: str
    limits: SchedulerLimits
    host: HostMemory | None = None

    @property
    def left(self) -> int:
        return self.usable - self.use.total

    def check(self) -> None:
        """Raises:
        OutOfMemoryError: more is taken than may be; it tells how many pages fit, or what else to make smaller.
        """
        if self.left >= 0:
            return
        page_bytes = self.use.kv_cache // self.limits.num_pages
        fitting = (self.usable - self.use.total + self.use.kv_cache) // page_bytes
        remedy = "use a smaller model, or more devices"
        if fitting > 0:
            remedy = f"use --num-pages {fitting} or less"
        elif self.use.weights < self.usable:
            remedy = (
                f"use less than --max-num-batched-tokens {self.limits.max_num_batched_tokens} or --max-num-seqs "
                f"{self.limits.max_num_seqs}, or a smaller model"
            )
        evicted = f", evicted pages {_gib(self.use.evicted)}" if self.use.evicted else ""
        raise OutOfMemoryError(
            f"the engine needs {_gib(self.use.total)} GiB of {_gib(self.usable)} GiB ({self.usable_as}): weights "
            f"{_gib(self.use.weights)}, KV pages {_gib(self.use.kv_cache)}, slots {_gib(self.use.slots)}, work space "
            f"{_gib(self.use.work_space + self.use.results + self.use.staging)}{evicted}; {remedy}"
        )

    def table(self) -> str:
        """Lines of text."""
        limits = self.limits
        tokens = limits.num_pages * limits.page_size
        at_once = f"{limits.max_num_seqs:,} {plural('sequence', limits.max_num_seqs)} at once"
        rows = [
            ("weights", self.use.weights, ""),
            ("KV pages", self.use.kv_cache, f"{limits.num_pages:,} of {limits.page_size} tokens"),
            ("slots", self.use.slots, at_once),
            ("work space", self.use.work_space + self.use.results, "of the largest step, activations included"),
        ]
        if self.use.staging:
            rows.append(("page copies", self.use.staging, "on their way to host memory and back, at most"))
        if self.use.evicted:
            rows.append(("evicted", self.use.evicted, "pages in host memory, which is this device's, at most"))
        rows.append(("left", self.left, f"of {_gib(self.usable)} GiB: {self.usable_as}"))
        lines = [f"{name:<12}{_gib(size):>9}  {note}".rstrip() for name, size, note in rows]
        text = "\n".join([f"memory of each device ({self.device}), GiB:", *lines, self._capacity(tokens)])
        if self.host is not None:
            more = self.host.num_pages * limits.page_size
            text += (
                f"\nand {_gib(self.host.num_bytes)} GiB of host memory {more:,} tokens of prompts that were here before"
            )
        return text

    def _capacity(self, tokens: int) -> str:
        limits = self.limits
        at_longest = tokens // (limits.pages_for(limits.longest_sequence) * limits.page_size)
        text = f"the KV cache holds {tokens:,} tokens: {at_longest:,} x {limits.longest_sequence:,}"
        if at_longest < limits.max_num_seqs:
            each = limits.num_pages // limits.max_num_seqs * limits.page_size
            text += f", or {limits.max_num_seqs:,} sequences of {each:,} tokens"
        return text


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}"
