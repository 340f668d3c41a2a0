"""What is wrong with a model is told when it is loaded, in one line."""

import pytest

from jaxserve.checkpoint.errors import CheckpointError
from jaxserve.checkpoint.tokenizer_files import TokenizerFiles, TokenizerSettings
from jaxserve.config import EngineConfig
from jaxserve.progress import NoProgress
from jaxserve.protocol.launch import launch, load_chat_template
from jaxserve.text.tokenizer import Tokenizer
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


def test_a_pinned_prompt_needs_the_prefix_cache() -> None:
    with pytest.raises(ValueError, match="leave --pinned-prompt or --no-enable-prefix-caching out"):
        launch("some-model", EngineConfig(enable_prefix_caching=False), NoProgress(), pinned_prompt="Be brief.")
