"""Two replicas on a local Ray cluster; one of them is killed under load."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray.serve", reason="needs the extra 'ray'")
pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

import ray  # noqa: E402
from ray import serve  # noqa: E402

from jaxserve.config import EngineConfig  # noqa: E402
from jaxserve.deploy import ray as deployment  # noqa: E402

ROOT = Path(__file__).parents[2]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 48, "temperature": 0}
PATIENCE = 240.0  # seconds for a replica to load and compile on a busy machine


def test_arguments_of_a_config_file() -> None:
    built = deployment.app(
        {"model": "m", "engine": {"tensor_parallel_size": 2, "data_parallel_size": 2}, "num_replicas": 3}
    )
    made = built._bound_deployment
    assert (made.num_replicas, made.ray_actor_options["num_gpus"]) == (3, 4)  # a GPU for each of an engine's devices
    on_cpu = deployment.app({"model": "m", "engine": {"device": "cpu"}})
    assert on_cpu._bound_deployment.ray_actor_options["num_gpus"] == 0
    with pytest.raises(ValueError, match="tensor_parallel_size=0"):
        deployment.app({"model": "m", "engine": {"tensor_parallel_size": 0}})
    with pytest.raises(TypeError, match="warp"):
        deployment.app({"model": "m", "server": {"warp": 1}})


@pytest.fixture
def url(tiny_model_dir: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {name: os.environ[name] for name in os.environ if name.startswith("JAX")} | {"PYTHONPATH": str(ROOT)}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": variables}, configure_logging=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        config = EngineConfig(
            device="cpu", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=16, page_size=16, num_pages=64
        )
        options = {"num_cpus": 1}
        serve.run(deployment.build_app(str(tiny_model_dir), config, num_replicas=2, ray_actor_options=options))
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def replica_processes() -> set[int]:
    """Of this test's cluster: Ray names the processes of replicas after them."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica:default:jaxserve"):
                found.add(int(folder.name))
        except OSError:
            continue  # it has just ended
    return found


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_replica_is_killed_under_load(url: str) -> None:
    model = httpx.get(f"{url}/v1/models", timeout=PATIENCE).json()["data"][0]["id"]
    request = {**CHAT, "model": model}
    expected = httpx.post(f"{url}/v1/chat/completions", json=request, timeout=PATIENCE).json()["choices"][0]["message"]
    statuses: Counter[int] = Counter()
    done = threading.Event()
    lock = threading.Lock()
    wrong: list[object] = []

    def ask() -> None:
        with httpx.Client(timeout=PATIENCE) as client:
            while not done.is_set():
                answer = client.post(f"{url}/v1/chat/completions", json=request)
                with lock:
                    statuses[answer.status_code] += 1
                    if answer.status_code == 200 and answer.json()["choices"][0]["message"] != expected:
                        wrong.append(answer.json())

    before = replica_processes()
    assert len(before) == 2
    clients = [threading.Thread(target=ask) for _ in range(6)]
    for client in clients:
        client.start()
    try:
        until(lambda: statuses[200] > 20)
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        until(lambda: victim not in replica_processes())
        reached = statuses[200]
        until(lambda: statuses[200] > reached + 20)  # the other one goes on
        until(lambda: len(replica_processes()) == 2)
        reached = statuses[200]
        until(lambda: statuses[200] > reached + 20)
    finally:
        done.set()
        for client in clients:
            client.join(PATIENCE)
    assert not wrong
    # Lost is what was in flight there at most, which no client had more of than one; and what may be sent again.
    lost = {status: count for status, count in statuses.items() if status != 200}
    assert sum(lost.values()) <= len(clients), statuses
    assert set(lost) <= {500, 503}, statuses
