"""Command-line options that several commands share."""

from __future__ import annotations

import argparse

import pytest
from sdp.engine.errors import ConfigError
from sdp.tools.shared.arguments import port, require_between_1_and, split_set_values


def test_a_number_has_a_bound() -> None:
    assert [require_between_1_and(9, "--steps", value) for value in (1, 9)] == [1, 9]
    with pytest.raises(ConfigError, match="--steps: 0 is not a positive whole number"):
        require_between_1_and(9, "--steps", 0)
    with pytest.raises(ConfigError, match="--steps: 10 is too large; the most is 9"):
        require_between_1_and(9, "--steps", 10)


@pytest.mark.parametrize("text", ["0", "70000", "-1", "http"])
def test_a_port_is_a_number_from_1_to_65535(text: str) -> None:
    assert port("65535") == 65535
    with pytest.raises(argparse.ArgumentTypeError, match="is not a port; use a number from 1 to 65535"):
        port(text)


def test_several_values_may_follow_one_set() -> None:
    assert split_set_values(["train", "--set", "a=1", "b=2", "c.json", "d=3", "--set", "e=4"]) == [
        *("train", "--set", "a=1", "--set", "b=2", "c.json", "d=3", "--set", "e=4")
    ]
