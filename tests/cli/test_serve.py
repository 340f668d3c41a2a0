"""`jaxserve serve`: what its flags make of the server, up to the point where a model would be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jaxserve.cli.main import build_app
from jaxserve.cli.serve_options import read_api_keys
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.speculative_config import SpeculativeConfig


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerConfig]]:
    """What servers were started with, in place of starting them."""
    calls: list[tuple[EngineConfig, ServerConfig]] = []

    def run(model: str, engine: EngineConfig, server: ServerConfig, progress: object, setup: object) -> int:
        calls.append((engine, server))
        return 0

    monkeypatch.setattr("jaxserve.server.run.serve", run)
    for name in ("configure_logging", "configure_access_log"):  # they would hold for the tests that follow
        monkeypatch.setattr(f"jaxserve.cli.serve.{name}", lambda *args, **fields: None)
    monkeypatch.delenv("JAXSERVE_API_KEY", raising=False)
    monkeypatch.delenv("JAXSERVE_ADMIN_API_KEY", raising=False)
    return calls


def serve(*flags: str, env: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(build_app(), ["serve", *flags], env=env)


def test_flags_reach_the_server(started: list[tuple[EngineConfig, ServerConfig]], tmp_path: Path) -> None:
    flags = [
        "--uds", "/run/jaxserve.sock", "--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem", "--root-path", "/llm",
        "--allowed-origins", "https://a.example", "--allowed-origins", "https://b.example", "--restart-engine",
        "--engine-process", "on",
        "--access-log", "json", "--log-requests", "--log-requests-content", "--max-body-bytes", "1000",
        "--stalled-client-timeout", "7", "--allow-special-tokens-in-content", "--max-num-queued-reqs", "5",
        "--max-num-queued-tokens", "600", "--timeout-keep-alive", "9", "--max-connections", "50", "--otlp-traces-endpoint", "http://localhost:4318",
    ]  # fmt: skip
    assert serve(*flags).exit_code == 0
    ((engine, server),) = started
    assert server == ServerConfig(
        uds="/run/jaxserve.sock", ssl_certfile="c.pem", ssl_keyfile="k.pem", root_path="/llm",
        allowed_origins=("https://a.example", "https://b.example"), restart_engine=True, access_log="json",
        log_requests=True, log_requests_content=True, max_body_bytes=1000, stalled_client_timeout=7.0,
        allow_special_tokens_in_content=True, otlp_traces_endpoint="http://localhost:4318",
        timeout_keep_alive=9.0, max_connections=50, engine_process="on",
    )  # fmt: skip
    assert (engine.max_num_queued_requests, engine.max_num_queued_tokens) == (5, 600)


def test_speculation_is_read_and_what_is_wrong_is_told(started: list[tuple[EngineConfig, ServerConfig]]) -> None:
    assert serve("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}').exit_code == 0
    ((engine, _),) = started
    assert engine.speculative_config == SpeculativeConfig("ngram", 4)
    for flags, message in (
        (["--speculative-config", '{"method": "ngram"}'], "lacks num_speculative_tokens"),
        (["--speculative-synthetic-acceptance", "0.8"], "has no effect without --speculative-config"),
        (
            ["--speculative-synthetic-acceptance", "0.8", "--speculative-config",
             '{"method": "ngram", "num_speculative_tokens": 4}'],
            "load_format='dummy' alone",
        ),
    ):  # fmt: skip
        outcome = serve(*flags)
        assert outcome.exit_code != 0
        assert message in outcome.output
    assert len(started) == 1


def test_without_flags_the_defaults_hold(started: list[tuple[EngineConfig, ServerConfig]]) -> None:
    assert serve().exit_code == 0
    assert started == [(EngineConfig(), ServerConfig())]


def test_keys_come_from_flags_and_file(started: list[tuple[EngineConfig, ServerConfig]], tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsk-3\n\n  sk-4 \n")
    assert serve("--api-key", "sk-1", "--api-key", "sk-2", "--api-key-file", str(file)).exit_code == 0
    assert started[0][1].api_keys == ("sk-1", "sk-2", "sk-3", "sk-4")


def test_keys_come_from_the_environment_too(started: list[tuple[EngineConfig, ServerConfig]], tmp_path: Path) -> None:
    environment = {"JAXSERVE_API_KEY": "sk-1 sk-2", "JAXSERVE_ADMIN_API_KEY": "ad-1"}
    assert serve(env=environment).exit_code == 0
    assert (started[0][1].api_keys, started[0][1].admin_api_keys) == (("sk-1", "sk-2"), ("ad-1",))
    file = tmp_path / "keys"
    file.write_text("sk-4")
    flags = ["--api-key", "sk-3", "--admin-api-key", "ad-2", "--api-key-file", str(file)]
    assert serve(*flags, env=environment).exit_code == 0
    assert set(started[1][1].api_keys) == {"sk-1", "sk-2", "sk-3", "sk-4"}
    assert set(started[1][1].admin_api_keys) == {"ad-1", "ad-2"}


@pytest.mark.parametrize("variable", ["JAXSERVE_API_KEY", "JAXSERVE_ADMIN_API_KEY"])
@pytest.mark.parametrize("blank", ["", " \t\n"])
@pytest.mark.parametrize("flags", [[], ["--api-key", "sk-1", "--admin-api-key", "ad-1"]])
def test_a_blank_variable_does_not_open_the_server(
    started: list[tuple[EngineConfig, ServerConfig]], variable: str, blank: str, flags: list[str]
) -> None:
    done = serve(*flags, env={variable: blank})
    assert done.exit_code == 1
    assert done.stderr.startswith(f"jaxserve: error: {variable} is set and holds no key: ")
    assert done.stderr.count("\n") == 1
    assert not started


@pytest.mark.parametrize("name", ["api", "admin-api"])
@pytest.mark.parametrize("key", [" hush", "hush ", "hu sh", "hu\tsh", "hush\n", " "])
def test_keys_with_white_space_are_refused_and_not_shown(
    started: list[tuple[EngineConfig, ServerConfig]], name: str, key: str
) -> None:
    done = serve(f"--{name}-key", "sk-1", f"--{name}-key", key)
    assert done.exit_code == 1
    assert f"jaxserve: error: {name.replace('-', '_')}_keys: number 2 of 2 has white space" in done.stderr
    assert "hush" not in done.output and not started


def test_a_byte_order_mark_is_no_part_of_a_prompt_or_key(
    started: list[tuple[EngineConfig, ServerConfig]], tmp_path: Path
) -> None:
    prompt, keys = tmp_path / "prompt.txt", tmp_path / "keys"
    prompt.write_text("Be brief.", encoding="utf-8-sig")
    keys.write_text("sk-1\n", encoding="utf-8-sig")
    assert serve("--pinned-prompt", str(prompt), "--api-key-file", str(keys)).exit_code == 0
    ((_, server),) = started
    assert (server.pinned_prompt, server.pinned_prompt_name) == ("Be brief.", str(prompt))
    assert server.api_keys == ("sk-1",)


@pytest.mark.parametrize("option", ["--pinned-prompt", "--api-key-file"])
def test_a_file_that_cannot_be_read_is_named(
    option: str, started: list[tuple[EngineConfig, ServerConfig]], tmp_path: Path
) -> None:
    latin = tmp_path / "latin"
    latin.write_bytes("Sei höflich.".encode("latin-1"))
    for file, reason in ((latin, "is no UTF-8 text"), (tmp_path / "missing", "No such file"), (tmp_path, "directory")):
        done = serve(option, str(file))
        assert done.exit_code == 1 and not started
        (line,) = done.stderr.splitlines()
        assert f"{option} {file} " in line and reason in line


def test_a_key_file_without_keys_does_not_open_the_server(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    with pytest.raises(ValueError, match="holds no key"):
        read_api_keys(file)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ssl-certfile", "c.pem"], "ssl_certfile and ssl_keyfile go together"),
        (["--allowed-origins", "chat.example"], "allowed origin 'chat.example' must be '*' or look like"),
        (["--allowed-origins", "https://*.example"], "allowed origin 'https://*.example'"),
        (["--root-path", "llm"], "root_path='llm' must start with a slash"),
        (["--log-requests-content"], "log_requests_content needs log_requests"),
        (["--max-num-queued-tokens", "0"], "max_num_queued_tokens=0 must be at least 1"),
        (["--otlp-traces-endpoint", "localhost:4317"], "otlp_traces_endpoint='localhost:4317' must be a URL like"),
        (["--timeout-keep-alive", "0"], "timeout_keep_alive=0.0 must be positive"),
        (["--max-connections", "0"], "max_connections=0 must be at least 1"),
        (["--api-key", ""], "an API key must not be empty"),
        (["--stalled-client-timeout", "0"], "stalled_client_timeout=0.0 must be positive"),
        (["--api-key-file", "/absent/keys"], "--api-key-file /absent/keys cannot be read (No such file or directory)"),
    ],
)
def test_flags_that_cannot_be_meant(
    started: list[tuple[EngineConfig, ServerConfig]], flags: list[str], message: str
) -> None:
    done = serve(*flags)
    assert done.exit_code == 1
    assert f"jaxserve: error: {message}" in done.stderr
    assert not started
