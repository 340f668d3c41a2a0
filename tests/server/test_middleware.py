"""What stands before the routes: CORS, the root path, logs of answers and of requests, and the load."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from jaxserve.config import ServerConfig
from jaxserve.server.middleware import LoadMiddleware, ServerLoad
from tests.fakes import MODEL_NAME, FakeEngine, endless, say
from tests.server.harness import USER, assert_error, client_of, until

pytestmark = pytest.mark.anyio

CHAT = {"messages": [USER]}
FRIEND = "https://chat.example"
STRANGER = "https://evil.example"
KEY = "sk-secret"


def preflight(origin: str) -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }


def cors(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control")}


async def test_a_listed_origin_may_call() -> None:
    config = ServerConfig(allowed_origins=(FRIEND,), api_keys=(KEY,))
    async with client_of(FakeEngine(say("x")), config) as client:
        asked = await client.options("/v1/chat/completions", headers=preflight(FRIEND))  # browsers send no key with it
        assert asked.status_code == 200
        assert cors(asked)["access-control-allow-origin"] == FRIEND
        assert "x-stainless-lang" in cors(asked)["access-control-allow-headers"]
        headers = {"origin": FRIEND, "authorization": f"Bearer {KEY}"}
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert (answer.status_code, cors(answer)["access-control-allow-origin"]) == (200, FRIEND)
        refused = await client.post("/v1/chat/completions", json=CHAT, headers={"origin": FRIEND})
        assert_error(refused, 401)
        assert cors(refused)["access-control-allow-origin"] == FRIEND  # so that the page can read why
        for response in (answer, refused):
            assert cors(response)["access-control-expose-headers"] == "x-request-id, retry-after"
        for response in (asked, answer, refused):
            assert "access-control-allow-credentials" not in response.headers


async def test_an_origin_that_is_not_listed_may_not() -> None:
    async with client_of(FakeEngine(say("x")), ServerConfig(allowed_origins=(FRIEND,))) as client:
        for response in (
            await client.options("/v1/chat/completions", headers=preflight(STRANGER)),
            await client.post("/v1/chat/completions", json=CHAT, headers={"origin": STRANGER, "cookie": "a=b"}),
        ):
            assert "access-control-allow-origin" not in response.headers


async def test_any_origin_never_comes_with_credentials() -> None:
    async with client_of(FakeEngine(say("x")), ServerConfig(allowed_origins=("*",))) as client:
        for response in (
            await client.options("/v1/chat/completions", headers=preflight(STRANGER)),
            await client.post("/v1/chat/completions", json=CHAT, headers={"origin": STRANGER, "cookie": "a=b"}),
        ):
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in response.headers


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"origin": STRANGER}, "Disallowed CORS origin"),
        ({"access-control-request-method": "DELETE"}, "Disallowed CORS method"),
    ],
)
async def test_a_preflight_that_is_refused_is_told_why(changes: dict[str, str], reason: str) -> None:
    async with client_of(FakeEngine(say("x")), ServerConfig(allowed_origins=(FRIEND,))) as client:
        refused = await client.options("/v1/chat/completions", headers={**preflight(FRIEND), **changes})
    error = assert_error(refused, 400)
    assert error["message"].startswith(f"{reason}: ") and "--allowed-origins" in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "cors_disallowed")
    assert refused.headers["content-type"] == "application/json"
    assert cors(refused).get("access-control-allow-origin") in (None, FRIEND)
    assert "Origin" in refused.headers["vary"]


@pytest.mark.parametrize("origin", [FRIEND, STRANGER])
async def test_preflights_have_ids(origin: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve.access")
    config = ServerConfig(allowed_origins=(FRIEND,), access_log="json")
    async with client_of(FakeEngine(say("x")), config) as client:
        asked = await client.options("/v1/chat/completions", headers={**preflight(origin), "x-request-id": "pre-1"})
        unnamed = await client.options("/v1/chat/completions", headers=preflight(origin))
    assert asked.headers["x-request-id"] == "pre-1"
    logged = [json.loads(line)["request_id"] for line in access_lines(caplog)]
    assert logged == ["pre-1", unnamed.headers["x-request-id"]]


async def test_a_page_may_read_that_the_server_failed() -> None:
    def broken(*args: object, **options: object) -> Any:
        raise KeyError("x")

    engine = FakeEngine(say("x"))
    engine.submit = broken  # type: ignore[method-assign]
    async with client_of(engine, ServerConfig(allowed_origins=(FRIEND,))) as client:
        failed = await client.post("/v1/chat/completions", json=CHAT, headers={"origin": FRIEND})
    assert_error(failed, 500)
    assert cors(failed)["access-control-allow-origin"] == FRIEND
    assert failed.headers["x-request-id"]


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_root_path_whether_or_not_the_proxy_takes_it_off(prefix: str) -> None:
    async with client_of(FakeEngine(say("x")), ServerConfig(root_path="/llm", api_keys=(KEY,))) as client:
        key = {"authorization": f"Bearer {KEY}"}
        assert (await client.get(f"{prefix}/health")).status_code == 200
        assert_error(await client.get(f"{prefix}/v1/models"), 401)
        assert (await client.get(f"{prefix}/v1/models", headers=key)).status_code == 200
        assert_error(await client.get(f"{prefix}/llm2/health", headers=key), 404)
        assert_error(await client.get(f"/llm{prefix}x/health"), 401)


def access_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "jaxserve.access"]


async def test_access_log_as_json(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve.access")
    async with client_of(FakeEngine(say("x")), ServerConfig(access_log="json", api_keys=(KEY,))) as client:
        headers = {"x-request-id": "mine", "authorization": f"Bearer {KEY}"}
        await client.post("/v1/chat/completions?key=hidden", json=CHAT, headers=headers)
        await client.get("/v1/models")
    first, second = (json.loads(line) for line in access_lines(caplog))
    assert (first["request_id"], first["method"], first["path"]) == ("mine", "POST", "/v1/chat/completions")
    assert (first["status"], first["complete"]) == (200, True)
    assert first["client"].startswith("127.0.0.1:")
    assert (second["path"], second["status"]) == ("/v1/models", 401)
    assert len(second["request_id"]) == 32
    assert KEY not in caplog.text
    assert "hidden" not in caplog.text


async def test_access_log_as_text_is_one_line_for_each_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve.access")
    async with client_of(FakeEngine(say("x")), ServerConfig(access_log="text")) as client:
        await client.get("/a%0d%0a2026 GET /forged", headers={"x-request-id": "mine"})
    (line,) = access_lines(caplog)
    assert "\n" not in line
    assert ' mine GET "/a\\r\\n2026 GET /forged" 404 ' in line


async def test_access_log_tells_of_streams_that_were_cut_short(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve.access")
    engine = FakeEngine(endless, token_delay=0.01, max_model_len=100_000)
    async with client_of(engine, ServerConfig(access_log="json")) as client:
        body = {"prompt": "x", "max_tokens": 50_000, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_lines())
        await until(lambda: bool(access_lines(caplog)))
    (line,) = access_lines(caplog)
    assert (json.loads(line)["status"], json.loads(line)["complete"]) == (200, False)


async def test_access_log_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve.access")
    async with client_of(FakeEngine(say("x")), ServerConfig(access_log="none")) as client:
        await client.get("/health")
    assert not access_lines(caplog)


PRIVATE: dict[str, Any] = {
    "model": MODEL_NAME,
    "messages": [{"role": "user", "content": "xyzzy"}],
    "stop": "xyzzy",
    "user": "xyzzy",
    "metadata": {"xyzzy": "xyzzy"},
    "max_tokens": 7,
    "temperature": 0.5,
    "stream": True,
}


async def test_logged_requests_hold_no_content(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "jaxserve")
    async with client_of(FakeEngine(say("plugh")), ServerConfig(log_requests=True)) as client:
        await client.post("/v1/chat/completions", json=PRIVATE, headers={"x-request-id": "mine"})
        await client.post("/v1/completions", json={"prompt": "xyzzy", "n": 2})
    first, second = (r.getMessage() for r in caplog.records if r.name == "jaxserve.server.requests")
    assert first.startswith("request mine /v1/chat/completions {")
    fields = json.loads(first[first.index("{") :])
    assert (fields["model"], fields["max_tokens"], fields["temperature"]) == (MODEL_NAME, 7, 0.5)
    assert (fields["messages"], fields["stop"], fields["metadata"]) == ("<1 items>", "<5 characters>", "<1 fields>")
    assert '"prompt": "<5 characters>"' in second
    for record in caplog.records:
        assert "xyzzy" not in record.getMessage()
        assert "plugh" not in record.getMessage()


async def test_content_is_logged_when_that_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve.server.requests")
    async with client_of(FakeEngine(say("x")), ServerConfig(log_requests=True, log_requests_content=True)) as client:
        await client.post("/v1/chat/completions", json=PRIVATE)
    assert "xyzzy" in caplog.text


async def test_requests_are_not_logged_by_default(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "jaxserve")
    async with client_of(FakeEngine(say("x"))) as client:
        await client.post("/v1/chat/completions", json=PRIVATE)
    assert "xyzzy" not in caplog.text
    assert not [record for record in caplog.records if record.name == "jaxserve.server.requests"]


@pytest.mark.parametrize(
    ("method", "path", "counted"),
    [
        ("POST", "/v1/completions", 1), ("POST", "/llm/v1/chat/completions", 1), ("GET", "/v1/models", 0),
        ("POST", "/tokenize", 0), ("GET", "/load", 0),
    ],
)  # fmt: skip
async def test_load_is_of_requests_for_answers(method: str, path: str, counted: int) -> None:
    load = ServerLoad()
    seen: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(load.requests)

    async def nothing(*message: Message) -> Any:
        raise AssertionError("neither the body nor an answer is the counter's business")

    scope = {"type": "http", "method": method, "path": path, "root_path": "/llm"}
    await LoadMiddleware(app, load)(scope, nothing, nothing)
    assert (seen, load.requests) == ([counted], 0)


async def test_load_counts_what_is_being_answered() -> None:
    engine = FakeEngine(endless)
    engine.gate.clear()
    async with client_of(engine) as client:

        async def load() -> int:
            return (await client.get("/load")).json()["server_load"]

        assert await load() == 0
        bodies = [{"prompt": "x"}, {"prompt": "x", "stream": True}]
        requests = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
        await until(lambda: len(engine.live) == 2)
        assert await load() == 2
        engine.gate.set()
        await asyncio.gather(*requests)
        assert await load() == 0
