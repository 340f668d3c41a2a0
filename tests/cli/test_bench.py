"""`jaxserve bench` as a person types it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.bench.in_process import InProcessTarget
from jaxserve.bench.load import OnEnd
from jaxserve.bench.records import Load, RequestRecord
from jaxserve.bench.workload_files import Task
from jaxserve.cli.bench import parse_loads
from tests.bench.bench_command import bench
from tests.fakes import FakeEngine, endless, fake_service
from tests.server.harness import serving
from tests.tiny_engine import MODEL_CONFIG, few_programs


def test_a_model_alone_means_the_command_run(tmp_path: Path) -> None:
    model = tmp_path / "tiny.json"
    model.write_text(json.dumps(MODEL_CONFIG.to_json()))
    arguments = ["--workload", "fixed:8/6", "--concurrency", "1,2", "--num-requests", "2", "--max-num-seqs", "2",
                 "--max-num-batched-tokens", "16", "--output", str(tmp_path / "out.json")]  # fmt: skip
    with few_programs("full"):
        code, output = bench(str(model), *arguments)
    assert code == 0, output
    table = output[output.index("load") :].splitlines()
    assert [row.split()[:2] for row in table] == [["load", "requests"], ["1", "2"], ["2", "2"]]
    assert set(json.loads((tmp_path / "out.json").read_text())["requests"]) == {"1", "2"}


def test_what_was_measured_before_a_load_that_takes_too_long_is_in_the_file(tmp_path: Path) -> None:
    model, output = tmp_path / "tiny.json", tmp_path / "out.json"
    model.write_text(json.dumps(MODEL_CONFIG.to_json()))
    arguments = ["--workload", "fixed:8/6", "--concurrency", "1", "--request-rate", "1e-6", "--num-requests", "2",
                 "--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--timeout", "3", "--output",
                 str(output)]  # fmt: skip
    with few_programs("full"):
        code, said = bench(str(model), *arguments)
    assert code == 1
    last = said.splitlines()[-1]
    assert last.startswith(
        "jaxserve: error: 1 of 2 requests ended within 3 s at 1e-06 requests a second: raise --timeout"
    )
    kept = json.loads(output.read_text())
    assert [summary["load"] for summary in kept["summaries"]] == ["1"] and len(kept["requests"]["1"]) == 2
    assert kept["workload"] == "fixed:8/6"


def test_a_run_with_failed_requests_fails_once_its_table_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs it in CI looks at the exit code."""
    begin = InProcessTarget.start

    def start(self: InProcessTarget, index: int, task: Task, on_end: OnEnd) -> None:
        if index == 1:
            on_end(RequestRecord(task.prompt, 0, 0.0, 0.0, 0.0, index=index, error="it was lost"))
        else:
            begin(self, index, task, on_end)

    monkeypatch.setattr(InProcessTarget, "start", start)
    model = tmp_path / "tiny.json"
    model.write_text(json.dumps(MODEL_CONFIG.to_json()))
    arguments = ["--workload", "fixed:8/6", "--concurrency", "1,2", "--num-requests", "3", "--max-num-seqs", "2",
                 "--max-num-batched-tokens", "16", "--output", str(tmp_path / "out.json"), "--name", "A"]  # fmt: skip
    with few_programs("full"):
        code, output = bench(str(model), *arguments)
    assert code == 1 and "at 2: 1 of 3 requests failed: it was lost" in output
    assert output.splitlines()[-1] == "requests failed: A at 1 (1 of 3), 2 (1 of 3): it was lost"
    assert (tmp_path / "out.json").is_file()


def test_what_an_endpoint_refused_fails_the_run_until_it_is_measured_anew(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["--workload", "fixed:6/20", "--num-requests", "5", "--request-rate", "500", "--name", "peer",
                 "--vocab-size", "200", "--output", str(folder)]  # fmt: skip
    with serving(fake_service(FakeEngine(endless, max_live=1, token_delay=0.01))) as url:
        for told_again in (False, True):  # the second time it is read from the folder
            code, output = bench("--endpoint", url, *arguments)
            assert code == 1 and ("measuring 5 requests at 500/s" in output) != told_again
            last = output.splitlines()[-1]
            assert re.match(r"requests failed: peer at 500/s \(\d of 5\): status 429: .*too many requests wait; ", last)
            assert last.endswith(f"; a load whose .summary.json below {folder} is removed is measured again")
        # A sweep tells those of all its runs itself: to it the run has done what it was to do.
        code, output = bench("--endpoint", url, *arguments, "--failure-file", str(tmp_path / "reason"))
        assert code == 0 and "requests failed: peer" not in output and not (tmp_path / "reason").exists()


def test_one_request_is_told_as_one() -> None:
    with serving(fake_service(FakeEngine(endless))) as url:
        code, output = bench(
            "--endpoint", url, "--workload", "fixed:6/20", "--num-requests", "1", "--concurrency", "1", "--vocab-size", "200"
        )  # fmt: skip
    assert code == 0 and "measuring 1 request at 1 …" in output.splitlines()


@pytest.mark.long  # two engines are built, each in a process of its own
def test_over_http_the_engine_may_have_a_process_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    model = tmp_path / "tiny.json"
    model.write_text(json.dumps({**MODEL_CONFIG.to_json(), "vocab_size": 300, "eos_token_ids": []}))
    arguments = ["--workload", "fixed:8/6", "--concurrency", "2", "--num-requests", "2", "--max-num-seqs", "2",
                 "--max-num-batched-tokens", "16", "--output", str(tmp_path), "--http", "--engine-process",
                 "on"]  # fmt: skip
    command = [sys.executable, "-m", "jaxserve", "bench", str(model), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "over HTTP (one like it in a process of its own)" in done.stdout
    assert "over HTTP at 2: TPOT" in done.stdout
    for folder, in_process in ((tmp_path, True), (tmp_path / "http", False)):
        environment = json.loads((folder / "environment.json").read_text())
        assert (environment["transport"] == "in process") == in_process
        assert environment.get("engine_process", False) != in_process


def test_the_commands_are_listed() -> None:
    code, output = bench("--help")
    assert code == 0
    assert "run" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-3-8b", "--concurrency", "0"], "--concurrency '0' must be a list of positive numbers"),
        (["llama-3-8b", "--concurrency", "1.5"], "--concurrency '1.5' must be a list of whole numbers"),
        (["llama-3-8b", "--request-rate", "1,x"], "--request-rate '1,x' must be a list of positive numbers"),
        (["llama-3-8b", "--endpoint", "http://x"], "give either MODEL or --endpoint URL"),
        (["--concurrency", "1"], "give either MODEL or --endpoint URL"),
        (["llama-3-8b", "--workload", "poems"], "workload 'poems' is unknown"),
        (["llama-3-8b", "--trace-speed", "2"], "has no arrival times"),
        (["--endpoint", "http://x", "--extra-body", "[1]"], "--extra-body '[1]' must be a JSON object"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], message: str) -> None:
    code, output = bench(*arguments)
    assert code == 1
    assert message in output and len(output.splitlines()) == 1


def test_loads() -> None:
    assert parse_loads("1,8", "2.5", None, has_arrivals=False) == (
        Load("concurrency", 1), Load("concurrency", 8), Load("rate", 2.5),
    )  # fmt: skip
    assert parse_loads(None, None, None, has_arrivals=True) == (Load("trace", 1.0),)
    assert parse_loads(None, None, None, has_arrivals=False)[-1] == Load("concurrency", 64)
    assert parse_loads("4", None, None, has_arrivals=True) == (Load("concurrency", 4),)


def test_in_process_it_needs_neither_a_server_nor_its_packages() -> None:
    """As on a machine that has jax, flax, numpy, typer and rich, but no starlette, uvicorn, pydantic or httpx."""
    program = (
        "import sys\n"
        "for name in ('starlette', 'uvicorn', 'pydantic', 'sse_starlette', 'httpx', 'httptools', 'openai', 'tokenizers',\n"
        "             'prometheus_client', 'jinja2', 'orbax', 'safetensors', 'matplotlib', 'prompt_toolkit'):\n"
        "    sys.modules[name] = None\n"
        "import jaxserve.cli.main, jaxserve.bench.engine_run, jaxserve.bench.http_comparison\n"
        "jaxserve.cli.main.build_app()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
