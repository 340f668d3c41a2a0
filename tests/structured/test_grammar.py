"""Expressions, choices and grammars, and the compiler around them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from jaxserve.constraint import ConstraintError, TokenConstraint
from jaxserve.structured.compiler import GrammarCompiler
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.grammar import Grammar, compile_grammar
from tests.fakes import MODEL_CONFIG, byte_tokenizer
from tests.structured.grammars import allowed, compiled, looked_ahead, refused_at, tokens_of, vocabulary_of

CHOICES = ["a/b", "c.d\n", 'é"', "ab", "abc", "{x}"]


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("regex", "[0-9]{3}(-x)?"), ["123", "123-x"], ["12", "123-", "x123"]),
        (Grammar.of_choices(CHOICES), CHOICES, ["cxd", "a"]),
        (Grammar("grammar", 'root ::= [a-z]+ "!"'), ["ab!"], ["ab", "!"]),
        (Grammar("grammar", '# Two.\nroot ::=\n  "a" |\n  b-c\nb-c ::= "b"'), ["a", "b"], ["c"]),
        (Grammar("grammar", '// One.\n?start: x\n!x: "a" | "(" x ")"'), ["a", "((a))"], ["(a", "()"]),
        (Grammar("grammar", 'start: "::=" "a"'), ["::=a"], ["a"]),
        (Grammar("grammar", "\n" * 200_000 + 'start: "a"'), ["a"], ["b"]),
        (Grammar("grammar", 'start: "a" | "b" NUM\nNUM: /[0-9]{1,2}/'), ["a", "b12"], ["b", "b123"]),
    ],
)  # fmt: skip
def test_texts_of_a_grammar(grammar: Grammar, good: list[str], bad: list[str]) -> None:
    rule = compiled(grammar)
    assert [text for text in good if refused_at(rule, text) is not None] == []
    assert [text for text in bad if refused_at(rule, text) is None] == []


@pytest.mark.parametrize(
    "grammar",
    [Grammar("regex", "(a"), Grammar("grammar", "start: NOTHING"), Grammar("grammar", "root ::= ("),
     Grammar("grammar", 'start ::= "a"'), Grammar("regex", "[^\\s\\S]")],
)  # fmt: skip
def test_broken_grammars_are_refused(grammar: Grammar) -> None:
    with pytest.raises(GrammarError) as refused:
        compiled(grammar)
    assert str(refused.value) and "\n" not in str(refused.value)


def test_states_of_one_grammar_do_not_share_anything() -> None:
    grammar = compiled(Grammar("regex", "ab|cd"))
    first, second = grammar.start(), grammar.start()
    first.accept(ord("a"))
    second.accept(ord("c"))
    first.accept(ord("b"))
    second.accept(ord("d"))
    assert first.is_final and second.is_final


def test_a_token_that_may_not_stand_there_is_an_error() -> None:
    state = compiled(Grammar("regex", "ab")).start()
    with pytest.raises(ConstraintError):
        state.accept(ord("b"))


@pytest.mark.parametrize("num_words", [3, 8, 9, 12])  # fewer than the grammar has, as many, more
def test_masks_written_together_are_those_written_one_by_one(num_words: int) -> None:
    ends = compiled(Grammar.of_choices(["a"])).start()
    ends.accept(ord("a"))
    fails = compiled(Grammar("regex", "[0-9]+")).start()
    with pytest.raises(ConstraintError):
        fails.accept(ord("a"))
    digits = compiled(Grammar("regex", "[0-9]+")).start()
    word = compiled(Grammar.of_schema({"enum": ["word"]})).start()
    states = [digits, fails, word, ends]
    assert len({state.batch for state in states}) == 1 and digits.batch is not None
    masks, rows = np.full((6, num_words), -1, np.int32), [4, 1, 0, 3]
    errors = digits.batch.write(states, masks, rows)
    assert list(errors) == [1] and "cannot go on" in errors[1]
    for state, row in ((digits, 4), (word, 0), (ends, 3)):
        expected = np.zeros(num_words, np.int32)
        state.write_mask(expected)
        assert (masks[row] == expected).all()
    assert masks[4].any() and not masks[3].any()
    assert (masks[[2, 5]] == -1).all()


def test_a_vocabulary_may_fill_all_but_one_bit_of_its_masks() -> None:
    vocabulary = vocabulary_of("abcdefghijklmnopqrstuvwxyz01234")
    assert vocabulary.end_id == 31
    state = compile_grammar(Grammar("regex", "a[b4]?"), vocabulary).start()
    state.accept(0)
    masks = np.zeros((1, 1), np.int32)
    assert state.batch is not None and state.batch.write([state], masks, [0]) == {}
    assert tokens_of(masks[0]) == allowed(state, 31) == [1, 30]
    assert state.is_complete


def test_what_is_known_to_be_forced_is_told_and_masked_without_asking_again() -> None:
    state = compiled(Grammar("regex", "[ab]xyz[cd]")).start()
    state.accept(ord("a"))
    assert state.forced_run(8) == tuple(b"xyz")
    for token, left in zip(b"xyz", (b"xyz", b"yz", b"z"), strict=True):
        assert state.forced_run(8) == tuple(left) and state.forced_run(1) == (token,)
        masks = np.zeros((1, 9), np.int32)
        assert state.batch is not None and state.batch.write([state], masks, [0]) == {}
        assert tokens_of(masks[0]) == allowed(state) == [token]
        state.accept(token)
    assert state.forced_run(8) == () and allowed(state) == list(b"cd")
    other = compiled(Grammar("regex", "[ab]xyz[cd]")).start()
    other.accept(ord("b"))
    assert other.forced_run(8) == tuple(b"xyz")
    with pytest.raises(ConstraintError):
        other.accept(ord("z"))
    assert other.forced_run(8) != tuple(b"xyz")


def test_forced_tokens() -> None:
    state = compiled(Grammar("regex", "ab(cde|xyz)(hi)?")).start()
    assert bytes(state.forced_run(10)) == b"ab"
    assert bytes(state.forced_run(1)) == b"a"
    for byte in b"abx":
        state.accept(byte)
    assert bytes(state.forced_run(10)) == b"yz"  # the end, or "hi"
    for byte in b"yz":
        state.accept(byte)
    assert state.is_complete and state.forced_run(10) == ()
    state.accept(ord("h"))
    assert bytes(state.forced_run(10)) == b"i"
    state.accept(ord("i"))
    assert state.is_final and state.forced_run(10) == ()


def test_drafts_are_followed_as_far_as_they_may_stand_there() -> None:
    state = compiled(Grammar("regex", "ab(c|d(e)?)(fg)?")).start()
    state.accept(ord("a"))
    assert told(state, b"bdfx") == [(b"cd", False), (b"ef", True), (b"g", False)]
    assert told(state, b"bdef") == [(b"cd", False), (b"ef", True), (b"f", True), (b"g", False)]
    assert told(state, b"xb") == told(state, b"") == []
    for no_token in (MODEL_CONFIG.vocab_size, 100_000):
        assert told(state, [ord("b"), no_token, ord("d")]) == [(b"cd", False)]
    for byte in b"bcf":
        state.accept(byte)
    assert told(state, b"gg") == []  # nothing may follow
    state.accept(ord("g"))
    assert state.is_final


def told(state: TokenConstraint, drafts: Sequence[int]) -> list[tuple[bytes, bool]]:
    return [(bytes(tokens), can_end) for tokens, can_end in looked_ahead(state, drafts)]


def test_what_was_looked_at_ahead_is_forgotten() -> None:
    state = compiled(Grammar("regex", "(ab|cd){2,9}")).start()
    for byte in b"abcd":
        for drafts in (b"abab", b"cdcdcdcd", b"zzz", bytes((byte,)), b"abababababababababab"):
            expected = allowed(state), state.is_complete
            looked_ahead(state, drafts)
            assert (allowed(state), state.is_complete) == expected
        state.accept(byte)
    assert state.is_complete


@pytest.mark.anyio
@pytest.mark.parametrize(("limit", "most"), [("_KEPT", 20), ("_KEPT_CHARACTERS", 80)])
async def test_grammars_are_kept(monkeypatch: pytest.MonkeyPatch, limit: str, most: int) -> None:
    monkeypatch.setattr(f"jaxserve.structured.compiler.{limit}", most)
    compiler = GrammarCompiler(byte_tokenizer())
    try:
        first = await compiler.compile(Grammar("regex", "a+"))
        assert await compiler.compile(Grammar("regex", "a+")) is first
        with pytest.raises(GrammarError):
            await compiler.compile(Grammar("regex", "(a"))
        for number in range(2):
            await compiler.compile(Grammar("regex", f"a{{{number + 1}}}"))
        assert await compiler.compile(Grammar("regex", "a+")) is first
        for number in range(20):
            await compiler.compile(Grammar("regex", f"a{{{number + 1}}}"))
        assert await compiler.compile(Grammar("regex", "a+")) is not first
    finally:
        compiler.close()
