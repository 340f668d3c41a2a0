import asyncio

import pytest

from jaxserve.cli.chat_session import AnswerStats, ChatError, ChatSession
from jaxserve.cli.chat_settings import ChatSettings
from jaxserve.engine.draft_stats import SpeculativeStats
from tests.cli.fake_backend import FakeBackend


def ask(session: ChatSession, *questions: str) -> list[str]:
    """The answers, as they were shown."""

    async def run() -> list[str]:
        answers = []
        for question in questions:
            pieces: list[str] = []
            await session.answer(question, pieces.append, asyncio.Event())
            answers.append("".join(pieces))
        return answers

    return asyncio.run(run())


def test_earlier_turns_are_part_of_the_prompt() -> None:
    backend = FakeBackend()
    assert ask(ChatSession(backend, ChatSettings(), "Be kind."), "one", "two") == ["You said: one ", "You said: two "]
    assert backend.prompts[1] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "You said: one "},
        {"role": "user", "content": "two"},
    ]


def test_a_full_context_forgets_the_oldest_pair_and_keeps_the_system_prompt() -> None:
    backend = FakeBackend(max_model_len=16)  # a quarter of it stays free for the answer
    session = ChatSession(backend, ChatSettings(), "sys")
    ask(session, "one", "two", "three", "four")
    # system 1 + three pairs of 4 + question 1 = 14 > 12: the pair of "one" went.
    assert [message["content"] for message in backend.prompts[3]] == [
        "sys", "two", "You said: two ", "three", "You said: three ", "four",
    ]  # fmt: skip
    assert session.last_stats is not None
    assert session.last_stats.forgotten_exchanges == 1
    assert [exchange.question for exchange in session.exchanges] == ["two", "three", "four"]


def test_room_is_kept_for_max_tokens() -> None:
    backend = FakeBackend(max_model_len=100)
    session = ChatSession(backend, ChatSettings(max_tokens=97))
    ask(session, "one", "two")
    assert [message["content"] for message in backend.prompts[1]] == ["two"]


def test_a_message_longer_than_the_context_is_refused_and_the_history_stays() -> None:
    backend = FakeBackend(max_model_len=16)
    session = ChatSession(backend, ChatSettings())
    ask(session, "one")
    with pytest.raises(ChatError, match=r"too long.*context of 16 tokens"):
        ask(session, "word " * 16)
    assert [exchange.question for exchange in session.exchanges] == ["one"]
    assert len(backend.prompts) == 1


def test_a_message_that_leaves_little_room_is_still_answered() -> None:
    assert ask(ChatSession(FakeBackend(max_model_len=16), ChatSettings()), "a " * 14 + "b")


def test_a_refused_question_is_not_remembered() -> None:
    backend = FakeBackend()
    session = ChatSession(backend, ChatSettings())
    with pytest.raises(ChatError, match="template refuses"):
        ask(session, "refuse")
    ask(session, "empty", "two")
    assert [message["content"] for message in backend.prompts[-1]] == ["two"]
    assert backend.closed_streams == 3


@pytest.mark.parametrize("question", ["forever", "hang"])
def test_an_interrupted_answer_ends_and_is_remembered_as_far_as_it_came(question: str) -> None:
    backend = FakeBackend()
    session = ChatSession(backend, ChatSettings())

    async def run() -> tuple[str, AnswerStats]:
        interrupted = asyncio.Event()
        shown = ""

        def show(text: str) -> None:
            nonlocal shown
            shown += text
            if text.strip() == question:
                asyncio.get_running_loop().call_later(0.02, interrupted.set)

        return shown, await session.answer(question, show, interrupted)

    _, stats = asyncio.run(run())
    assert stats.finish_reason == "interrupted"
    assert stats.generated_tokens >= 3
    assert backend.closed_streams == 1
    assert session.exchanges[0].answer.startswith(f"You said: {question}")


def test_stats_tell_tokens_and_times() -> None:
    session = ChatSession(FakeBackend(), ChatSettings())
    ask(session, "one two")
    stats = session.last_stats
    assert stats is not None
    assert (stats.prompt_tokens, stats.generated_tokens, stats.finish_reason) == (2, 4, "stop")
    text = AnswerStats(10, 5, 0.25, 0.4, "stop", 0).text()
    assert "time to first token: 250 ms" in text
    assert "10.0 tokens/s (100.0 ms per token)" in text
    assert "drafts" not in text
    assert text.splitlines()[:2] == ["prompt: 10 tokens", "answer: 5 tokens (stop)"]
    assert "answer: 1 token (length)" in AnswerStats(10, 1, 0.25, 0.0, "length", 0).text()


def test_stats_tell_the_method_and_how_many_drafts_of_the_answer_were_kept_at_each_place() -> None:
    class Drafting(FakeBackend):
        def __init__(self) -> None:
            super().__init__()
            before = SpeculativeStats("eagle3", 12, (12, 10, 8), (10, 7, 3))
            after = SpeculativeStats("eagle3", 20, (20, 16, 14), (17, 11, 7))
            self.counts = iter([before, after, after, after])

        def drafted(self) -> SpeculativeStats:
            return next(self.counts)

    session = ChatSession(Drafting(), ChatSettings())
    ask(session, "one two")
    assert session.last_stats is not None
    assert session.last_stats.text().splitlines()[-2:] == [
        "drafts (eagle3): 15 of 20 tokens kept (75%)",
        "kept by position: 1: 88% of 8, 2: 67% of 6, 3: 67% of 6",
    ]
    ask(session, "three")
    assert session.last_stats.text().splitlines()[-1] == "drafts (eagle3): none"


def test_reset_forgets_everything_but_the_settings() -> None:
    backend = FakeBackend()
    session = ChatSession(backend, ChatSettings(seed=3), "sys")
    ask(session, "one")
    session.reset()
    ask(session, "two")
    assert [message["content"] for message in backend.prompts[1]] == ["sys", "two"]
    assert backend.settings[1].seed == 3
