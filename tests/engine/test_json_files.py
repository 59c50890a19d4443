"""JSON that somebody else wrote is read within limits, and refused in one line."""

import os
from pathlib import Path

import pytest
from sdp.engine.config import load_config
from sdp.engine.errors import ConfigError
from sdp.engine.json_files import MOST_DEPTH, JsonError, parse_json, read_json_file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested more than"),
        ("[" * 300 + "]" * 300, "nested more than"),
        ('{"a": ' + "9" * 5000 + "}", "5000 digits"),
        ('{"a": ' + "9" * 309 + "}", "309 digits"),  # it would overflow a float
        ('{"a": "\\ud800"}', "surrogate"),
        ('{"\\udfff": 1}', "surrogate"),
        ('{"a": }', "1:7: not valid JSON"),
        ('{"a": 1, "a": 2}', "has this key twice"),
    ],
)
def test_bad_texts_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(JsonError, match=message):
        parse_json(text, unique_keys=True)
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(path)
    assert str(error.value).startswith(str(path))


def test_the_deepest_value_is_read() -> None:
    parse_json("[" * MOST_DEPTH + "]" * MOST_DEPTH)


@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 5000, '"\\ud800"'])
def test_bad_overrides_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"--set model\.x: ") as error:
        load_config({"train_batch_size": 4}, [f"model.x={value}"])
    assert len(str(error.value)) < 200


def test_an_override_of_an_endless_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="the key has 2001 components, and no key has so many"):
        load_config({"sdp": {"groups": 1}}, ["x" + ".y" * 2000 + "=1"])


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        read_json_file(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="not a regular file"):
        load_config(tmp_path / "fifo")


def test_a_large_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "large.json").write_text(" " * (1 << 20) + "1")
    with pytest.raises(JsonError, match="larger than 1,024 KiB"):
        read_json_file(tmp_path / "large.json", most_bytes=1 << 20)
