"""What `jaxserve top` shows, from two readings of a server's /metrics."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_LINE = re.compile(r"^(?:jaxserve|vllm):([a-z_]+?)(?:\{([^}]*)\})? (\S+)$")
_BUCKET = re.compile(r'(?:^|,)le="([^"]+)"')
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Reading:
    """The metrics at one moment.

    Attributes:
        time: seconds of a monotonic clock.
        values: by name without prefix; sums over labels.
        buckets: of each histogram, (upper bound, observations up to it), rising.
        labels: of `device_info`.
    """

    time: float
    values: dict[str, float]
    buckets: dict[str, list[tuple[float, float]]]
    labels: dict[str, str] = field(default_factory=dict)


def parse_metrics(text: str, time: float) -> Reading:
    """Reads Prometheus' text format of jaxserve, or of vLLM.

    Where a metric has both prefixes, jaxserve's own is taken.

    Raises:
        ValueError: it holds no metric of either.
    """
    own = any(line.startswith("jaxserve:") for line in text.splitlines())
    prefix = "jaxserve:" if own else "vllm:"
    values: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    labels: dict[str, str] = {}
    for line in text.splitlines():
        match = _LINE.match(line) if line.startswith(prefix) else None
        if match is None:
            continue
        name, found, value = match[1], match[2] or "", float(match[3])
        bound = _BUCKET.search(found)
        if name.endswith("_bucket") and bound is not None:
            counts = buckets.setdefault(name.removesuffix("_bucket"), {})
            counts[float(bound[1])] = counts.get(float(bound[1]), 0.0) + value
        else:
            values[name] = values.get(name, 0.0) + value
        if name == "device_info":
            labels = dict(_LABEL.findall(found))
    if not values:
        raise ValueError("there are no metrics of jaxserve or vLLM; is the model still loading?")
    return Reading(time, values, {name: sorted(counts.items()) for name, counts in buckets.items()}, labels)


def rate(name: str, before: Reading, now: Reading) -> float:
    """Increase of a counter a second; 0 after a restart of the server."""
    seconds = now.time - before.time
    increase = now.values.get(name, 0.0) - before.values.get(name, 0.0)
    return max(0.0, increase) / seconds if seconds > 0 else 0.0


def mean_ms(name: str, before: Reading, now: Reading) -> float | None:
    """Mean of what a histogram took in between, in milliseconds; None: nothing."""
    count = now.values.get(f"{name}_count", 0.0) - before.values.get(f"{name}_count", 0.0)
    total = now.values.get(f"{name}_sum", 0.0) - before.values.get(f"{name}_sum", 0.0)
    return total / count * 1e3 if count > 0 else None


def quantile_ms(name: str, share: float, before: Reading, now: Reading) -> float | None:
    """Quantile of what a histogram took in between, interpolated within its bucket as Prometheus does."""
    earlier = dict(before.buckets.get(name, ()))
    counts = [(bound, count - earlier.get(bound, 0.0)) for bound, count in now.buckets.get(name, ())]
    if not counts or counts[-1][1] <= 0:
        return None
    wanted = share * counts[-1][1]
    lower_bound = lower_count = 0.0
    for bound, count in counts:
        if count >= wanted:
            if bound == float("inf"):
                return lower_bound * 1e3  # all that is known: it was longer than this
            width = count - lower_count
            return (
                (lower_bound + (bound - lower_bound) * (wanted - lower_count) / width) * 1e3 if width else bound * 1e3
            )
        lower_bound, lower_count = bound, count
    return None


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values as a row of blocks, the highest of them full."""
    shown = list(values)[-width:]
    top = max(shown, default=0.0)
    return "".join(" ▁▂▃▄▅▆▇█"[round(8 * value / top)] if top > 0 else " " for value in shown)
