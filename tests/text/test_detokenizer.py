"""Streamed text is the text of the whole sequence, and no piece cuts a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.token_bytes import byte_characters
from jaxserve.text.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level_tokenizer, sentencepiece_tokenizer, token_ids

BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()


def stream(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip_special_tokens: bool = True
) -> list[str]:
    """The pieces, one for each output token, and what `finish` gives."""
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens)
    return [*(detokenizer.push([token_id]) for token_id in output), detokenizer.finish()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    if tokenizer is BYTE_LEVEL:
        return token_ids(tokenizer, *(byte_characters()[byte] for byte in data))
    return token_ids(tokenizer, *(f"<0x{byte:02X}>" for byte in data))


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "byte fallback"])
@pytest.mark.parametrize("character", ["é", "\U0001f336", "한"])
def test_character_in_several_tokens_comes_whole(tokenizer: Tokenizer, character: str) -> None:
    output = byte_ids(tokenizer, character.encode()) + tokenizer.encode("ab", add_special_tokens=False)
    pieces = stream(tokenizer, [], output)
    assert "".join(pieces) == tokenizer.decode(output)
    assert character in "".join(pieces)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "byte fallback"])
def test_lone_lead_byte_is_one_replacement_and_stops_nothing(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("x", add_special_tokens=False)
    pieces = stream(tokenizer, prompt, byte_ids(tokenizer, b"\xc3") + token_ids(tokenizer, "a", "b", "c"))
    assert pieces == ["", "\ufffda", "b", "c", ""]
    assert stream(tokenizer, prompt, byte_ids(tokenizer, b"\xc3")) == ["", "\ufffd"]


def test_byte_level_keeps_its_leading_space() -> None:
    prompt = BYTE_LEVEL.encode("The answer is")
    assert stream(BYTE_LEVEL, prompt, token_ids(BYTE_LEVEL, "Ġyes")) == [" yes", ""]
    assert stream(BYTE_LEVEL, [], token_ids(BYTE_LEVEL, "Ġyes")) == [" yes", ""]


def test_sentencepiece_drops_one_space_at_the_start_only() -> None:
    pieces = token_ids(SENTENCEPIECE, "▁", "▁leading", "▁x")
    begin = token_ids(SENTENCEPIECE, "<s>")
    assert stream(SENTENCEPIECE, [], pieces) == ["", " leading", " x", ""]
    assert stream(SENTENCEPIECE, begin, pieces) == ["", " leading", " x", ""]
    assert stream(SENTENCEPIECE, begin + token_ids(SENTENCEPIECE, "▁le"), pieces) == [" ", " leading", " x", ""]


def test_space_after_a_hidden_control_token_is_kept() -> None:
    output = token_ids(SENTENCEPIECE, "▁x", "</s>", "▁x")
    assert stream(SENTENCEPIECE, [], output) == ["x", "", " x", ""]
    assert stream(SENTENCEPIECE, [], output, skip_special_tokens=False) == ["x", "</s>", " x", ""]


def test_ids_outside_the_vocabulary_are_no_text() -> None:
    assert stream(BYTE_LEVEL, [], [10**6, *token_ids(BYTE_LEVEL, "a")]) == ["", "a", ""]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "byte fallback"])
def test_output_that_completes_the_prompts_character_shows_it(tokenizer: Tokenizer) -> None:
    prompt = token_ids(tokenizer, "a") + byte_ids(tokenizer, "é한".encode()[:-1])
    pieces = stream(tokenizer, prompt, byte_ids(tokenizer, "한".encode()[-1:]) + token_ids(tokenizer, "b"))
    assert "".join(pieces) == "한b"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "byte fallback"])
def test_copies_go_on_by_themselves(tokenizer: Tokenizer) -> None:
    character = byte_ids(tokenizer, "한".encode())
    prompt, letters = token_ids(tokenizer, "a") + character[:1], token_ids(tokenizer, "b", "c")
    outputs = [character[1:] + letters, character[1:2] + letters, letters]
    at_end = Detokenizer(tokenizer, prompt)
    copies = [at_end.copy() for _ in outputs]
    shown = [copy.push(output) + copy.finish() for copy, output in zip(copies, outputs, strict=True)]
    assert shown == ["".join(stream(tokenizer, prompt, output)) for output in outputs]
    assert len(set(shown)) > 1


@given(st.data())
def test_joined_pieces_equal_decoding_everything(data: st.DataObject) -> None:
    tokenizer = data.draw(st.sampled_from([BYTE_LEVEL, SENTENCEPIECE]))
    ids = st.one_of(
        st.integers(0, tokenizer.vocab_size + 2).map(lambda token_id: [token_id]),
        st.sampled_from("é\U0001f336한 \x00").map(lambda text: byte_ids(tokenizer, text.encode())),
    )
    sequence = [token_id for part in data.draw(st.lists(ids, max_size=12)) for token_id in part]
    skip = data.draw(st.booleans())
    pieces = stream(tokenizer, [], sequence, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(sequence, skip_special_tokens=skip)
    whole = Detokenizer(tokenizer, skip_special_tokens=skip)
    assert whole.push(sequence) + whole.finish() == "".join(pieces)

    cut = data.draw(st.integers(0, len(sequence)))
    before = tokenizer.decode(sequence[:cut], skip_special_tokens=skip)
    if not before.endswith("\ufffd") and not tokenizer.decode(sequence, skip_special_tokens=skip).count("\ufffd"):
        after = "".join(stream(tokenizer, sequence[:cut], sequence[cut:], skip_special_tokens=skip))
        assert before + after == tokenizer.decode(sequence, skip_special_tokens=skip)


def test_token_bytes_joined_are_the_text() -> None:
    text = "hell é한 \U0001f336 <tool é>"
    ids = BYTE_LEVEL.encode(text)
    assert b"".join(BYTE_LEVEL.token_bytes(token_id) for token_id in ids).decode() == text
