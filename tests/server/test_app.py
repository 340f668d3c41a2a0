"""The routes over HTTP: answers, event streams, error objects, keys, limits, and clients that go away."""

import asyncio
import hmac
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from jaxserve.config import ServerConfig
from jaxserve.engine.request import TokenLogprobs
from jaxserve.engine.time_histogram import TimeCounts
from jaxserve.server.app import create_app
from jaxserve.server.slot import ServiceSlot
from tests.fakes import MODEL_NAME, FakeEngine, FakeStats, endless, fake_service, say
from tests.server.harness import USER, assert_error, client_of, events, listening, raw_request, until

pytestmark = pytest.mark.anyio

CHAT = {"messages": [USER]}
KEY = "sk-secret-é"


async def test_chat_completion() -> None:
    async with client_of(FakeEngine(say("hello"))) as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
        body = response.json()
    assert response.headers["content-type"] == "application/json"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]


async def test_completion() -> None:
    async with client_of(FakeEngine(say("hello"))) as client:
        body = (await client.post("/v1/completions", json={"prompt": "x"})).json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}]


async def test_event_stream() -> None:
    async with client_of(FakeEngine(say("hi"))) as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"  # nginx would keep events until it has many
    assert response.headers["cache-control"] == "no-store"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "hi"


async def test_event_stream_of_completions_with_usage() -> None:
    body = {"prompt": "x", "n": 3, "stream": True, "stream_options": {"include_usage": True}}
    async with client_of(FakeEngine(say("a", "b", "c"))) as client:
        *chunks, usage, done = events((await client.post("/v1/completions", json=body)).text)
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 6)
    assert all(chunk["usage"] is None for chunk in chunks)
    finished = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(finished) == [0, 1, 2]


async def test_usage_in_every_chunk_of_completions() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "yz", "stream": True, "stream_options": options}
    async with client_of(FakeEngine(say("ab"))) as client:
        *chunks, done = events((await client.post("/v1/completions", json=body)).text)
    assert done == "[DONE]"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 2, 3, 3]
    assert [len(chunk["choices"]) for chunk in chunks] == [1, 1, 1, 0]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {2}


async def test_no_usage_chunk_unless_asked_for() -> None:
    async with client_of(FakeEngine(say("a"))) as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "n": 3, "stream": True})
    assert "usage" not in response.text


async def test_refusal_of_a_stream_is_an_http_error() -> None:
    async with client_of(FakeEngine(say("a"))) as client:
        assert_error(await client.post("/v1/chat/completions", json={**CHAT, "stream": True, "n": 0}), 400, "n")


async def test_engine_failure_in_a_stream_is_an_error_event() -> None:
    async with client_of(FakeEngine(endless, fail_after=3)) as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        *chunks, last = events(response.text)
        assert set(last) == {"error"}
        assert set(last["error"]) == {"message", "type", "param", "code"}
        assert "secret" not in response.text
        assert "[DONE]" not in response.text
        assert all(c["finish_reason"] is None for chunk in chunks for c in chunk["choices"])
        assert_error(await client.get("/health"), 503)


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_failure_before_the_first_token_is_an_http_error(stream: bool) -> None:
    async with client_of(FakeEngine(endless, fail_after=0)) as client:
        error = assert_error(await client.post("/v1/chat/completions", json={**CHAT, "stream": stream}), 500)
    assert "secret" not in error["message"]


async def test_models() -> None:
    async with client_of(FakeEngine(say("x"))) as client:
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == [MODEL_NAME]
        assert (await client.get(f"/v1/models/{MODEL_NAME}")).json()["max_model_len"] == 256
        assert_error(await client.get("/v1/models/org/other"), 404, "model")
        assert_error(await client.post("/v1/chat/completions", json={**CHAT, "model": "other"}), 404, "model")


async def test_side_routes() -> None:
    async with client_of(FakeEngine(say("abc"))) as client:
        await client.post("/v1/chat/completions", json=CHAT)
        assert (await client.get("/health")).json() == {"status": "ok", "device": "cpu"}
        assert (await client.get("/stats")).json()["device_kind"] == "cpu"
        assert set((await client.get("/version")).json()) == {"version"}
        lines = (await client.get("/metrics")).text.split("\n")
    assert "jaxserve:num_requests_running 0.0" in lines
    assert 'jaxserve:request_success_total{finished_reason="stop"} 1.0' in lines
    assert "jaxserve:time_to_first_token_seconds_count 1.0" in lines
    assert "jaxserve:inter_token_latency_seconds_count 3.0" in lines
    assert "jaxserve:e2e_request_latency_seconds_count 1.0" in lines
    assert f'jaxserve:device_info{{device="cpu",model="{MODEL_NAME}"}} 1.0' in lines


async def test_the_engines_own_numbers() -> None:
    engine = FakeEngine(say("x"))
    told = FakeStats(
        num_running=3, num_waiting=2, num_pages=80, num_free_pages=20, num_preemptions=4, num_steps=6, prompt_tokens=30,
        generation_tokens=12, last_step_ms=25.0, host_gap=0.125, step_times=TimeCounts((0.01, 1.0), (4, 2, 0), 0.5),
        last_host_ms=1.5, host_times=TimeCounts((0.001, 1.0), (1, 5, 0), 0.01),
    )  # fmt: skip
    engine.stats = lambda: told  # type: ignore[method-assign]
    async with client_of(engine) as client:
        lines = (await client.get("/metrics")).text.split("\n")
    for line in (
        "num_requests_running 3.0", "num_requests_waiting 2.0", "kv_cache_usage_perc 0.75", "num_preemptions_total 4.0",
        "engine_steps_total 6.0", "prompt_tokens_total 30.0", "generation_tokens_total 12.0", "last_step_seconds 0.025",
        "host_gap 0.125", "engine_step_seconds_sum 0.5", "engine_step_seconds_count 6.0",
        'engine_step_seconds_bucket{le="0.01"} 4.0', "last_host_step_seconds 0.0015",
        "engine_host_step_seconds_sum 0.01", 'engine_host_step_seconds_bucket{le="0.001"} 1.0',
    ):  # fmt: skip
        assert f"jaxserve:{line}" in lines


async def test_two_apps_count_apart() -> None:
    async with client_of(FakeEngine(say("x"))) as first, client_of(FakeEngine(say("x"))) as second:
        await first.post("/v1/chat/completions", json=CHAT)
        assert 'finished_reason="stop"} 0.0' in (await second.get("/metrics")).text


@pytest.mark.parametrize("body", [b"{bad", b"", b"[]", b"5", b"[" * 100_000, b'{"messages":[null]}'])
async def test_broken_bodies(body: bytes) -> None:
    async with client_of(FakeEngine(say("x"))) as client:
        for path in ("/v1/chat/completions", "/v1/completions"):
            response = await client.post(path, content=body, headers={"content-type": "application/json"})
            assert response.status_code == 400
            assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_web_page_cannot_post_without_asking(content_type: str) -> None:
    engine = FakeEngine(say("x"))
    headers = {"content-type": content_type, "origin": "https://evil.example", "cookie": "a=b"}
    async with client_of(engine) as client:
        assert_error(await client.post("/v1/chat/completions", content=json.dumps(CHAT), headers=headers), 400)
        preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
        response = await client.options("/v1/chat/completions", headers=preflight)
        assert_error(response, 405)
        assert not any(name.startswith("access-control") for name in response.headers)
    assert not engine.submitted


async def test_unknown_routes_and_methods() -> None:
    async with client_of(FakeEngine(say("x"))) as client:
        for path in ("/web", "/web/", "/v1", "/v1/models/", "/v1/chat/completions/", "/docs", "/v1/%2e/models"):
            assert_error(await client.get(path), 404, "model" if path == "/v1/models/" else None)
        for method, path in (("GET", "/v1/chat/completions"), ("DELETE", "/v1/models"), ("POST", "/health")):
            response = await client.request(method, path)
            assert_error(response, 405)
            assert response.headers["allow"]


async def test_body_larger_than_allowed() -> None:
    async def undeclared() -> AsyncIterator[bytes]:
        yield b'{"prompt": "x", "user": "'
        for _ in range(10):
            yield b"x" * 200
        yield b'"}'

    engine = FakeEngine(say("x"))
    async with client_of(engine, ServerConfig(max_body_bytes=1000)) as client:
        assert_error(await client.post("/v1/completions", json={"prompt": "x" * 20_000_000}), 413)
        headers = {"content-type": "application/json"}
        assert_error(await client.post("/v1/completions", content=undeclared(), headers=headers), 413)
        assert not engine.submitted
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_unforeseen_error_tells_nothing_but_the_request_id(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*args: object, **options: object) -> Any:
        raise KeyError("/secret/path")

    engine = FakeEngine(say("x"))
    engine.submit = broken  # type: ignore[method-assign]
    async with client_of(engine) as client:
        response = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "abc-1"})
    error = assert_error(response, 500)
    assert "abc-1" in error["message"]
    assert response.headers["x-request-id"] == "abc-1"
    assert not any(word in response.text for word in ("secret", "KeyError", "Traceback", "/"))
    assert "abc-1" in caplog.text
    assert "KeyError" in caplog.text


@pytest.mark.parametrize(("fail_after", "stream"), [(0, False), (0, True), (3, True)])
async def test_an_engine_error_is_found_under_the_client_s_id(
    fail_after: int, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with client_of(FakeEngine(endless, fail_after=fail_after)) as client:
        body = {"prompt": "x", "stream": stream}
        response = await client.post("/v1/completions", json=body, headers={"x-request-id": "abc-7"})
    error = events(response.text)[-1]["error"] if fail_after else assert_error(response, 500)
    assert error["message"].endswith("the server's log says more under request id abc-7")
    assert (error["code"], response.headers["x-request-id"]) == ("engine_error", "abc-7")
    assert "secret" not in response.text
    (line,) = [record.getMessage() for record in caplog.records if "boom" in record.getMessage()]
    assert "abc-7" in line and "request-0" in line


async def test_request_ids() -> None:
    async with client_of(FakeEngine(say("x"))) as client:
        assert (await client.get("/health", headers={"x-request-id": "mine"})).headers["x-request-id"] == "mine"
        made = [(await client.get("/health")).headers["x-request-id"] for _ in range(2)]
        assert len(set(made)) == 2
        too_long = await client.get("/health", headers={"x-request-id": "x" * 1000})
        assert len(too_long.headers["x-request-id"]) < 100


async def test_two_requests_may_bring_the_same_id() -> None:
    engine = FakeEngine(endless)
    engine.gate.clear()
    headers = {"x-request-id": "twin"}
    async with client_of(engine) as client:
        twins = [
            asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}, headers=headers)) for _ in range(2)
        ]
        await until(lambda: len(engine.live) == 2)
        twins[0].cancel()
        await until(lambda: len(engine.live) == 1)
        engine.gate.set()
        assert (await twins[1]).json()["choices"][0]["text"] == "abcdefghijklmnop"


@pytest.mark.parametrize("stream", [False, True])
async def test_overload_is_answered_at_once(stream: bool) -> None:
    engine = FakeEngine(endless, max_live=4)
    engine.gate.clear()
    async with client_of(engine) as client:
        body = {"prompt": "x", "stream": stream}
        requests = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(50)]
        await until(lambda: sum(request.done() for request in requests) == 46)
        engine.gate.set()
        responses = await asyncio.gather(*requests)
    refused = [response for response in responses if response.status_code != 200]
    assert len(refused) == 46
    for response in refused:
        assert_error(response, 429)
        assert int(response.headers["retry-after"]) > 0
    answered = [response.text for response in responses if response.status_code == 200]
    assert all('"finish_reason":"length"' in text for text in answered)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 4}, {"prompt": ["a", "b"], "stream": True}])
@pytest.mark.parametrize("started", [True, False])
async def test_clients_that_go_away_end_their_requests(fields: dict[str, Any], started: bool) -> None:
    engine = FakeEngine(endless, token_delay=0.01, max_model_len=100_000)
    if not started:
        engine.gate.clear()
    async with listening(create_app(fake_service(engine), ServerConfig())) as port:
        body = {"prompt": "x", "max_tokens": 50_000, **fields}
        writers = [await raw_request(port, "/v1/completions", body) for _ in range(5)]
        await until(lambda: len(engine.live) >= 5)
        for writer in writers:
            writer.close()
        await until(lambda: not engine.live, seconds=1.0)
        engine.gate.set()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
            assert 'finished_reason="error"} 0.0' in (await client.get("/metrics")).text


async def test_slow_reader_does_not_hold_others_up() -> None:
    engine = FakeEngine(endless, tokens_per_output=1000, max_model_len=5_000_000)
    async with listening(create_app(fake_service(engine), ServerConfig())) as port:
        writer = await raw_request(port, "/v1/completions", {"prompt": "x", "max_tokens": 2_000_000, "stream": True})
        await until(lambda: bool(engine.live))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            for _ in range(3):
                assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        writer.close()
        await until(lambda: not engine.live)


async def test_no_work_while_loading_or_draining() -> None:
    slot = ServiceSlot()
    async with client_of(slot) as client:
        for path in ("/health", "/v1/models", "/stats"):
            assert assert_error(await client.get(path), 503)["code"] == "loading"
        response = await client.post("/v1/chat/completions", json=CHAT)
        assert assert_error(response, 503)["code"] == "loading"
        assert response.headers["retry-after"]
        assert (await client.get("/metrics")).status_code == 200
        slot.fill(fake_service(FakeEngine(say("x"))))
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        slot.start_draining()
        assert assert_error(await client.get("/health"), 503)["code"] == "draining"
        assert_error(await client.post("/v1/chat/completions", json=CHAT), 503)
        assert (await client.get("/v1/models")).status_code == 200


def all_routes() -> list[tuple[str, str]]:
    app = create_app(ServiceSlot(), ServerConfig())
    known = [
        (method, route.path.replace("{name:path}", "x"))
        for route in app.routes
        if isinstance(route, Route)
        for method in [*(route.methods or []), "OPTIONS", "PUT"]
    ]
    odd = [
        "/nowhere",
        "//v1/models",
        "/v1/./models",
        "/health/",
        "/%2e/health",
        "/Health",
        "//health",
        "/health/../stats",
    ]
    return [*known, *(("GET", path) for path in odd)]


# What is open to everyone: the probe, and the page's own files, which are the package's and hold nothing of the server's.
PAGE_FILES = {"/", "/web/page.css", "/web/page.js", "/web/api.js", "/web/chat.js", "/web/live.js"}


@pytest.mark.parametrize(
    "headers",
    [
        [], [("authorization", "Bearer wrong")], [("authorization", "bearer wrong")],
        [("authorization", "Bearer")], [("authorization", "")], [("authorization", KEY)],
        [("authorization", f"Basic {KEY}")], [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer wrong")],
        [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")], [("x-api-key", KEY)],
        [("authorization", "Bearer ключ")], [("authorization", "Bearer " + "x" * 50_000)],
    ],
)  # fmt: skip
async def test_every_route_but_health_and_the_page_wants_the_key(headers: list[tuple[str, str]]) -> None:
    encoded = [(name.encode(), value.encode()) for name, value in headers]
    async with client_of(FakeEngine(say("x")), ServerConfig(api_keys=("other", KEY))) as client:
        for method, path in all_routes():
            url = client.base_url.copy_with(raw_path=path.encode())
            response = await client.send(httpx.Request(method, url, headers=encoded))
            if method in ("GET", "HEAD") and path in {"/health", *PAGE_FILES}:
                assert response.status_code == 200
            elif method == "HEAD":
                assert response.status_code == 401
            else:
                assert assert_error(response, 401)["code"] == "invalid_api_key"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
@pytest.mark.parametrize("key", ["other", KEY])
async def test_any_of_the_keys_opens(scheme: str, key: str) -> None:
    headers = {b"authorization": f"{scheme} {key}".encode()}
    async with client_of(FakeEngine(say("x")), ServerConfig(api_keys=("other", KEY))) as client:
        response = await client.post("/v1/chat/completions", json=CHAT, headers=headers)  # type: ignore[arg-type]
    assert response.status_code == 200


@pytest.mark.parametrize("key", ["first", "third", "admin", "wrong"])
async def test_a_key_is_compared_with_all_that_are_known_in_constant_time(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, lengths = hmac.compare_digest, []

    def counted(sent: bytes, known: bytes) -> bool:
        lengths.append((len(sent), len(known)))
        return compare(sent, known)

    monkeypatch.setattr("jaxserve.server.middleware.hmac.compare_digest", counted)
    config = ServerConfig(api_keys=("first", "second", "third"), admin_api_keys=("admin",))
    async with client_of(FakeEngine(say("x")), config) as client:
        response = await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    assert response.status_code == (200 if key in ("first", "third", "admin") else 401)
    assert lengths == [(32, 32)] * 4  # digests: neither where a key differs nor how long it is makes a difference


async def test_responses_route() -> None:
    async with client_of(FakeEngine(say("hi"))) as client:
        body = (await client.post("/v1/responses", json={"input": "x"})).json()
        assert body["output"][0]["content"] == [
            {"type": "output_text", "text": "hi", "annotations": [], "logprobs": []}
        ]
        assert (body["object"], body["error"], body["tools"], body["store"]) == ("response", None, [], False)
        response = await client.post("/v1/responses", json={"input": "x", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, end = response.text.split("\n\n")
    assert end == ""
    for block in blocks:
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert blocks[-1].startswith("event: response.completed\n")


async def test_engine_failure_in_a_responses_stream_is_an_error_event() -> None:
    async with client_of(FakeEngine(endless, fail_after=3)) as client:
        response = await client.post("/v1/responses", json={"input": "x", "stream": True})
    assert set(json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))) == {"error"}
    assert "response.completed" not in response.text


async def test_tokenize_and_detokenize_routes() -> None:
    async with client_of(FakeEngine(say("x"))) as client:
        body = (await client.post("/tokenize", json={"prompt": "hé"})).json()
        assert body == {"count": 3, "max_model_len": 256, "tokens": [*"hé".encode()], "token_strs": None}
        messages = (await client.post("/tokenize", json={"messages": [USER], "return_token_strs": True})).json()
        assert len(messages["token_strs"]) == messages["count"]
        assert (await client.post("/detokenize", json={"tokens": body["tokens"]})).json() == {"prompt": "hé"}
        assert_error(await client.post("/tokenize", json={"prompt": 5}), 400, "prompt")
        assert_error(await client.post("/detokenize", json={"tokens": [259]}), 400, "tokens[0]")
        assert_error(await client.get("/tokenize"), 405)


async def test_log_probabilities_are_strict_json() -> None:
    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is no JSON")

    def impossible(token: int, count: int) -> TokenLogprobs:
        return TokenLogprobs(token, -math.inf, ((token, -math.inf),) * count)

    engine = FakeEngine(say("hi"), logprobs_of=impossible)
    async with client_of(engine) as client:
        for stream in (False, True):
            body = {**CHAT, "logprobs": True, "top_logprobs": 20, "stream": stream}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200
            for text in [line[6:] for line in response.text.split("\n") if line[:7] == "data: {"] or [response.text]:
                json.loads(text, parse_constant=refuse)
