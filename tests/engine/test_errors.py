"""Messages repeat input in printable characters, and only its start."""

from sdp.engine.errors import MOST_MESSAGE, ConfigError, escape, format_error, quote, shorten

LONG = "x" * 500_000
HOSTILE = "a\x1b]0;title\x07\x9b2J\x00\r\u202eb"


def test_control_characters_are_escaped_and_lines_stay() -> None:
    assert escape(f"first\n\tsecond {HOSTILE}") == "first\n\tsecond a\\x1b]0;title\\x07\\x9b2J\\x00\\r\\u202eb"
    assert escape("plain text, ü, 漢字, 😀") == "plain text, ü, 漢字, 😀"
    escape("half \ud800").encode()


def test_values_are_cut_to_200_characters() -> None:
    assert shorten("short") == "short"
    assert shorten("x" * 200) == "x" * 200
    assert shorten("x" * 1300) == "x" * 200 + "… (1,100 more characters)"
    assert shorten("a\nb\tc\x1b") == "a\\nb\\tc\\x1b"
    assert quote("it's") == repr("it's")
    assert quote("x" * 201) == repr("x" * 200) + "… (1 more characters)"
    assert quote({"a": 1}) == "{'a': 1}"


def test_a_message_keeps_its_start_and_its_end() -> None:
    text = format_error(ConfigError(f"run.json: {LONG}; remove it"))
    assert text.startswith("run.json: xxx")
    assert text.endswith("xxx; remove it")
    assert len(text) < MOST_MESSAGE + 100
    assert format_error(ConfigError("two\n  lines\x1b[2J")) == "two lines\\x1b[2J"
