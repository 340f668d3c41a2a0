"""Every field has its effect or is refused by name; what a client may get wrong is a 400, never a crash."""

from typing import Any

import pytest

from jaxserve.protocol.errors import BadRequestError
from jaxserve.protocol.parsing import parse_chat_request, parse_completion_request, parse_json
from jaxserve.protocol.requests import (
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    ChatCompletionRequest,
    CompletionRequest,
)

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_chat_request({"messages": MESSAGES, **fields})


def refusal(**fields: Any) -> BadRequestError:
    with pytest.raises(BadRequestError) as refused:
        chat(**fields)
    return refused.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "5"), ("max_tokens", 1.5), ("max_tokens", True),
        ("max_completion_tokens", 0), ("temperature", -0.1), ("temperature", 3.0), ("temperature", "0.5"),
        ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", True), ("top_p", 1.1),
        ("top_p", -0.1), ("top_k", -2), ("top_k", 1.5), ("min_p", 1.1), ("seed", 2**63), ("seed", 2**64), ("seed", 1.5),
        ("seed", "7"), ("n", 0), ("n", 129), ("n", 10**6), ("n", "2"), ("stop", ""), ("stop", 5), ("stop", ["a"] * 5),
        ("stop", "x" * 1001), ("stop_token_ids", [0] * 129), ("stream", "yes"), ("stream", 1), ("ignore_eos", 0),
        ("presence_penalty", 2.1), ("presence_penalty", True), ("frequency_penalty", -2.1), ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")), ("min_tokens", -1), ("logprobs", 1), ("logprobs", "yes"),
        ("top_logprobs", 21), ("top_logprobs", -1), ("top_logprobs", 2), ("prompt_logprobs", 21), ("prompt_logprobs", -1),
        ("continue_final_message", True), ("continue_final_message", 1), ("chat_template_kwargs", []),
        ("user", 5), ("metadata", 5), ("metadata", {str(i): "x" for i in range(17)}), ("metadata", {"k" * 65: "x"}),
        ("service_tier", "gold"), ("service_tier", 5), ("prompt_cache_retention", "1h"), ("safety_identifier", "x" * 129),
        ("verbosity", "low"), ("store", "yes"), ("model", 5), ("messages", 5), ("messages", []),
    ],
)  # fmt: skip
def test_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    assert refusal(**{field: value}).param == field


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("stop", ["ok", ""], "stop[1]"),
        ("stop_token_ids", [3, -1], "stop_token_ids[1]"),
        ("stream_options", {"include_usage": "yes"}, "stream_options.include_usage"),
        ("stream_options", {"usage": True}, "stream_options.usage"),
        ("messages", [None], "messages[0]"),
        ("messages", [{"content": "x"}], "messages[0].role"),
        ("messages", [*MESSAGES, {"role": "robot", "content": "x"}], "messages[1].role"),
        ("messages", [{"role": "user"}], "messages[0].content"),
        ("messages", [{"role": "user", "content": None}], "messages[0].content"),
        ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
        ("messages", [{"role": "user", "content": []}], "messages[0].content"),
        ("messages", [{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        ("messages", [{"role": "user", "content": "x", "tool_call_id": "1"}], "messages[0].tool_call_id"),
        ("messages", [{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ("messages", [{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].id"),
        ("messages", [{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ("messages", [{"role": "assistant", "tool_calls": []}], "messages[0].content"),
        ("messages", [{"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}], "messages[0].tool_calls[0].type"),
        ("messages", [{"role": "assistant", "tool_calls": [CALL] * 129}], "messages[0].tool_calls"),
        ("messages", [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]}],
         "messages[0].tool_calls[0].function.arguments"),
        ("messages", [{"role": "user", "content": "x", "reasoning_content": "y"}], "messages[0].reasoning_content"),
        ("messages", [{"role": "assistant", "content": "x", "refusal": "no"}], "messages[0].refusal"),
        ("logit_bias", {"-1": 1}, "logit_bias"), ("logit_bias", {"abc": 1}, "logit_bias"),
        ("logit_bias", {"1.5": 1}, "logit_bias"), ("logit_bias", {"05": 1}, "logit_bias"),
        ("logit_bias", {"5": 101}, "logit_bias"), ("logit_bias", {"5": -101}, "logit_bias"),
        ("logit_bias", {"5": None}, "logit_bias"), ("logit_bias", {"5": "5"}, "logit_bias"),
        ("logit_bias", {"5": True}, "logit_bias"), ("logit_bias", {str(n): 0 for n in range(1025)}, "logit_bias"),
        ("logit_bias", {"9" * 5000: 1}, "logit_bias"), ("logit_bias", [5], "logit_bias"),
        ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs.messages"),
        ("chat_template_kwargs", {"tools": []}, "chat_template_kwargs.tools"),
        ("chat_template_kwargs", {"chat_template": "x"}, "chat_template_kwargs.chat_template"),
        ("chat_template_kwargs", {"eos_token": "x"}, "chat_template_kwargs.eos_token"),
        ("chat_template_kwargs", {"x": "y" * 64_000}, "chat_template_kwargs"),
        ("chat_template_kwargs", {str(n): n for n in range(65)}, "chat_template_kwargs"),
        ("messages", [{"role": "user", "content": "x", "colour": "red"}], "messages[0].colour"),
    ],
)  # fmt: skip
def test_wrong_part_of_a_value_is_refused_by_its_place(field: str, value: Any, param: str) -> None:
    assert refusal(stream=True, **{field: value}).param == param


def test_missing_messages_are_named() -> None:
    with pytest.raises(BadRequestError, match="`messages` is missing"):
        parse_chat_request({})


def test_unknown_field_is_refused_with_a_suggestion() -> None:
    error = refusal(max_token=5)
    assert (error.param, error.code) == ("max_token", "unknown_parameter")
    assert "max_tokens" in error.message
    assert refusal(guided_jsn={}).param == "guided_jsn"


@pytest.mark.parametrize("field", sorted(UNSUPPORTED_CHAT))
def test_unsupported_chat_field_is_refused_unless_it_asks_for_nothing(field: str) -> None:
    error = refusal(**{field: {"something": "else"}})
    assert (error.param, error.code) == (field, "unsupported_parameter")
    for neutral in (None, *UNSUPPORTED_CHAT[field]):
        chat(**{field: neutral})


@pytest.mark.parametrize("field", sorted(UNSUPPORTED_COMPLETION))
def test_unsupported_completion_field_is_refused_unless_it_asks_for_nothing(field: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        parse_completion_request({"prompt": "x", field: [1, 2]})
    assert refused.value.param == field
    for neutral in (None, *UNSUPPORTED_COMPLETION[field]):
        parse_completion_request({"prompt": "x", field: neutral})


@pytest.mark.parametrize(
    ("field", "value"),
    [("tool_choice", "required"), ("tool_choice", "any"),
     ("chat_template", "{{ messages }}"), ("echo", True), ("reasoning_effort", "high")],
)  # fmt: skip
def test_constraints_that_are_not_supported_are_refused(field: str, value: Any) -> None:
    assert refusal(**{field: value}).param == field


def test_null_is_the_same_as_absent() -> None:
    everything = {**ChatCompletionRequest.model_fields, **UNSUPPORTED_CHAT}
    nulls = {field: None for field in everything if field != "messages"}
    assert chat(**nulls) == chat()


def test_account_fields_are_accepted_without_effect() -> None:
    metadata = {**{str(number): "" for number in range(15)}, "k" * 64: "é" * 512}
    request = chat(user="me", metadata=metadata, store=True, service_tier="auto", safety_identifier="x" * 128)
    assert request.sampling(max_tokens=None) == chat().sampling(max_tokens=None)
    for tier in ("default", "flex", "scale", "priority"):
        assert chat(service_tier=tier).sampling(max_tokens=None) == chat().sampling(max_tokens=None)


def test_what_is_too_long_in_metadata_is_told() -> None:
    error = refusal(metadata={"k" * 5000: "x"})
    assert "key: string should have at most 64 characters" in error.message and len(error.message) < 300
    error = refusal(metadata={"place": "v" * 5000})
    assert error.param == "metadata.place"
    assert "at most 512 characters" in error.message and len(error.message) < 300
    assert refusal(metadata={"place": 5}).param == "metadata.place"
    error = refusal(metadata={"[key]": 5})
    assert error.param == "metadata.[key]" and error.message.startswith("`metadata.[key]`: input should be")
    long = refusal(metadata={"k" * 5000: "v" * 5000})
    assert len(long.message) + len(long.param or "") < 600


def test_sampling_fields_take_effect() -> None:
    request = chat(
        temperature=0, top_p=0, top_k=-1, min_p=1, seed=-(2**63), n=128, stop="x", stop_token_ids=[5], ignore_eos=True,
        presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.5, logit_bias={"5": -100, "0": 0.5}, min_tokens=3,
    )  # fmt: skip
    sampling = request.sampling(max_tokens=7)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.0, -1, 1.0)
    assert (sampling.seed, sampling.n, sampling.max_tokens) == (-(2**63), 128, 7)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-2.0, 2.0, 1.5)
    assert (sampling.logit_bias, sampling.min_tokens) == (((5, -100.0), (0, 0.5)), 3)
    assert (sampling.stop_token_ids, sampling.ignore_eos, request.stop) == ((5,), True, ["x"])


def test_both_names_of_the_output_limit() -> None:
    assert chat(max_tokens=5).output_limit == 5
    assert chat(max_completion_tokens=6).output_limit == 6
    assert chat(max_tokens=5, max_completion_tokens=5).output_limit == 5
    assert chat().output_limit is None
    assert refusal(max_tokens=5, max_completion_tokens=6).param == "max_completion_tokens"


def test_completions_generate_sixteen_tokens_unless_told() -> None:
    assert parse_completion_request({"prompt": "x"}).output_limit == 16
    assert parse_completion_request({"prompt": "x", "max_tokens": None}).output_limit == 16


def test_stream_options_need_a_stream() -> None:
    assert refusal(stream_options={"include_usage": True}).param == "stream_options"
    alone = {"continuous_usage_stats": True}
    assert refusal(stream=True, stream_options=alone).param == "stream_options.continuous_usage_stats"
    assert chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}).include_usage()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"), ({"best_of": 3, "stream": True}, "best_of"), ({"best_of": 0}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"), ({"max_tokens": 0, "echo": True, "logprobs": 1, "n": 2}, "n"),
        ({"max_tokens": -1, "echo": True, "logprobs": 1}, "max_tokens"), ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"), ({"logprobs": -1}, "logprobs"), ({"min_tokens": 17}, "min_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"), ({"suffix": "x"}, "suffix"),
        ({"prompt": ["a"] * 9, "best_of": 128}, "best_of"),
    ],
)  # fmt: skip
def test_wrong_fields_of_a_completion_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        parse_completion_request({"prompt": "x", **fields})
    assert refused.value.param == param


def test_best_of_draws_more_than_it_returns() -> None:
    request = parse_completion_request({"prompt": "x", "n": 2, "best_of": 5})
    sampling = request.sampling(max_tokens=16)
    assert (sampling.n, sampling.logprobs) == (5, 0)
    assert parse_completion_request({"prompt": "x", "n": 2, "best_of": 2}).sampling(max_tokens=16).logprobs is None


def test_log_probabilities_that_the_engine_is_asked_for() -> None:
    def asked(route: str, **fields: Any) -> tuple[int | None, int | None]:
        parsed = chat(**fields) if route == "chat" else parse_completion_request({"prompt": "x", **fields})
        sampling = parsed.sampling(max_tokens=1)
        return sampling.logprobs, sampling.prompt_logprobs

    assert asked("chat") == asked("chat", logprobs=False) == asked("chat", top_logprobs=0) == (None, None)
    assert asked("chat", logprobs=True) == (0, None)
    assert asked("chat", logprobs=True, top_logprobs=20, prompt_logprobs=0) == (20, 0)
    assert asked("completion", logprobs=0) == (0, None)
    assert asked("completion", logprobs=2, echo=True) == (2, 2)
    assert asked("completion", logprobs=2, echo=True, prompt_logprobs=5) == (2, 5)
    assert asked("completion", echo=True) == (None, None)


def test_the_prompt_opens_an_answer_unless_a_message_is_continued() -> None:
    begun = {"messages": [*MESSAGES, {"role": "assistant", "content": "Once"}]}
    assert chat().opens_answer
    assert not chat(add_generation_prompt=False).opens_answer
    assert not chat(**begun, continue_final_message=True).opens_answer
    with pytest.raises(BadRequestError, match="exclude each other"):
        chat(**begun, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(BadRequestError, match="role 'assistant' without tool calls"):
        chat(
            messages=[*MESSAGES, {"role": "assistant", "content": "x", "tool_calls": [CALL]}],
            continue_final_message=True,
        )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_four_forms_of_a_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert parse_completion_request({"prompt": prompt}).prompts() == prompts


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"), ([[]], "prompt[0]"), (None, "prompt"), (5, "prompt"), ({}, "prompt"), ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"), ([True], "prompt[0]"), ([1, True], "prompt[1]"), ([1, -1], "prompt[1]"),
        ([1.5], "prompt[0]"), ([[1], "a"], "prompt[1]"), ([[1], [None]], "prompt[1][0]"), (["a"] * 1025, "prompt"),
    ],
)  # fmt: skip
def test_wrong_prompts_are_refused_by_their_place(prompt: Any, param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        parse_completion_request({"prompt": prompt})
    assert refused.value.param == param


def test_total_of_choices_is_limited() -> None:
    with pytest.raises(BadRequestError, match="limit is 1024"):
        parse_completion_request({"prompt": ["a"] * 9, "n": 128})


def test_completions_take_their_own_fields_only() -> None:
    assert isinstance(parse_completion_request({"prompt": "x", "echo": True}), CompletionRequest)
    with pytest.raises(BadRequestError, match="messages"):
        parse_completion_request({"prompt": "x", "messages": MESSAGES})


@pytest.mark.parametrize(
    "body",
    [b"{bad", b"", b"[]", b"null", b'{"a":NaN}', b"[" * 100_000, b'{"a":' * 100_000, b'{"a":"\\ud800"}', b"\xff\xfe",
     b'"text"', b'{"a":' + b"9" * 10_000 + b"}"],
)  # fmt: skip
def test_broken_json_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError):
        parse_json(body)


def test_huge_values_do_not_come_back_in_the_message() -> None:
    assert len(refusal(model=["x" * 100_000]).message) < 200
    assert len(refusal(**{"x" * 100_000: 1}).message) < 300
    assert len(refusal(temperature="9" * 100_000).message) < 200
