"""The `openai` package for Node drives a real server process, as the Python one does."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.processes import server_process

KEY = "sk-test"
MODEL = "tiny"
LAUNCH = "from jaxserve.cli.main import main; main()"
SOURCES = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def node_folder(pytestconfig: pytest.Config) -> Path:
    """A folder with the client and its packages, kept from run to run."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("needs node and npm")
    folder = Path(pytestconfig.cache.mkdir("node-client"))  # type: ignore[union-attr]
    for source in SOURCES.iterdir():
        shutil.copy(source, folder)
    if not (folder / "node_modules" / "openai").exists():
        installed = subprocess.run(
            [npm, "install", "--no-audit", "--no-fund", "--no-package-lock"],
            cwd=folder,
            capture_output=True,
            timeout=240,
        )
        if installed.returncode:
            pytest.skip(f"npm cannot install the openai package: {installed.stderr.decode()[-200:]}")
    return folder


@pytest.fixture(scope="module")
def seen(node_folder: Path, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the Node client saw, with what the server was left with."""
    folder = tmp_path_factory.mktemp("server")
    options = {
        "--port": "0", "--api-key": KEY, "--served-model-name": MODEL, "--max-num-seqs": "4",
        "--max-num-batched-tokens": "64", "--num-pages": "128",
    }  # fmt: skip
    # Without a prefix cache, which the second of two equal requests would tell of in its usage.
    flags = [*(part for pair in options.items() for part in pair), "--no-enable-prefix-caching"]
    with server_process(["-c", LAUNCH, "serve", str(tiny_model_dir), *flags], folder / "log") as server:
        url = server.wait_ready()
        client = subprocess.run(
            ["node", "client.mjs", f"{url}/v1", KEY, MODEL], cwd=node_folder, capture_output=True, timeout=120
        )
        assert client.returncode == 0, client.stderr.decode()
        for _ in range(500):
            stats = httpx.get(f"{url}/stats", headers={"authorization": f"Bearer {KEY}"}).json()
            if not stats["num_running"]:
                break
        return {**json.loads(client.stdout), "running": stats["num_running"]}


def test_answers(seen: dict[str, Any]) -> None:
    assert seen["whole"] == seen["streamed"] != ""
    assert seen["finish"] == "length"
    assert seen["usage"] == seen["wholeUsage"]
    assert seen["usage"]["completion_tokens"] == 40
    assert seen["completion"].startswith("Once")
    assert seen["models"] == [MODEL]


def test_errors(seen: dict[str, Any]) -> None:
    bad, unknown, wrong = seen["badRequest"], seen["unknownModel"], seen["wrongKey"]
    assert (bad["kind"], bad["status"], bad["param"]) == ("BadRequestError", 400, "temperature")
    assert (unknown["kind"], unknown["status"], unknown["code"]) == ("NotFoundError", 404, "model_not_found")
    assert (wrong["kind"], wrong["status"], wrong["code"]) == ("AuthenticationError", 401, "invalid_api_key")


def test_a_stream_that_is_left_ends(seen: dict[str, Any]) -> None:
    assert seen["running"] == 0
