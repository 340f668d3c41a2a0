"""The server as a process: starting, draining on SIGTERM, and exit codes that tell how it went."""

import contextlib
import json
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.harness import USER, events
from tests.server.processes import ServerProcess, server_process


@contextmanager
def fake_server(tmp_path: Path, **options: Any) -> Iterator[ServerProcess]:
    with server_process(["-m", "tests.server.fake_server", json.dumps(options)], tmp_path / "log") as server:
        yield server


class Answer(threading.Thread):
    """A request in a thread: `first` is set when its first bytes are there; then `status` and `text`."""

    def __init__(self, url: str, **fields: Any) -> None:
        super().__init__()
        self.first = threading.Event()
        self.status = 0
        self.text = ""
        self._url = f"{url}/v1/chat/completions"
        self._body = {"messages": [USER], "max_tokens": 50, **fields}
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
            self.status = response.status_code
            for piece in response.iter_text():
                self.text += piece
                self.first.set()


def test_sigterm_lets_running_answers_end(tmp_path: Path) -> None:
    with fake_server(tmp_path) as server:
        url = server.wait_ready()
        whole = Answer(url)
        while httpx.get(f"{url}/load").json()["server_load"] == 0:
            pass  # a request that arrives after the signal would rightly be refused
        stream = Answer(url, stream=True)
        assert stream.first.wait(10)
        server.process.send_signal(signal.SIGTERM)
        while (health := httpx.get(f"{url}/health").status_code) == 200:
            pass
        assert health == 503
        refused = httpx.post(f"{url}/v1/chat/completions", json={"messages": [USER]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        stream.join()
        whole.join()
        assert server.exit_code() == 0
    *chunks, done = events(stream.text)
    assert done == "[DONE]"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert json.loads(whole.text)["usage"]["completion_tokens"] == 50


def test_sigterm_refuses_a_request_that_has_not_come_whole(tmp_path: Path) -> None:
    with fake_server(tmp_path, shutdown_timeout=3600) as server:
        url = httpx.URL(server.wait_ready())
        with socket.create_connection((url.host, url.port or 0)) as client:
            client.settimeout(10)
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nexpect: 100-continue\r\n"
                b"content-length: 100\r\n\r\n"
            )
            assert client.recv(1000).startswith(b"HTTP/1.1 100 ")  # it waits for the body now
            client.sendall(b'{"prompt"')
            server.process.send_signal(signal.SIGTERM)
            assert client.recv(1000).startswith(b"HTTP/1.1 503 ")
            assert server.exit_code() == 0


def test_answers_past_the_shutdown_timeout_end_with_an_error(tmp_path: Path) -> None:
    with fake_server(tmp_path, shutdown_timeout=0.3) as server:
        url = server.wait_ready()
        stream = Answer(url, stream=True, max_tokens=100_000)
        assert stream.first.wait(10)
        server.process.send_signal(signal.SIGTERM)
        stream.join()
        assert server.exit_code() == 3
    last = events(stream.text)[-1]
    assert set(last) == {"error"}


def test_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    with fake_server(tmp_path) as server:
        url = server.wait_ready()
        stopped = threading.Event()

        def read() -> None:
            with pytest.raises(httpx.HTTPError):
                httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 100_000}, timeout=60)
            stopped.set()

        reader = threading.Thread(target=read)
        reader.start()
        while "num_requests_running 1.0" not in httpx.get(f"{url}/metrics").text:
            pass
        server.process.send_signal(signal.SIGTERM)
        while httpx.get(f"{url}/health").status_code == 200:
            pass
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code(seconds=5) == 128 + signal.SIGTERM
        reader.join()
        assert stopped.is_set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_loading(tmp_path: Path, number: signal.Signals) -> None:
    with fake_server(tmp_path, load="never") as server:
        url = server.url()
        assert httpx.get(f"{url}/health").json()["error"]["code"] == "loading"
        server.process.send_signal(number)
        assert server.exit_code(seconds=5) == 0


def test_second_signal_while_loading_ends_the_process_at_once(tmp_path: Path) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT)
    with fake_server(tmp_path, load="never") as server:
        server.url()
        server.process.send_signal(signal.SIGSTOP)  # so that both are there when it goes on
        for number in numbers:
            server.process.send_signal(number)
        server.process.send_signal(signal.SIGCONT)
        assert server.exit_code(seconds=5) in {128 + number for number in numbers}


def test_idle_server_exits_at_once(tmp_path: Path) -> None:
    with fake_server(tmp_path) as server, httpx.Client(base_url=server.wait_ready()) as kept_alive:
        kept_alive.get("/health")
        server.process.send_signal(signal.SIGINT)
        assert server.exit_code(seconds=5) == 0


def test_failed_load(tmp_path: Path) -> None:
    with fake_server(tmp_path, load="fail") as server:
        assert server.exit_code() == 1
        assert "error: the checkpoint is corrupt: fetch it again" in server.log


def test_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with fake_server(tmp_path, port=port) as server:
            assert server.exit_code() == 1
            assert server.log == f"error: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_failed_engine_ends_the_process(tmp_path: Path) -> None:
    with fake_server(tmp_path, fail_after=5) as server:
        stream = Answer(server.wait_ready(), stream=True)
        stream.join()
        assert server.exit_code() == 1
        assert "the engine failed" in server.log
    assert set(events(stream.text)[-1]) == {"error"}


def test_engine_that_does_not_stop_is_left_behind(tmp_path: Path) -> None:
    with fake_server(tmp_path, stuck=True) as server:
        server.wait_ready()
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code(seconds=20) == 0
        assert "does not stop" in server.log


def test_a_thread_that_never_ends_is_left_behind(tmp_path: Path) -> None:
    with fake_server(tmp_path, busy=True) as server:
        server.wait_ready()
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code(seconds=10) == 0


def test_a_grammar_that_compiles_does_not_hold_up_the_end(tmp_path: Path) -> None:
    parts = [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949, 9941)]  # it would for ever
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"allOf": parts}}}
    with fake_server(tmp_path, shutdown_timeout=0.5) as server:
        url = server.wait_ready()
        answer = Answer(url, response_format=wanted)
        while httpx.get(f"{url}/load").json()["server_load"] == 0:
            pass
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code(seconds=8) == 3
        answer.join()
        assert "Traceback" not in server.log
    assert (answer.status, json.loads(answer.text)["error"]["code"]) == (503, "engine_stopped")


def test_failed_engine_is_built_anew_when_that_was_asked_for(tmp_path: Path) -> None:
    with fake_server(tmp_path, fail_after=5, failing_engines=2, server={"restart_engine": True}) as server:
        url = server.wait_ready()
        for _ in range(2):
            streams = [Answer(url, stream=True), Answer(url, stream=True)]
            whole = Answer(url)
            for answer in (*streams, whole):
                answer.join()
            assert all(set(events(stream.text)[-1]) == {"error"} for stream in streams)
            assert (whole.status, set(json.loads(whole.text))) == (500, {"error"})
            server.wait_ready()
            while httpx.get(f"{url}/health").status_code != 200:
                pass
        answer = Answer(url)
        answer.join()
        assert answer.status == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
    assert server.log.count("building the engine anew") == 2


def test_an_engine_that_fails_again_and_again_is_given_up(tmp_path: Path) -> None:
    with fake_server(tmp_path, fail_after=0, server={"restart_engine": True}) as server:
        url = server.wait_ready()
        while server.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):  # the last one finds nobody
                httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
        assert server.exit_code() == 1
        assert "giving up" in server.log


def test_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # what a server that was killed leaves behind
    with fake_server(tmp_path, server={"uds": str(path)}) as server:
        assert server.url() == f"http+unix://{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server") as client:
            while client.get("/health").status_code != 200:
                pass
            answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
            assert answer.json()["choices"][0]["text"] == "abc"
            second = tmp_path / "second"
            second.mkdir()
            with fake_server(second, server={"uds": str(path)}) as other:
                assert other.exit_code() == 1
                assert f"error: cannot listen on {path}: Address already in use" in other.log
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
    assert not path.exists()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with fake_server(tmp_path, server={"uds": str(path)}) as server:
        assert server.exit_code() == 1
        assert "is no socket" in server.log
    assert path.read_text() == "mine"


def test_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
            "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate),
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    files = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    with fake_server(tmp_path, token_delay=0, server=files) as server:
        url = server.url()
        assert url.startswith("https://")
        with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=str(certificate))) as client:
            while client.get("/health").status_code != 200:
                pass
            body = {"prompt": "x", "max_tokens": 3, "stream": True}
            assert events(client.post("/v1/completions", json=body).text)[-1] == "[DONE]"


def test_tls_files_that_cannot_be_used(tmp_path: Path) -> None:
    files = {"ssl_certfile": str(tmp_path / "absent"), "ssl_keyfile": str(tmp_path / "absent")}
    with fake_server(tmp_path, server=files) as server:
        assert server.exit_code() == 1
        assert "error: cannot use the TLS files" in server.log
