"""Sizes and rates as users write them and as reports print them."""

from __future__ import annotations

import argparse

import pytest
from sdp.tools.shared.arguments import port, size_in_bytes, split_set_values
from sdp.tools.shared.quantities import format_bytes, parse_bit_rate, parse_size, unit_for


@pytest.mark.parametrize(
    ("text", "size"), [("500MB", 500_000_000), ("5gib", 5 * 2**30), ("1.5 KB", 1500), ("4096", 4096)]
)
def test_a_size_has_a_unit_or_is_in_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["lots", "0", "-1GB", "5XB", ""])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size; use for example 500MB or 5GB"):
        size_in_bytes(text)


def test_bit_rates() -> None:
    assert [parse_bit_rate(text) for text in ("300mbit", "1Gbit/s", "8bit")] == [300e6, 1e9, 8.0]
    assert parse_bit_rate("50GB/s") is None


def test_the_unit_is_the_largest_that_fits() -> None:
    assert [format_bytes(size) for size in (0, 999, 1500, 2e15)] == ["0 B", "999 B", "1.50 kB", "2000.00 TB"]
    assert unit_for(1023, binary=True) == (1, "B")
    assert unit_for(2**30, binary=True) == (2**30, "GiB")


@pytest.mark.parametrize("text", ["0", "70000", "-1", "http"])
def test_a_port_is_a_number_from_1_to_65535(text: str) -> None:
    assert port("65535") == 65535
    with pytest.raises(argparse.ArgumentTypeError, match="is not a port; use a number from 1 to 65535"):
        port(text)


def test_several_values_may_follow_one_set() -> None:
    assert split_set_values(["train", "--set", "a=1", "b=2", "c.json", "d=3", "--set", "e=4"]) == [
        *("train", "--set", "a=1", "--set", "b=2", "c.json", "d=3", "--set", "e=4")
    ]
