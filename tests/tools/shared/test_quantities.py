"""Sizes and rates as users write them and as reports print them."""

from __future__ import annotations

import argparse

import pytest
from sdp.engine.accounting.quantities import format_bytes, format_flops, format_seconds, unit_for
from sdp.tools.shared.arguments import size_in_bytes
from sdp.tools.shared.quantities import parse_bit_rate, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("500MB", 500_000_000), ("5gib", 5 * 2**30), ("1.5 KB", 1500), ("4096", 4096), ("2T", 2 * 10**12)],
)
def test_a_size_has_a_unit_or_is_in_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["lots", "0", "-1GB", "5XB", ""])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size; use for example 500MB or 5GB"):
        size_in_bytes(text)


def test_sizes_are_printed_in_a_unit_that_a_table_has() -> None:
    assert format_bytes(1234567890, "MB", 1) == "1,234.6 MB"
    assert format_bytes(3 * 2**29, "GiB") == "1.50 GiB"


def test_bit_rates() -> None:
    assert [parse_bit_rate(text) for text in ("300mbit", "1Gbit/s", "8bit")] == [300e6, 1e9, 8.0]
    assert parse_bit_rate("50GB/s") is None


def test_the_unit_is_the_largest_that_fits() -> None:
    assert [format_bytes(size) for size in (0, 999, 1500, 2e15)] == ["0 B", "999 B", "1.50 kB", "2000.00 TB"]
    assert unit_for(1023, binary=True) == (1, "B")
    assert unit_for(2**30, binary=True) == (2**30, "GiB")


def test_times_and_operations_have_no_exponent() -> None:
    times = (1.163e-05, 0.0005, 3.54, 12345.6, 0.0)
    assert [format_seconds(time) for time in times] == ["11.63 µs", "500 µs", "3.54 s", "12,346 s", "0 µs"]
    counts = (1.004e16, 35.97e12, 12345, 7, 2.5e19)
    shown = ["10.04 PFLOP", "35.97 TFLOP", "12.35 kFLOP", "7 FLOP", "25,000 PFLOP"]
    assert [format_flops(count) for count in counts] == shown
