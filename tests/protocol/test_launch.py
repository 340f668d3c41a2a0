"""What is wrong with a model is told when it is loaded, in one line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.tokenizer_files import TokenizerFiles, TokenizerSettings
from jaxserve.config import EngineConfig
from jaxserve.progress import NoProgress
from jaxserve.protocol.launch import launch, load_chat_template
from jaxserve.text.tokenizer import Tokenizer
from tests.fakes import FakeEngine, say
from tests.tiny_model import CHAT_TEMPLATE, byte_level_tokenizer


def tokenizer_with(template: str | None) -> Tokenizer:
    settings = TokenizerSettings(eos_token="<|im_end|>", chat_template=template)
    return Tokenizer(TokenizerFiles(byte_level_tokenizer().to_str(), settings))


def test_broken_template_fails_the_start() -> None:
    with pytest.raises(CheckpointError, match=r"some-model: .*template is not valid"):
        load_chat_template(tokenizer_with("{% for message in messages %}{{ message.content }"), "some-model")


def test_template_is_the_checkpoints() -> None:
    template = load_chat_template(tokenizer_with(CHAT_TEMPLATE), "some-model")
    assert template is not None
    assert "user\nhi" in template.render([{"role": "user", "content": "hi"}])
    assert load_chat_template(tokenizer_with(None), "some-model") is None


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*arguments: object) -> NoReturn:
        raise RuntimeError("weights are loaded")

    monkeypatch.setattr("jaxserve.protocol.launch.start_checkpoint_engine", start)


def launch_pinned(model: Path, text: str, **sizes: Any) -> None:
    """With a prompt of as many tokens as its text has characters, and 16 of the template around it."""
    launch(str(model), EngineConfig(**sizes), NoProgress(), pinned_prompt=text, pinned_prompt_name="prompt.txt")


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    ("sizes", "longest"), [({}, 512), ({"max_model_len": 100}, 100), ({"num_pages": 4, "page_size": 8}, 32)]
)
def test_a_pinned_prompt_that_can_never_fit_is_refused_before_weights_are_loaded(
    sizes: dict[str, int], longest: int, tiny_model_dir: Path
) -> None:
    around = 16
    with pytest.raises(
        ValueError,
        match=rf"^prompt\.txt: the pinned prompt has {longest} tokens, and the context has {longest} .*shorten",
    ):
        launch_pinned(tiny_model_dir, "x" * (longest - around), **sizes)
    with pytest.raises(RuntimeError, match="weights are loaded"):
        launch_pinned(tiny_model_dir, "x" * (longest - around - 1), **sizes)
    with pytest.raises(ValueError, match=r"^prompt\.txt: .*has \d+ bytes of text, more than"):
        launch_pinned(tiny_model_dir, "x" * 100_000, **sizes)


@pytest.mark.usefixtures("nothing_loads")
def test_a_pinned_prompt_of_which_nothing_is_kept_is_told(
    tiny_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"prompt\.txt is empty: .*leave --pinned-prompt out"):
        launch_pinned(tiny_model_dir, " \n")
    for text, told in (("x" * 15, True), ("x" * 16, False)):
        caplog.clear()
        with pytest.raises(RuntimeError, match="weights are loaded"):
            launch_pinned(tiny_model_dir, text, page_size=32)
        assert ("prompt.txt: the pinned prompt has 31 tokens, less than a KV page" in caplog.text) == told


def test_what_is_pinned_is_told_with_its_pages(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "jaxserve.protocol.launch")
    engine = FakeEngine(say("x"))
    monkeypatch.setattr(
        "jaxserve.protocol.launch.start_checkpoint_engine", lambda *arguments: SimpleNamespace(engine=engine)
    )
    launch_pinned(tiny_model_dir, "x" * 100, page_size=16)
    assert "prompt.txt: pinned a prompt of 116 tokens, which keeps 7 KV pages" in caplog.messages
    launch_pinned(tiny_model_dir, "x" * 100, page_size=64)
    assert "prompt.txt: pinned a prompt of 116 tokens, which keeps 1 KV page" in caplog.messages


def test_a_pinned_prompt_that_the_engines_memory_cannot_hold_is_named(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many pages there are may only be known when the model is loaded: here they are for 256 tokens of 512."""
    engine = FakeEngine(say("x"))
    monkeypatch.setattr(
        "jaxserve.protocol.launch.start_checkpoint_engine", lambda *arguments: SimpleNamespace(engine=engine)
    )
    with pytest.raises(ValueError, match=r"^prompt\.txt: .*cannot be served: the prompt is too long"):
        launch_pinned(tiny_model_dir, "x" * 300)
    assert not engine.is_ready  # it was shut down


def test_a_pinned_prompt_needs_the_prefix_cache() -> None:
    with pytest.raises(ValueError, match="leave --pinned-prompt or --no-enable-prefix-caching out"):
        launch("some-model", EngineConfig(enable_prefix_caching=False), NoProgress(), pinned_prompt="Be brief.")
