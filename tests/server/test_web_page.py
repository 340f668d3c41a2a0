"""The page at `/`: its files, and the page itself in a headless browser."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app
from jaxserve.server.connection import uvicorn_config
from jaxserve.server.lifecycle import QuietServer
from jaxserve.server.listener import listener
from jaxserve.server.slot import ServiceSlot
from jaxserve.server.web_page import WEB_PATHS
from tests.fakes import MODEL_NAME, FakeEngine, endless, fake_service, say

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
SECONDS = 15_000  # milliseconds that the browser may take for anything
PHONE = {"width": 360, "height": 640}


def test_the_page_needs_nothing_from_elsewhere() -> None:
    client = TestClient(create_app(ServiceSlot(), ServerConfig()))
    for path in WEB_PATHS:
        answer = client.get(path)
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert re.sub(r"http://www\.w3\.org/2000/svg", "", answer.text).count("//www.") == 0
        assert not re.search(r"""(src|href)=["'](https?:)?//""", answer.text)
    assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
    assert client.get("/web/page.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert client.get("/web/../app.py").status_code == 404


def test_every_file_that_the_page_asks_for_is_there() -> None:
    client = TestClient(create_app(ServiceSlot(), ServerConfig()))
    asked = {f"/{name}" for name in re.findall(r'(?:src|href)="(web/[^"]+)"', client.get("/").text)}
    for path in WEB_PATHS:
        asked |= {f"/web/{name}" for name in re.findall(r'from "\./([^"]+)"', client.get(path).text)}
    assert asked and asked <= WEB_PATHS


def test_the_page_is_open_where_the_api_wants_a_key() -> None:
    client = TestClient(create_app(ServiceSlot(), ServerConfig(api_keys=("secret",))))
    assert client.get("/").status_code == 200
    assert client.get("/web/chat.js").status_code == 200
    assert client.post("/").status_code in (401, 405)
    assert client.get("/stats").status_code == 401


@contextmanager
def page_server(engine: FakeEngine, config: ServerConfig) -> Iterator[str]:
    with listener(config) as bound:
        settings = uvicorn_config(create_app(fake_service(engine), config), config)
        settings.timeout_graceful_shutdown = 1
        server = QuietServer(settings)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}{config.root_path}/"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="scripts/setup browser")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@contextmanager
def page_of(
    browser: Any, engine: FakeEngine, config: ServerConfig | None = None, *, fragment: str = "", **context: Any
) -> Iterator[Any]:
    """The page in a window of its own; what it logs as an error, or asks of other hosts, fails the test."""
    problems: list[str] = []
    with page_server(engine, config or ServerConfig(port=0)) as url:
        window = browser.new_context(**context)
        page = window.new_page()
        page.set_default_timeout(SECONDS)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if "Security Policy" in message.text else None)
        page.on("request", lambda request: None if request.url.startswith(url) or request.url.startswith("data:")
                else problems.append(request.url))  # fmt: skip
        page.goto(url + fragment)
        yield page
        window.close()
    assert not problems


def last_answer(page: Any) -> Any:
    return page.locator("#messages li.assistant").last


def wait_idle(page: Any) -> None:
    page.locator("#send").wait_for(state="visible")


def test_a_chat_with_numbers_and_a_second_turn(browser: Any) -> None:
    engine = FakeEngine(say("A heron is a <b>bird</b>."), token_delay=0.005)
    with page_of(browser, engine) as page:
        page.locator("#model", has_text=MODEL_NAME).wait_for()
        assert page.evaluate("document.activeElement.id") == "question"
        page.keyboard.type("What is a heron?")
        page.keyboard.press("Enter")
        numbers = last_answer(page).locator(".numbers")
        numbers.wait_for()
        assert last_answer(page).locator(".text").inner_text() == "A heron is a <b>bird</b>."
        assert re.fullmatch(r"first token after \d+ ms · \d+\.\d tokens/s · 26 tokens", numbers.inner_text())
        wait_idle(page)
        page.fill("#question", "And a crane?")
        page.click("#send")
        page.locator("#messages li.assistant .numbers").nth(1).wait_for()
        prompt = bytes(token for token in engine.submitted[-1][0] if token < 256).decode()
        assert "What is a heron?" in prompt and "A heron is a <b>bird</b>." in prompt and "And a crane?" in prompt


def test_what_is_said_is_text_and_never_markup(browser: Any) -> None:
    said = "<i>see</i> <img src=x>"
    with page_of(browser, FakeEngine(say(said), tokens_per_output=100)) as page:
        page.fill("#question", said)
        page.click("#send")
        last_answer(page).locator(".numbers").wait_for()
        assert page.locator("#messages .text").all_inner_texts() == [said, said]
        assert page.locator("#messages img, #messages i").count() == 0


def test_settings_reach_the_engine(browser: Any) -> None:
    engine = FakeEngine(say("ok"))
    with page_of(browser, engine) as page:
        page.click("summary")
        numbers = {"temperature": "0.3", "top_p": "0.9", "top_k": "7", "min_p": "0.1", "max_tokens": "5", "seed": "42"}
        for name, value in {**numbers, "system": "Be brief."}.items():
            page.fill(f"#{name}", value)
        page.fill("#question", "hi")
        page.click("#send")
        last_answer(page).locator(".numbers").wait_for()
    prompt, sampling = engine.submitted[0]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.3, 0.9, 7, 0.1)
    assert (sampling.max_tokens, sampling.seed) == (5, 42)
    assert b"Be brief." in bytes(token for token in prompt if token < 256)


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_an_answer_is_stopped_and_kept(browser: Any, way: str) -> None:
    engine = FakeEngine(endless, token_delay=0.02)
    with page_of(browser, engine) as page:
        page.fill("#question", "go on")
        page.keyboard.press("Enter")
        last_answer(page).locator(".text", has_text="abc").wait_for()
        page.click("#stop") if way == "button" else page.keyboard.press("Escape")
        last_answer(page).locator(".numbers", has_text="stopped").wait_for()
        wait_idle(page)
        kept = last_answer(page).locator(".text").inner_text()
        assert kept.startswith("abc")
        page.wait_for_function("document.querySelector('#status').textContent === 'Stopped.'")
        page.wait_for_timeout(100)
        assert last_answer(page).locator(".text").inner_text() == kept
    assert engine.aborted  # the server noticed: it generates for nobody


def test_an_answer_is_made_anew(browser: Any) -> None:
    engine = FakeEngine(say("one"))
    with page_of(browser, engine) as page:
        assert page.is_disabled("#regenerate")
        page.fill("#question", "hi")
        page.click("#send")
        last_answer(page).locator(".text", has_text="one").wait_for()
        wait_idle(page)
        engine.script = say("two")
        page.click("#regenerate")
        last_answer(page).locator(".text", has_text="two").wait_for()
        assert page.locator("#messages li").count() == 2
        wait_idle(page)
        page.click("#clear")
        assert page.locator("#messages li").count() == 0
    assert engine.submitted[0][0] == engine.submitted[1][0]


def test_what_goes_wrong_is_told(browser: Any) -> None:
    with page_of(browser, FakeEngine(endless, max_live=0)) as page:
        page.fill("#question", "hi")
        page.click("#send")
        alert = page.locator("[role=alert]", has_text="too many requests wait")
        alert.wait_for()
        wait_idle(page)


def test_a_key_is_asked_for_and_used(browser: Any) -> None:
    with page_of(browser, FakeEngine(say("hello")), ServerConfig(port=0, api_keys=("secret",))) as page:
        page.locator("#key-form").wait_for(state="visible")
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        page.locator("#model", has_text=MODEL_NAME).wait_for()
        assert page.is_hidden("#key-form")
        page.fill("#question", "hi")
        page.keyboard.press("Enter")
        last_answer(page).locator(".text", has_text="hello").wait_for()


def test_behind_a_proxys_path(browser: Any) -> None:
    with page_of(browser, FakeEngine(say("hello")), ServerConfig(port=0, root_path="/llm")) as page:
        page.locator("#model", has_text=MODEL_NAME).wait_for()


def test_live_charts_follow_the_metrics(browser: Any) -> None:
    engine = FakeEngine(endless, token_delay=0.05)
    with page_of(browser, engine) as page:
        page.fill("#question", "go on")
        page.keyboard.press("Enter")
        last_answer(page).locator(".text", has_text="a").wait_for()
        page.click("#tab-live")
        page.locator("#chart-running b", has_text="1").wait_for()
        page.locator("#chart-tpot polyline").first.wait_for(state="attached")
        assert page.is_hidden("#page-chat")
        page.click("#tab-chat")
        page.click("#stop")


def test_with_the_keyboard_alone(browser: Any) -> None:
    engine = FakeEngine(say("hello"))
    with page_of(browser, engine) as page:
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        page.keyboard.press("Enter")
        last_answer(page).locator(".numbers").wait_for()
        assert b"one\ntwo" in bytes(token for token in engine.submitted[0][0] if token < 256)
        wait_idle(page)
        page.focus("#tab-chat")
        reached = ["tab-chat"]
        while reached[-1] != "clear" and len(reached) < 12:
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        stations = [name for name in reached if name != "messages"]  # a list that scrolls may be one too
        assert stations == ["tab-chat", "theme", "SUMMARY", "question", "send", "regenerate", "clear"]
        page.focus("#tab-chat")
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.id") == "tab-live"
        assert page.is_visible("#page-live")


@pytest.mark.parametrize("fragment", ["", "#live"])
def test_a_phone_needs_no_sideways_scrolling(browser: Any, fragment: str) -> None:
    with page_of(browser, FakeEngine(say("word " * 40 + "x" * 200)), viewport=PHONE, fragment=fragment) as page:
        if not fragment:
            page.fill("#question", "hi " * 50)
            page.click("#send")
            last_answer(page).locator(".numbers").wait_for()
            page.click("summary")
            box = page.locator("#send").bounding_box()
            assert box["y"] + box["height"] <= PHONE["height"], "the button to send lies below the screen"
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def brightness(page: Any, of: str) -> float:
    colour = page.evaluate(f"getComputedStyle(document.body).{of}")
    red, green, blue = map(int, re.findall(r"\d+", colour)[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_colours_are_the_systems_and_can_be_chosen(browser: Any, scheme: str) -> None:
    with page_of(browser, FakeEngine(say("hi")), color_scheme=scheme) as page:
        dark = scheme == "dark"
        assert (brightness(page, "backgroundColor") < 0.3) == dark
        assert (brightness(page, "color") > 0.6) == dark
        page.click("#theme")  # light
        assert brightness(page, "backgroundColor") > 0.9
        page.click("#theme")  # dark
        assert brightness(page, "backgroundColor") < 0.3
        page.reload()
        assert brightness(page, "backgroundColor") < 0.3  # remembered
