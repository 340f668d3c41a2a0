"""`jaxserve serve --data-parallel-size 2`: both replicas answer behind one address, and are told apart in the metrics."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.processes import server_process

OPTIONS = {
    "--port": "0", "--data-parallel-size": "2", "--max-num-seqs": "1", "--max-num-batched-tokens": "8",
    "--num-pages": "64", "--access-log": "none",
}  # fmt: skip
BODY = {"prompt": "Once", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def by_replica(url: str, name: str) -> dict[str, float]:
    """A metric's value for each replica."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == f"jaxserve:{name}"]
    return {sample.labels["engine"]: sample.value for sample in samples}


@pytest.mark.parametrize("engine_process", ["off", pytest.param("on", marks=pytest.mark.long)])
def test_two_replicas_share_the_requests(engine_process: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    flags = [part for pair in {**OPTIONS, "--engine-process": engine_process}.items() for part in pair]
    arguments = ["-m", "jaxserve", "serve", str(tiny_model_dir), *flags]
    with server_process(arguments, tmp_path / "log") as server:
        url = server.wait_ready()
        assert by_replica(url, "replica_up") == {"0": 1, "1": 1}
        with httpx.Client(base_url=url, timeout=60) as client:
            texts: list[str] = []
            # While one replica is at a long answer, the other has the least to do, and takes the short ones.
            endless = {**BODY, "max_tokens": 400, "stream": True}
            with client.stream("POST", "/v1/completions", json=endless) as answer:
                lines = answer.iter_lines()
                streamed = json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]
                texts.append(client.post("/v1/completions", json=BODY).json()["choices"][0]["text"])
            tokens = by_replica(url, "generation_tokens_total")
            texts += [client.post("/v1/completions", json=BODY).json()["choices"][0]["text"] for _ in range(2)]
        assert tokens["1"] == 8, "the short answer came from the other replica"
        assert tokens["0"] > 0
        assert texts[0].startswith(streamed)
        assert len(set(texts)) == 1
        stats = httpx.get(f"{url}/stats").json()
        assert [replica["num_pages"] for replica in stats["replicas"]] == [64, 64]
        server.process.terminate()
        assert server.exit_code() == 0
