"""What a benchmark sends."""

import json
from pathlib import Path

import pytest

from jaxserve.bench.workload import Prompts, load_workload
from jaxserve.bench.workload_files import Task


def test_the_built_in_lengths_have_the_published_means() -> None:
    tasks = load_workload("sharegpt-like").tasks
    assert len(tasks) == 500
    assert round(sum(task.prompt for task in tasks) / 500) == 229
    assert round(sum(task.output for task in tasks) / 500) == 202
    assert round(load_workload("sharegpt-like").mean_context) == 399


def test_fixed_lengths_are_sent_over_and_over() -> None:
    workload = load_workload("fixed:100/500")
    assert workload.task(0) == workload.task(7) == Task(100, 500)
    assert workload.mean_context == 350


def test_a_shared_prefix_is_the_same_tokens_in_every_prompt_and_the_rest_is_not() -> None:
    workload = load_workload("shared-prefix:64")
    prompts = Prompts(1000)
    first, second = (prompts.token_ids(workload.task(index), index) for index in (0, 1))
    assert first[:64] == second[:64]
    assert first[64:] != second[64:]
    assert len(first) == workload.tasks[0].prompt == load_workload("sharegpt-like").tasks[0].prompt + 64


def test_one_prompt_of_sixteen_is_long() -> None:
    prompts = [load_workload("long-among-short:4000").task(index).prompt for index in range(32)]
    assert prompts.count(4000) == 2
    assert prompts.count(100) == 30


def test_requests_that_ask_for_json_bring_a_schema_and_a_question() -> None:
    workload = load_workload("json-schema")
    assert workload.needs_text
    assert json.loads(workload.tasks[0].json_schema or "")["required"] == ["name", "age", "tags", "address"]
    assert Prompts(100).text(workload.tasks[3], 3) == workload.tasks[3].text


@pytest.mark.parametrize("name", ["fixed:0/5", "fixed:5", "nonsense", "azure", "shared-prefix:x", "fixed:-1/5"])
def test_an_unknown_workload_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=r"is unknown: use one of sharegpt-like"):
        load_workload(name)


def conversation(question: str, answer: str) -> dict[str, object]:
    return {
        "id": "x",
        "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}],
    }


def test_sharegpt_first_pairs_of_usable_length(tmp_path: Path) -> None:
    entries = [
        conversation("what is a heron like", "a grey bird that stands in water"),
        conversation("hi", "too short a question to count"),
        conversation("word " * 1025, "too long a question for this"),
        {"id": "y", "conversations": [{"from": "human", "value": "nobody answered this one"}]},
    ]
    (tmp_path / "file.json").write_text(json.dumps(entries))
    workload = load_workload(f"sharegpt:{tmp_path / 'file.json'}", count_tokens=lambda text: len(text.split()))
    assert workload.tasks == (Task(5, 7, text="what is a heron like"),)


def test_a_file_that_is_not_sharegpt_is_refused(tmp_path: Path) -> None:
    for text, message in (
        ("{}", "no list of conversations"),
        ("[1, 2]", "no conversation of usable"),
        ("{", "no JSON"),
    ):
        (tmp_path / "file.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_workload(f"sharegpt:{tmp_path / 'file.json'}")


def test_azure_trace_arrivals_start_at_zero_and_empty_requests_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,374,44\n"
        "2023-11-16 18:17:05.4799600,396,109\n"
        "2023-11-16 18:17:04.2299600,12,0\n"
    )
    workload = load_workload(f"azure:{path}")
    assert workload.has_arrivals
    assert [(task.prompt, task.output) for task in workload.tasks] == [(374, 44), (396, 109)]
    assert [task.arrival for task in workload.tasks] == pytest.approx([0.0, 1.5])


def test_a_broken_trace_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,374,many\n")
    with pytest.raises(ValueError, match="line 2 is no line of an Azure trace"):
        load_workload(f"azure:{path}")
    path.write_text("time,tokens\n1,2\n")
    with pytest.raises(ValueError, match="an Azure trace has"):
        load_workload(f"azure:{path}")


def test_requests_too_long_for_the_model_are_left_out() -> None:
    workload = load_workload("long-among-short:4000").fitting(1000)
    assert {task.prompt for task in workload.tasks} == {100}
    with pytest.raises(ValueError, match="fits 100 tokens"):
        workload.fitting(100)


def test_prompts_are_repeatable_and_within_their_range() -> None:
    task = Task(300, 1)
    assert Prompts(500, first=100).token_ids(task, 5) == Prompts(500, first=100).token_ids(task, 5)
    assert Prompts(500, first=100).token_ids(task, 5) != Prompts(500, first=100).token_ids(task, 6)
    ids = Prompts(500, first=100).token_ids(task, 5)
    assert len(ids) == 300 and min(ids) >= 100 and max(ids) < 500
    assert len(Prompts(500, longest=200_000).token_ids(Task(200_000, 1), 7)) == 200_000
