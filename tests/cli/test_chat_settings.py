import pytest

from jaxserve.cli.chat_settings import ChatSettings, with_overrides


def test_overrides_change_what_they_name() -> None:
    settings = with_overrides(ChatSettings(min_p=0.1), "temperature=0.5;seed=1;stop=a,b; max_tokens = 7")
    assert settings == ChatSettings(temperature=0.5, seed=1, stop=("a", "b"), max_tokens=7, min_p=0.1)


def test_settings_can_be_unset() -> None:
    settings = ChatSettings(seed=1, max_tokens=5, stop=("x",))
    assert with_overrides(settings, "seed=none;max_tokens=;stop=") == ChatSettings()


@pytest.mark.parametrize("stops", [("a;b", "c,d"), ("\n\n", "\t", "\\"), (" spaces stay ",), ("a=b", "é")])
def test_text_can_be_given_back_to_set(stops: tuple[str, ...]) -> None:
    settings = ChatSettings(temperature=0.25, top_p=0.5, top_k=3, min_p=0.05, seed=-4, max_tokens=9, stop=stops)
    assert with_overrides(ChatSettings(), settings.text()) == settings
    assert with_overrides(settings, ChatSettings().text()) == ChatSettings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temperature=hot", "temperature='hot' is no number"),
        ("temperature=nan", "temperature=nan must lie in 0..2"),
        ("temperature=2.5", "temperature=2.5 must lie in 0..2"),
        ("top_p=-1", "top_p=-1.0 must lie in 0..1"),
        ("top_k=1.5", "top_k='1.5' is no whole number"),
        ("max_tokens=0", "max_tokens=0 must be at least 1"),
        ("seed=99999999999999999999", "seed=99999999999999999999 must fit a signed 64-bit integer"),
        ("stop=a,,b", "empty string"),
        ("stop=a,b,c,d,e", "at most 4"),
        ("colour=red", "unknown setting 'colour': there are temperature, "),
        ("temperature", "'temperature' is no setting"),
    ],
)
def test_bad_overrides_say_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is checked in full
        with_overrides(ChatSettings(), text)
    assert message in str(caught.value)


def test_one_bad_override_changes_nothing() -> None:
    settings = ChatSettings()
    with pytest.raises(ValueError, match="top_p"):
        with_overrides(settings, "temperature=0;top_p=7")
    assert settings == ChatSettings()
