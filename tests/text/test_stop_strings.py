"""Stop strings: cut at the earliest, no piece of one is shown, and nothing is held back that need not be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text.stop_strings import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """What is shown for each piece until a stop is found or all is finished, and the stop."""
    finder, shown = StopStrings(stops), []
    for piece in pieces:
        match = finder.push(piece)
        shown.append(match.text)
        if match.stop is not None:
            return shown, match.stop
    shown.append(finder.finish())
    return shown, finder.matched


def test_stop_across_three_pieces() -> None:
    assert run(["world"], ["hello wo", "r", "ld and more"]) == (["hello ", "", ""], "world")


def test_beginning_that_comes_to_nothing_is_shown_as_soon_as_that_is_clear() -> None:
    assert run(["world"], ["hello wo", "w", "x"]) == (["hello ", "wo", "wx", ""], None)


def test_held_back_text_is_shown_at_the_end() -> None:
    assert run(["world"], ["hello wo"]) == (["hello ", "wo"], None)


def test_text_without_a_beginning_of_a_stop_is_never_held_back() -> None:
    assert run(["\n\n"], ["one", " two"]) == (["one", " two", ""], None)


@pytest.mark.parametrize("pieces", [["xabcdy"], list("xabcdy")], ids=["at once", "by character"])
def test_one_stop_inside_another(pieces: list[str]) -> None:
    shown, stop = run(["bc", "abcd"], pieces)
    assert ("".join(shown), stop) == ("x", "abcd")


def test_inner_stop_counts_where_the_outer_one_comes_to_nothing() -> None:
    assert run(["bc", "abcd"], list("xabcy")) == (["x", "", "", "", "a"], "bc")
    shown, stop = run(["bc", "abcd"], list("xabc"))
    assert ("".join(shown), stop) == ("xa", "bc")


def test_shorter_of_two_that_begin_alike() -> None:
    assert run(["stop here", "stop"], ["please stop here"]) == (["please "], "stop")


@pytest.mark.parametrize("stops", [[""], ["", "zz"]])
def test_empty_stop_is_refused(stops: list[str]) -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(stops)


def test_text_after_a_match_is_refused() -> None:
    finder = StopStrings(["a"])
    finder.push("a")
    with pytest.raises(ValueError, match="after the stop string"):
        finder.push("b")


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=4), st.lists(st.text("abc", max_size=4), max_size=8))
def test_same_as_cutting_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    shown, stop = run(stops, pieces)
    text = "".join(pieces)
    places = [text.find(candidate) for candidate in stops if candidate in text]
    if not places:
        assert ("".join(shown), stop) == (text, None)
        return
    assert "".join(shown) == text[: min(places)]
    assert stop is not None
    assert text.startswith(stop, min(places))
