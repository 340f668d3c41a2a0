"""Requests with damage at random places: no fault in the server, nothing left behind, whatever it makes of them."""

from __future__ import annotations

import json
import random
import re
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.server.harness import USER
from tests.server.processes import ServerProcess, server_process

BODIES = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 3}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 3, "stream": True}),
    ("/v1/chat/completions", {"messages": [USER], "max_tokens": 3, "stream": True}),
    ("/v1/responses", {"input": "é", "max_output_tokens": 3}),
]
PIECES = [
    b"\r\n", b"\n", b"\r", b"\0", b": ", b"chunked", b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n",
    b"HTTP/1.0", b"HTTP/2.0", b"0\r\n\r\n", b"ffffffff\r\n", b"\xff", b"expect: 100-continue\r\n", b"connection: close\r\n",
    b"{", b"}", b'"', b"\\ud800", b"1e999", b"null", b"-1", b"[[[[", b"upgrade: websocket\r\nconnection: upgrade\r\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = json.dumps({"token_delay": 0, "max_model_len": 300})
    log = tmp_path_factory.mktemp("server") / "log"
    with server_process(["-m", "tests.server.fake_server", options], log) as server:
        server.wait_ready()
        yield server


def whole_requests() -> list[bytes]:
    requests = [b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"]
    for path, body in BODIES:
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
        requests.append(head + b"content-length: %d\r\n\r\n%b" % (len(payload), payload))
        requests.append(head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(payload), payload))
    return requests


def damaged(text: bytes, random_numbers: random.Random) -> bytes:
    for _ in range(random_numbers.randint(1, 4)):
        place, other = sorted(random_numbers.randrange(len(text) + 1) for _ in range(2))
        kind = random_numbers.randrange(4)
        if kind == 0:
            text = text[:place] + random_numbers.choice(PIECES) + text[place:]
        elif kind == 1:
            text = text[:place] + text[place + random_numbers.randint(1, 8) :]
        elif kind == 2:
            text = text[:place] + random_numbers.randbytes(1) + text[place + 1 :]
        else:
            text = text[:place] + text[other : other + 40] + text[place:]
    return text


def statuses(port: int, text: bytes, cut: int | None) -> list[int]:
    """Of what comes back, if the client does not go away after `cut` bytes."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        try:
            client.sendall(text[:cut])
            if cut is None:
                client.shutdown(socket.SHUT_WR)
                while part := client.recv(65536):
                    answer += part
        except ConnectionError:
            pass  # it was closed on something that it did not read
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", answer)]


def send_damaged(server: ServerProcess, count: int, seed: int) -> None:
    port = int(server.url().rsplit(":", 1)[1])
    random_numbers = random.Random(seed)
    requests = whole_requests()
    for number in range(count):
        text = b"".join(random_numbers.choice(requests) for _ in range(random_numbers.randint(1, 3)))
        text = damaged(text, random_numbers)
        cut = random_numbers.randrange(len(text)) if random_numbers.random() < 0.2 else None
        found = statuses(port, text, cut)
        assert all(status < 500 for status in found), (number, text, found)
    deadline = time.monotonic() + 10
    while (load := httpx.get(f"{server.url()}/load").json()) != {"server_load": 0}:
        assert time.monotonic() < deadline, load
        time.sleep(0.01)
    assert httpx.get(f"{server.url()}/stats").json()["num_running"] == 0
    assert "Traceback" not in server.log and "ERROR" not in server.log


def test_damaged_requests(server: ServerProcess) -> None:
    send_damaged(server, 1000, seed=0)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_many_damaged_requests(server: ServerProcess) -> None:
    send_damaged(server, 50_000, seed=1)


def test_each_is_answered_when_it_is_not_damaged(server: ServerProcess) -> None:
    """Else the tests above would try nothing but refusals."""
    port = int(server.url().rsplit(":", 1)[1])
    for text in whole_requests():
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(text)
            assert client.recv(13) == b"HTTP/1.1 200 "
