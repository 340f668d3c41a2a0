"""What cannot be measured is refused at once, with the option and its value: not after minutes, and not in each child."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxserve.bench import sweep as sweep_module
from jaxserve.bench.results import make_folder, write_one_file
from jaxserve.cli import bench as bench_cli
from jaxserve.cli import profile as profile_cli
from jaxserve.cli.main import build_app
from tests.tiny_engine import MODEL_CONFIG


@pytest.fixture(autouse=True)
def nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine, a run of a sweep, or a program on the device."""

    def begin(*arguments: object, **options: object) -> None:
        pytest.fail("it was not refused at once")

    monkeypatch.setattr(bench_cli, "measure_model", begin)
    monkeypatch.setattr(profile_cli, "claim_device_memory", begin)
    monkeypatch.setattr(sweep_module, "run_in_group", begin)
    monkeypatch.setattr("jaxserve.bench.engine_run.start_engine", begin)
    monkeypatch.setattr("jaxserve.bench.floor.device_ceiling", begin)


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), list(arguments))
    assert result.exit_code in (1, 2), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output


NUMBERS = [
    (["--concurrency", "inf"], "--concurrency 'inf' must be a list of positive numbers"),
    (["--concurrency", ""], "--concurrency '' must be a list of positive numbers"),
    (["--request-rate", "nan"], "--request-rate 'nan' must be a list of positive numbers"),
    (["--request-rate", "1,inf"], "--request-rate '1,inf' must be a list of positive numbers"),
    (["--request-rate", ""], "--request-rate '' must be a list of positive numbers"),
    (["--timeout", "-1"], "'--timeout': -1 must be a positive number"),
    (["--timeout", "nan"], "'--timeout': nan must be a positive number"),
    (["--trace-speed", "nan"], "'--trace-speed': nan must be a positive number"),
    (["--temperature", "nan"], "'--temperature': nan must be 0 or a positive number"),
    (["--temperature", "-1"], "'--temperature': -1 must be 0 or a positive number"),
    (["--num-requests", "0"], "'--num-requests': 0 must be at least 1"),
    (["--rounds", "0"], "'--rounds': 0 must be at least 1"),
]


@pytest.mark.parametrize(("arguments", "message"), NUMBERS)
def test_numbers_that_mean_nothing(arguments: list[str], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    for command in (["run", "llama-3-8b"], ["sweep", "--model", "llama-3-8b"]):
        assert message in refusal("bench", *command, *arguments, "--output", str(folder))
    assert not folder.exists()


@pytest.mark.parametrize("goal", ["0", "-3", "nan", "inf"])
def test_a_goal_that_is_none(goal: str, tmp_path: Path) -> None:
    message = f"'--slo-tpot-ms': {goal} must be a positive number"
    assert message in refusal("bench", "sweep", "--model", "llama-3-8b", "--slo-tpot-ms", goal)
    assert message in refusal("bench", "report", str(tmp_path), "--slo-tpot-ms", goal)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quantization", "foo"], "'foo' is not one of"),
        (["--kv-cache-dtype", "fp3"], "'fp3' is not one of"),
        (["--speculative-config", "{"], "--speculative-config '{' is not JSON"),
        (["--speculative-config", '{"method": "guess"}'], "lacks num_speculative_tokens"),
        (["--max-num-seqs", "0"], "max_num_seqs=0 must be at least 1"),
        (["--max-num-seqs", "8", "--max-num-batched-tokens", "4"], "max_num_batched_tokens=4 must not be below"),
        (["--model", "llama-9"], "unknown model 'llama-9': give one of llama-3-8b"),
        (["--seconds", "0"], "'--seconds': 0 must be a positive number"),
        (["--max-devices", "0"], "'--max-devices': 0 must be at least 1"),
    ],
)
def test_a_sweep_checks_what_its_runs_would_fail_with(arguments: list[str], message: str, tmp_path: Path) -> None:
    assert message in refusal(
        "bench", "sweep", "--model", "llama-3-8b", *arguments, "--output", str(tmp_path / "study")
    )


def test_an_endpoint_without_a_scheme(tmp_path: Path) -> None:
    message = "endpoint '127.0.0.1:8000' must look like http://HOST:PORT or https://HOST/PATH"
    endpoint = ["--endpoint", "127.0.0.1:8000", "--output", str(tmp_path / "study")]
    assert message in refusal("bench", "run", *endpoint)
    assert message in refusal("bench", "sweep", "--model", "llama-3-8b", *endpoint)
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is no JSON"), ("", "is no JSON"), ("[]", "must be a JSON object")]
)
def test_further_fields_that_are_none(text: str, message: str) -> None:
    for command in (["run", "llama-3-8b"], ["run", "--endpoint", "http://x"], ["sweep", "--model", "llama-3-8b"]):
        assert f"--extra-body '{text}' {message}" in refusal("bench", *command, "--extra-body", text)


def test_requests_that_no_sequence_holds(tmp_path: Path) -> None:
    folder = str(tmp_path / "study")
    for command in (["run"], ["sweep", "--model"]):
        for arguments, most in ((["--max-model-len", "64"], 64), ([], 8192)):
            message = f"no request of workload 'fixed:9000/8' fits {most} tokens: raise --max-model-len or take another"
            asked = [*command, "llama-3-8b", "--workload", "fixed:9000/8", *arguments]
            assert message in refusal("bench", *asked, "--output", folder)
    assert not Path(folder).exists()


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for command in (["run"], ["sweep", "--model"]):
        said = refusal("bench", *command, str(tmp_path / "empty"), "--output", str(tmp_path / "study"))
        assert f"{tmp_path / 'empty'} is no model: it has neither config.json" in said
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "inf"], "--rows 'inf' must be a list of positive numbers"),
        (["--prefill", "nan"], "--prefill 'nan' must be a list of positive numbers"),
        (["--page-size", "0"], "'--page-size': 0 must be at least 1"),
    ],
)
def test_shapes_that_no_kernel_has(arguments: list[str], message: str) -> None:
    assert message in refusal("bench", "kernels", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "0"], "'--concurrency': 0 must be at least 1"),
        (["--steps", "0"], "'--steps': 0 must be at least 1"),
        (["--context", "0"], "'--context': 0 must be at least 1"),
        (["--kernels", "0"], "'--kernels': 0 must be at least 1"),
        (["--concurrency", "8", "--max-num-seqs", "4"], "8 sequences of 420 tokens do not fit max_num_seqs=4"),
        (["--context", "500", "--max-model-len", "512"], "1 sequence of 520 tokens does not fit"),
    ],
)
def test_windows_that_cannot_be(arguments: list[str], message: str, tmp_path: Path) -> None:
    assert message in refusal("profile", "llama-3-8b", *arguments, "--output", str(tmp_path / "profile"))


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert f"File exists: {file}" in refusal("profile", "llama-3-8b", "--output", str(file))
    assert f"Not a directory: {file / 'x'}" in refusal("profile", "llama-3-8b", "--output", str(file / "x"))
    assert f"File exists: {file}" in refusal("bench", "sweep", "--model", "llama-3-8b", "--output", str(file))
    assert file.read_text() == "mine"


def test_an_output_that_a_run_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the engine is reached through measure_model, whose beginning this is about
    monkeypatch.setattr("jaxserve.bench.engine_run.start_engine", lambda *_: pytest.fail("it was not refused at once"))
    file, folder = tmp_path / "file", tmp_path / "folder.json"
    file.write_text("mine")
    folder.mkdir()
    for model in (["llama-3-8b"], ["--endpoint", "http://127.0.0.1:9"]):
        assert f"File exists: {file}" in refusal("bench", *model, "--output", str(file))
        assert f"Is a directory: {folder}" in refusal("bench", *model, "--output", str(folder))
        assert f"File exists: {file}" in refusal("bench", *model, "--output", str(file / "x.json"))


def test_an_output_that_would_replace_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # as above
    monkeypatch.setattr("jaxserve.bench.engine_run.start_engine", lambda *_: pytest.fail("it was not refused at once"))
    model, figures, damaged = (tmp_path / name for name in ("tiny.json", "figures.json", "damaged.json"))
    model.write_text(json.dumps(MODEL_CONFIG.to_json()))
    figures.write_text(json.dumps({"verdict": "", "parallelism": [], "runs": []}))  # a report's
    damaged.write_text('{"summaries": [')
    before = {path: path.read_text() for path in (model, figures, damaged)}
    monkeypatch.chdir(tmp_path)
    asked = ["run", str(model), "--workload", "fixed:8/6"]
    said = refusal("bench", *asked, "--output", "tiny.json")
    assert said == "jaxserve: error: --output tiny.json is the model's own file: give another name\n"
    for path in (figures, damaged, model):
        remedy = f"--output {path} exists and is no file that `jaxserve bench` wrote: give another name, or remove it"
        assert remedy in refusal("bench", "run", "--endpoint", "http://127.0.0.1:9", "--output", str(path))
        if path != model:
            assert remedy in refusal("bench", *asked, "--output", str(path))
    assert {path: path.read_text() for path in before} == before


def test_an_older_result_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_one_file(path, {"name": "before"}, [], {})
    assert make_folder(path, model=str(tmp_path)) is None


def test_json_that_is_nested_too_deeply(tmp_path: Path) -> None:
    deep = "[" * 100_000
    file = tmp_path / "deep.json"
    file.write_text(deep)
    assert f"{file} does not describe a model" in refusal("bench", "sweep", "--model", str(file))
    assert f"{file} does not describe a model" in refusal("bench", "kernels", str(file))
    assert f"{file} is no JSON file" in refusal("bench", "llama-3-8b", "--workload", f"sharegpt:{file}")
    for option in ("--extra-body", "--speculative-config"):
        arguments = ["--endpoint", "http://x"] if option == "--extra-body" else ["llama-3-8b"]
        assert f"{option} '[[" in refusal("bench", *arguments, option, deep)


def test_a_config_as_hugging_face_has_it_is_told_as_such(tiny_model_dir: Path) -> None:
    path = tiny_model_dir / "config.json"
    message = (
        f"{path} does not describe a model: it looks like a Hugging Face config: give the folder that holds its weights, or "
        "a JSON file with ModelConfig's fields"
    )
    for command in (["bench"], ["bench", "sweep", "--model"], ["bench", "kernels"], ["inspect"]):
        assert message in refusal(*command, str(path))


def test_a_folder_counts_before_an_architecture_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `jaxserve serve` and `jaxserve inspect` take it."""
    from jaxserve.models.presets import is_preset

    monkeypatch.chdir(tmp_path)
    assert is_preset("llama-3-8b")
    Path("llama-3-8b").mkdir()
    assert not is_preset("llama-3-8b")
    Path("tiny.json").write_text(json.dumps(MODEL_CONFIG.to_json()))
    assert is_preset("tiny.json")
