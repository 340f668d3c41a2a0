"""`jaxserve top`: a server's numbers in the terminal."""

from __future__ import annotations

import asyncio
import io
import threading

import pytest
from rich.console import Console
from typer.testing import CliRunner

from jaxserve.cli.main import build_app
from jaxserve.cli.top import screen
from jaxserve.cli.top_numbers import Reading, mean_ms, parse_metrics, quantile_ms, rate, sparkline
from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app
from tests.fakes import FakeEngine, endless, fake_service
from tests.server.harness import listening

METRICS = """\
# HELP jaxserve:num_requests_running Sequences that run.
# TYPE jaxserve:num_requests_running gauge
jaxserve:num_requests_running {running}
jaxserve:kv_cache_usage_perc 0.25
jaxserve:generation_tokens_total {tokens}
jaxserve:request_success_total{{finished_reason="stop"}} 3.0
jaxserve:request_success_total{{finished_reason="length"}} 4.0
jaxserve:inter_token_latency_seconds_bucket{{le="0.005"}} {fast}
jaxserve:inter_token_latency_seconds_bucket{{le="0.01"}} {slow}
jaxserve:inter_token_latency_seconds_bucket{{le="+Inf"}} {slow}
jaxserve:inter_token_latency_seconds_count {slow}
jaxserve:inter_token_latency_seconds_sum {total}
jaxserve:device_info{{device="NVIDIA H100 80GB HBM3",model="llama"}} 1.0
vllm:num_requests_running{{engine="0",model_name="llama"}} 99
"""


def reading(
    at: float, *, running: float = 2, tokens: float = 0, fast: float = 0, slow: float = 0, total: float = 0
) -> Reading:
    return parse_metrics(METRICS.format(running=running, tokens=tokens, fast=fast, slow=slow, total=total), at)


def test_metrics_are_read_by_their_names_without_prefix() -> None:
    now = reading(1.0, tokens=500)
    assert now.values["num_requests_running"] == 2  # jaxserve's own, not vLLM's alias
    assert now.values["request_success_total"] == 7  # over all reasons
    assert now.labels == {"device": "NVIDIA H100 80GB HBM3", "model": "llama"}


def test_a_server_of_vllms_is_read_too() -> None:
    text = 'vllm:num_requests_running{engine="0",model_name="m"} 5.0\nvllm:generation_tokens_total{engine="0"} 70.0\n'
    assert parse_metrics(text, 0.0).values == {"num_requests_running": 5.0, "generation_tokens_total": 70.0}


def test_a_page_without_metrics_is_an_error() -> None:
    with pytest.raises(ValueError, match="no metrics of jaxserve or vLLM"):
        parse_metrics("python_gc_objects_collected_total 5\n", 0.0)


def test_figures_are_of_the_time_between_two_readings() -> None:
    before, now = (
        reading(10.0, tokens=1000, fast=100, slow=100, total=0.4),
        reading(12.0, tokens=1500, fast=110, slow=120, total=0.52),
    )
    assert rate("generation_tokens_total", before, now) == 250
    assert mean_ms("inter_token_latency_seconds", before, now) == pytest.approx(6.0)
    # Of 20 in between, 10 lie up to 5 ms and 10 up to 10 ms: the 18th lies at 9 ms.
    assert quantile_ms("inter_token_latency_seconds", 0.9, before, now) == pytest.approx(9.0)
    assert mean_ms("inter_token_latency_seconds", now, now) is None
    assert quantile_ms("inter_token_latency_seconds", 0.9, now, now) is None


def test_a_restarted_server_has_no_negative_rate() -> None:
    assert rate("generation_tokens_total", reading(1.0, tokens=1000), reading(2.0, tokens=10)) == 0


def test_a_row_of_blocks_follows_the_values() -> None:
    assert sparkline([0, 5, 10], 40) == " ▄█"
    assert sparkline([0, 0], 40) == "  "
    assert sparkline(range(100), 3).endswith("█")


def shown(*readings: Reading, since_start: bool = False) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(screen(readings, "http://x", since_start=since_start))
    return console.export_text()


def test_the_screen_shows_what_a_person_asks_for() -> None:
    text = shown(reading(10.0, tokens=1000), reading(11.0, tokens=1640, fast=64, slow=64, total=0.32))
    for part in ("llama · NVIDIA H100 80GB HBM3 · http://x", "streams", "640", "5.0 ms", "25%", "7 answers"):
        assert part in text, text


def test_times_are_over_the_time_that_is_told() -> None:
    quiet = [reading(10.0 + second, fast=64, slow=64, total=0.32) for second in range(30)]
    assert "5.0 ms" in shown(*quiet[-2:], since_start=True) and "times since the start" in shown(quiet[-1])
    assert "5.0 ms" not in shown(*quiet) and "times over the last 10 s" in shown(*quiet)
    assert "times over the last 3 s" in shown(*quiet[:4])
    busy = reading(60.0, fast=128, slow=128, total=0.96)  # read less often than the window is long
    assert "10.0 ms" in shown(quiet[0], busy) and "times over the last 50 s" in shown(quiet[0], busy)


def test_one_answer_is_not_told_as_several() -> None:
    one = parse_metrics('jaxserve:request_success_total{finished_reason="stop"} 1.0\n', 1.0)
    assert "1 answer;" in shown(one)


def test_against_a_real_server() -> None:
    """Over HTTP, with a key, while an answer is generated."""
    engine = FakeEngine(endless, token_delay=0.001, max_model_len=100_000)
    config = ServerConfig(api_keys=("secret",))
    ready, stop = threading.Event(), threading.Event()
    url = ""

    async def serve() -> None:
        nonlocal url
        async with listening(create_app(fake_service(engine), config)) as port:
            url = f"http://127.0.0.1:{port}"
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(20)
        runner = CliRunner()
        done = runner.invoke(build_app(), ["top", url, "--once", "--interval", "0.1", "--api-key", "secret"])
        assert done.exit_code == 0, done.output
        assert "streams" in done.output and "fake-model" in done.output and "since the start" in done.output
        several = {"JAXSERVE_API_KEY": "secret another"}
        done = runner.invoke(build_app(), ["top", url, "--once", "--interval", "0.1"], env=several)
        assert done.exit_code == 0, done.output
        refused = runner.invoke(build_app(), ["top", url, "--once"])
        assert refused.exit_code == 1 and "wants a key" in refused.output
    finally:
        stop.set()
        thread.join()
    gone = CliRunner().invoke(build_app(), ["top", url, "--once"])
    assert gone.exit_code == 1 and "cannot reach" in gone.output


def test_an_interval_must_be_positive() -> None:
    done = CliRunner().invoke(build_app(), ["top", "--interval", "0"])
    assert done.exit_code == 1 and "must be positive" in done.output
