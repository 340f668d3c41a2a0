"""`jaxserve top URL`: a running server's numbers in the terminal, every second."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxserve.cli.errors import reported_errors
from jaxserve.cli.logs import configure_logging
from jaxserve.cli.options import Verbose
from jaxserve.cli.top_numbers import Reading, mean_ms, parse_metrics, quantile_ms, rate, sparkline
from jaxserve.wording import plural

WINDOW_SECONDS = 10.0  # that times are taken over, where there are readings of as long
_START = Reading(0.0, {}, {})  # of a server that has not answered anything
_KEPT = 120  # readings
_TIMES = (  # title, histogram, digits
    ("TTFT", "time_to_first_token_seconds", 0),
    ("TPOT", "inter_token_latency_seconds", 1),
    ("step", "engine_step_seconds", 1),
)


def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of a server.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Between readings.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print the numbers, times since the server's start, and leave.")
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", envvar="JAXSERVE_API_KEY", help="Key that the server wants.")
    ] = None,
    verbose: Verbose = 0,
) -> None:
    """Watch a running server: streams, tokens a second, TTFT, TPOT, pages, queue. Ctrl-C leaves."""
    configure_logging(verbose)
    with reported_errors(verbose):
        if interval <= 0:
            raise ValueError(f"--interval {interval:g} must be positive")
        root = url.rstrip("/").removesuffix("/v1")
        key = next(iter((api_key or "").split()), None)  # the variable may hold several: any of them will do
        read = reader(root, key)
        if once or not sys.stdout.isatty():
            first = read()
            time.sleep(interval)
            Console().print(screen([first, read()], root, since_start=True))
            return
        try:
            watch(read, root, interval)
        except KeyboardInterrupt:
            return  # how one leaves


def reader(root: str, api_key: str | None) -> Callable[[], Reading]:
    """Reads the server's metrics; raises RuntimeError with a line for people where that fails."""
    import httpx  # here: --help need not wait for it

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    def read() -> Reading:
        try:
            answer = httpx.get(f"{root}/metrics", headers=headers, timeout=5.0)
        except httpx.HTTPError as error:
            raise RuntimeError(f"cannot reach {root}: {error}") from None
        if answer.status_code == 401:
            raise RuntimeError(f"{root} wants a key: give --api-key")
        if answer.status_code != 200:
            raise RuntimeError(f"{root}/metrics answers with status {answer.status_code}")
        return parse_metrics(answer.text, time.monotonic())

    return read


def watch(read: Callable[[], Reading], root: str, interval: float) -> None:
    """Shows readings until it is interrupted; a server that is away for a while is waited for."""
    readings: deque[Reading] = deque([read()], maxlen=_KEPT)
    with Live(screen(readings, root), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                readings.append(read())
                live.update(screen(readings, root), refresh=True)
            except (RuntimeError, ValueError) as error:
                live.update(Group(screen(readings, root), Text(str(error), style="red")), refresh=True)


def screen(history: Iterable[Reading], root: str, *, since_start: bool = False) -> Panel:
    """What is shown of the readings, oldest first.

    Args:
        since_start: have times of all answers, as for who looks once and may come long after the last one.
    """
    readings = list(history)
    now = readings[-1]
    before, window = _START, "since the start"
    if len(readings) > 1 and not since_start:
        before = next((one for one in readings[:-1] if now.time - one.time <= WINDOW_SECONDS), readings[-2])
        seconds = now.time - before.time
        window = f"over the last {seconds:.{0 if seconds >= 1 else 1}f} s"
    last = readings[-2] if len(readings) > 1 else now
    values = now.values
    speeds = [rate("generation_tokens_total", *pair) for pair in pairwise(readings)]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    table.add_row("streams", f"{values.get('num_requests_running', 0):.0f}", "answers being generated")
    table.add_row("queue", f"{values.get('num_requests_waiting', 0):.0f}", "waiting")
    table.add_row(
        "tokens/s", f"{rate('generation_tokens_total', last, now):,.0f}", Text(sparkline(speeds, 40), style="green")
    )
    table.add_row("prompt tokens/s", f"{rate('prompt_tokens_total', last, now):,.0f}", "")
    for title, name, digits in _TIMES:
        mean, high = mean_ms(name, before, now), quantile_ms(name, 0.9, before, now)
        mean_text = "–" if mean is None else f"{mean:.{digits}f} ms"
        table.add_row(title, mean_text, "" if high is None else f"p90 {high:.{digits}f} ms")
    used = values.get("kv_cache_usage_perc", 0.0)
    table.add_row("pages", f"{used:.0%}", ProgressBar(total=1.0, completed=used, width=40))
    if "host_gap" in values:
        table.add_row("host gap", f"{values['host_gap']:.1%}", "of the time with work, since the start")
    table.add_row("preemptions", f"{values.get('num_preemptions_total', 0):.0f}", "since the start")
    ended = round(values.get("request_success_total", 0))
    uptime = f", up {values['uptime_seconds'] / 60:.0f} min" if "uptime_seconds" in values else ""
    title = " · ".join(part for part in (now.labels.get("model"), now.labels.get("device"), root) if part)
    return Panel(
        table,
        title=title,
        subtitle=f"{ended} {plural('answer', ended)}{uptime}; times {window}",
        expand=False,
    )
