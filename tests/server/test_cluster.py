"""`jaxserve serve --nnodes 2`: two processes run one model, and one of them serves it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.api import Engine
from jaxserve.checkpoint.convert import convert
from jaxserve.config import EngineConfig
from jaxserve.progress import NoProgress
from tests.server.processes import ServerProcess, server_process

pytestmark = pytest.mark.long  # three engines are built, two of them by processes of their own

SIZES = {"max_num_seqs": 1, "max_num_batched_tokens": 8, "num_pages": 16}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": True},
    "drawn": {"prompt": "Twice", "max_tokens": 20, "temperature": 0.8, "seed": 5, "ignore_eos": True},
    "penalised": {
        "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "frequency_penalty": 1.5, "ignore_eos": True,
    },
    "constrained": {"prompt": "Well", "max_tokens": 20, "temperature": 0, "structured_outputs": {"regex": "(yes|no){3}"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tiny_model_dir, tmp_path_factory.mktemp("converted") / "model", progress=NoProgress())


@pytest.fixture(scope="module", params=["off", "on"])
def hosts(
    model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """The one that serves, and the one that follows it."""
    logs = tmp_path_factory.mktemp("logs")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = [part for name, value in SIZES.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--tensor-parallel-size", "2", "--nnodes", "2", "--master-port", str(port), "--access-log", "none"]
    flags += ["--engine-process", request.param]
    with ExitStack() as stack:
        follower, leader = (
            stack.enter_context(
                server_process(
                    ["-m", "jaxserve", "serve", str(model), "--port", "0", *flags, "--node-rank", str(rank)],
                    logs / str(rank),
                )
            )
            for rank in (1, 0)
        )
        yield leader, follower


def test_two_processes_give_what_one_gives(model: Path, hosts: tuple[ServerProcess, ServerProcess]) -> None:
    url = hosts[0].wait_ready()
    answers = {name: httpx.post(f"{url}/v1/completions", json=body, timeout=60).json() for name, body in BODIES.items()}
    with Engine(str(model), EngineConfig(**SIZES)) as alone:  # type: ignore[arg-type]
        for name, body in BODIES.items():
            expected = alone.completions.create(**body).choices[0]
            assert answers[name]["choices"][0]["text"] == expected.text, name
            assert answers[name]["choices"][0]["finish_reason"] == expected.finish_reason
    stats = httpx.get(f"{url}/stats").json()
    assert stats["num_free_pages"] == stats["num_pages"] == 16


def test_a_host_that_is_lost_ends_the_server(hosts: tuple[ServerProcess, ServerProcess]) -> None:
    leader, follower = hosts
    url = leader.wait_ready()
    endless = {**BODIES["greedy"], "max_tokens": 200, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=endless, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        follower.process.kill()
        assert '"error"' in "".join(lines)
    assert leader.exit_code(60) == 1
    assert "host 1 of 2 is gone (its process has ended): the model cannot run without it" in leader.log
