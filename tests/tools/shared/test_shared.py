"""Sizes, options and plots that several commands share."""

import argparse
from pathlib import Path

import pytest
from sdp.engine.accounting.quantities import format_bytes, format_flops, format_seconds, unit_for
from sdp.engine.errors import ConfigError
from sdp.tools.runs.plot import new_figure, save_figure
from sdp.tools.shared.arguments import port, positive_int, size_in_bytes, split_set_values
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


# -- command-line options that several commands share ----------------------------------------------


def test_a_number_has_a_bound() -> None:
    assert [positive_int(text, 9) for text in ("1", "09")] == [1, 9]
    for text, problem in (("0", "'0' is not a positive"), ("-1", "is not a positive"), ("10", "10 is too large; the")):
        with pytest.raises(argparse.ArgumentTypeError, match=problem):
            positive_int(text, 9)


@pytest.mark.parametrize("text", ["0", "70000", "-1", "http"])
def test_a_port_is_a_number_from_1_to_65535(text: str) -> None:
    assert port("65535") == 65535
    with pytest.raises(argparse.ArgumentTypeError, match="is not a port; use a number from 1 to 65535"):
        port(text)


def test_several_values_may_follow_one_set() -> None:
    assert split_set_values(["train", "--set", "a=1", "b=2", "c.json", "d=3", "--set", "e=4"]) == [
        *("train", "--set", "a=1", "--set", "b=2", "c.json", "d=3", "--set", "e=4")
    ]


# -- plots that cannot be written are one line -----------------------------------------------------


def draw(path: Path) -> None:
    save_figure(new_figure(), path)


def test_a_plot_is_a_png_in_a_folder_that_is_made(tmp_path: Path) -> None:
    draw(tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", ["folder", "file/plot.png", "full"])
def test_a_plot_that_cannot_be_written_is_one_line(tmp_path: Path, path: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r": the plot cannot be written \([A-Z]") as caught:
        draw(tmp_path / path)
    assert "\n" not in str(caught.value)
