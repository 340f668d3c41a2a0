"""The client that the benchmark's figures are checked against (scripts/check_bench_client.py)."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from jaxserve.bench.workload import load_workload
from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app
from tests.fakes import MODEL_NAME, FakeEngine, endless, fake_service
from tests.server.harness import listening

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("check_bench_client")


@pytest.mark.parametrize("name", ["sharegpt-like", "fixed:30/20"])
def test_it_sends_the_benchmarks_traffic(script: ModuleType, name: str) -> None:
    bodies = script.request_bodies(MODEL_NAME, name, 20)
    workload = load_workload(name)
    tasks = [workload.task(index) for index in range(20)]
    assert [(len(body["prompt"]), body["max_tokens"]) for body in bodies] == [
        (each.prompt, each.output) for each in tasks
    ]


async def _asked(script: ModuleType, url: str) -> tuple[object, dict[str, float]]:
    [body] = script.request_bodies(MODEL_NAME, "fixed:6/20", 1)
    seen = script.Seen()
    async with httpx.AsyncClient(base_url=url) as client:
        await script.ask(client, body, seen, measured=True)
    bodies = script.request_bodies(MODEL_NAME, "fixed:6/20", 5)
    return seen, await asyncio.to_thread(script.other_client, url, bodies, 2, 2)


def test_it_counts_what_a_real_server_sends(script: ModuleType) -> None:
    engine = FakeEngine(endless)

    async def run() -> tuple[object, dict[str, float]]:
        async with listening(create_app(fake_service(engine), ServerConfig())) as port:
            return await _asked(script, f"http://127.0.0.1:{port}")

    seen, figures = asyncio.run(run())
    assert (seen.tokens, len(seen.chunks), len(seen.tpot), len(seen.ttft)) == (20, 20, 1, 1)  # type: ignore[attr-defined]
    assert list(figures) == list(script.FIGURES) and min(figures.values()) > 0
    sizes = [sampling.max_tokens for _, sampling in engine.submitted]
    assert sizes[0] == 20 and sizes.count(2) == 2 and sizes.count(20) >= 6  # each process sets itself up unmeasured


@pytest.mark.parametrize(("slower", "verdict", "code"), [(1.0, "the clients agree within 2%", 0),
                                                         (1.1, "TPOT mean, ms at 4 (+10.00%)", 1)])  # fmt: skip
def test_its_verdict_is_the_last_line_and_the_exit_code(
    slower: float, verdict: str, code: int, script: ModuleType, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    figures = dict.fromkeys(script.FIGURES, 1.0)
    answer = httpx.Response(200, json={"data": [{"id": MODEL_NAME}]})
    monkeypatch.setattr(script.httpx, "get", lambda *_, **__: answer)
    monkeypatch.setattr(script, "other_client", lambda *_: figures)
    monkeypatch.setattr(script, "the_benchmark", lambda *_: {**figures, "TPOT mean, ms": slower})
    monkeypatch.setattr("sys.argv", ["check_bench_client", "--endpoint", "http://x", "--concurrency", "4"])
    with pytest.raises(SystemExit) as exit_:
        script.main()
    assert exit_.value.code == code
    assert verdict in capsys.readouterr().out.splitlines()[-1]
