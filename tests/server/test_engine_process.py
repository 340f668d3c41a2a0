"""`jaxserve serve --engine-process on`: what a client sees is the same, and the process's end is a failure of the engine."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.harness import events
from tests.server.processes import ServerProcess, server_process

OPTIONS = {
    "--port": "0", "--engine-process": "on", "--max-num-seqs": "1", "--max-num-batched-tokens": "8",
    "--num-pages": "64", "--max-num-queued-requests": "0", "--access-log": "none",
}  # fmt: skip
BODY: dict[str, Any] = {"prompt": "Once", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
ENDLESS = {**BODY, "max_tokens": 400, "stream": True}
LONGER = {**ENDLESS, "n": 16}  # one after the other
SECONDS = 60.0  # that a machine under load may need


def arguments(model: Path, *more: str) -> list[str]:
    return ["-m", "jaxserve", "serve", str(model), *(part for pair in OPTIONS.items() for part in pair), *more]


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    with server_process(arguments(tiny_model_dir, "--restart-engine"), log) as server:
        server.wait_ready()
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url(), timeout=SECONDS) as client:
        yield client


def engine_process(server: ServerProcess) -> int:
    """The process that the engine has to itself."""
    found = []
    for task in Path(f"/proc/{server.process.pid}/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            children = (task / "children").read_text().split()
            found += [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
    (process,) = found
    return process


@contextmanager
def paused(process: int) -> Iterator[None]:
    """No answer goes on meanwhile, however long this side takes."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def wait_ended(process: int) -> None:
    deadline = time.monotonic() + SECONDS
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(process, 0)
            time.sleep(0.01)
        raise AssertionError(f"process {process} does not end")


def complete(client: httpx.Client, **fields: Any) -> Any:
    response = client.post("/v1/completions", json={**BODY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"jaxserve:{name} ")).split()[1])


def wait_idle(client: httpx.Client) -> None:
    deadline = time.monotonic() + SECONDS
    while metric(client, "num_requests_running"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_each_part_of_the_start_is_announced(server: ServerProcess) -> None:
    """Somebody who waits sees what for, from the start of the process on."""
    parts = ["starting the engine in a process of its own", "Loading weights …", "making the KV cache …", "compiling …"]
    places = [server.log.find(part) for part in parts]
    assert -1 not in places and places == sorted(places), server.log


def test_a_stream_is_the_answer_and_the_metrics_know_of_both(client: httpx.Client) -> None:
    before = metric(client, "generation_tokens_total")
    whole = complete(client, logprobs=2, seed=1)
    assert metric(client, "generation_tokens_total") - before == 12
    assert whole["usage"]["completion_tokens"] == 12
    *chunks, usage, done = events(
        client.post(
            "/v1/completions",
            json={**BODY, "stream": True, "logprobs": 2, "seed": 1, "stream_options": {"include_usage": True}},
        ).text
    )
    assert metric(client, "generation_tokens_total") - before == 24
    assert done == "[DONE]"
    assert usage["usage"] == whole["usage"]
    (choice,) = whole["choices"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [value for part in streamed for value in part["token_logprobs"]] == choice["logprobs"]["token_logprobs"]
    assert complete(client, echo=True, logprobs=1)["choices"][0]["logprobs"]["token_logprobs"][0] is None


def test_a_constraint_holds_and_a_wrong_one_is_told(client: httpx.Client) -> None:
    held = complete(client, structured_outputs={"regex": "(yes|no){3}"}, ignore_eos=False)["choices"][0]
    assert held["finish_reason"] == "stop"
    assert not held["text"].replace("yes", "").replace("no", "")
    assert len(held["text"]) >= 6
    refused = client.post("/v1/completions", json={**BODY, "structured_outputs": {"regex": "((("}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "structured_outputs.regex")
    refused = client.post("/v1/completions", json={**BODY, "structured_outputs": {"json": {"not": {}}}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "structured_outputs.json.not")


def test_a_client_that_leaves_ends_its_answer(server: ServerProcess, client: httpx.Client) -> None:
    aborted = metric(client, 'request_success_total{finished_reason="abort"}')
    with client.stream("POST", "/v1/completions", json=LONGER) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()  # held: with the iterator goes the connection
        next(lines)
        with paused(engine_process(server)):
            assert metric(client, "num_requests_running") == 1, "what has brought something is known to run"
            answer.close()
    while metric(client, 'request_success_total{finished_reason="abort"}') == aborted:
        pass
    wait_idle(client)
    stats = client.get("/stats").json()
    assert stats["num_free_pages"] == stats["num_pages"] == 64
    assert stats["finished"]["abort"] >= 1
    assert client.post("/flush_cache").json()["freed_pages"] >= 0


def test_more_than_may_wait_are_refused(server: ServerProcess, client: httpx.Client) -> None:
    with client.stream("POST", "/v1/completions", json=LONGER) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()  # held: with the iterator goes the connection
        next(lines)
        with paused(engine_process(server)):
            refused = client.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    wait_idle(client)
    assert complete(client)["usage"]["completion_tokens"] == 12


def test_a_killed_engine_ends_its_answers_and_comes_back(server: ServerProcess, client: httpx.Client) -> None:
    before = complete(client)["choices"]
    killed = engine_process(server)
    with client.stream("POST", "/v1/completions", json=ENDLESS) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(killed, signal.SIGKILL)
        *_, last = (json.loads(line.removeprefix("data: ")) for line in lines if line)
    assert last["error"]["type"] == "server_error"
    assert "try again" in last["error"]["message"]
    while client.get("/health").status_code == 200:
        pass
    assert client.get("/health").json()["error"]["code"] in ("failed", "restarting")
    server.wait_ready()
    assert complete(client)["choices"] == before
    assert "the engine failed: the engine's process was ended by signal 9 (SIGKILL)" in server.log
    assert engine_process(server) != killed


def test_sigterm_to_both_lets_running_answers_end(server: ServerProcess, client: httpx.Client) -> None:
    engine = engine_process(server)
    with client.stream("POST", "/v1/completions", json=ENDLESS) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        for process in (engine, server.process.pid):  # as a terminal or a service manager signals a group
            os.kill(process, signal.SIGTERM)
        *chunks, done = events("\n".join([first, *lines]))
    assert done == "[DONE]"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert server.exit_code(SECONDS) == 0
    wait_ended(engine)


@pytest.mark.long  # what is raised there is tested over a fake device
def test_what_is_wrong_as_it_loads_is_one_line(tiny_model_dir: Path, tmp_path: Path) -> None:
    refused = arguments(tiny_model_dir, "--tensor-parallel-size", "64")
    with server_process(refused, tmp_path / "log") as server:
        assert server.exit_code(SECONDS) == 1
    assert "Traceback" not in server.log
    assert server.log.splitlines()[-1].startswith("jaxserve: error: ")
    assert "64" in server.log.splitlines()[-1]


def test_the_engine_s_process_ends_with_the_server(tiny_model_dir: Path, tmp_path: Path) -> None:
    with server_process(arguments(tiny_model_dir), tmp_path / "log") as server:
        while "Loading weights" not in server.log:  # which is told by the engine's process
            assert server.process.poll() is None, server.log
            time.sleep(0.01)
        engine = engine_process(server)
        server.process.kill()
        server.process.wait()
        wait_ended(engine)
