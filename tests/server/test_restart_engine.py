"""A fault in the real engine's thread, with --restart-engine: its requests fail, and the next engine answers."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from tests.server.harness import events
from tests.server.processes import server_process

# Once the file is there, the twentieth fetch of a step fails.
LAUNCH = """
import pathlib, sys
from jaxserve.cli.main import main
from jaxserve.engine.runner import ModelRunner

fault = pathlib.Path(sys.argv.pop())
fetch = ModelRunner.fetch
steps = []

def failing_fetch(self, pending):
    steps.extend([1] if fault.exists() else [])
    if len(steps) == 20:
        raise RuntimeError("the device is gone")
    return fetch(self, pending)

ModelRunner.fetch = failing_fetch
main()
"""
BODY = {"prompt": "Once", "max_tokens": 20, "temperature": 0}
ENDLESS = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}


def test_a_failed_engine_is_built_anew(tiny_model_dir: Path, tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    options = {
        "--port": "0", "--max-num-seqs": "4", "--max-num-batched-tokens": "64", "--num-pages": "128",
        "--access-log": "none",
    }  # fmt: skip
    flags = [part for pair in options.items() for part in pair]
    arguments = ["-c", LAUNCH, "serve", str(tiny_model_dir), *flags, "--restart-engine", str(fault)]
    with server_process(arguments, tmp_path / "log") as server:
        url = server.wait_ready()
        before = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()["choices"]
        fault.touch()
        text = httpx.post(f"{url}/v1/completions", json=ENDLESS, timeout=60).text
        *chunks, last = events(text)
        assert chunks
        assert set(last) == {"error"}
        assert "device" not in json.dumps(last)
        while httpx.get(f"{url}/health").status_code == 200:
            pass
        server.wait_ready()
        assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()["choices"] == before
        stats = httpx.get(f"{url}/stats").json()
        assert stats["num_free_pages"] == stats["num_pages"]
        server.process.terminate()
        assert server.exit_code() == 0
    assert "the device is gone" in server.log
