"""Plots that cannot be written are one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sdp.engine.errors import ConfigError
from sdp.tools.shared.plots import plot_bars, plot_lines

DRAW: dict[str, Callable[[Path], None]] = {
    "bars": lambda path: plot_bars({"bytes": {"sdp": 1.0, "dense": 2.0}}, "Traffic", path),
    "lines": lambda path: plot_lines({"sdp": [(1.0, 2.0), (2.0, 3.0)]}, "Speed", "hosts", "tokens/s", path),
}


@pytest.mark.parametrize("kind", DRAW)
def test_a_plot_is_a_png_in_a_folder_that_is_made(tmp_path: Path, kind: str) -> None:
    DRAW[kind](tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", DRAW)
@pytest.mark.parametrize("path", ["folder", "file/plot.png", "full"])
def test_a_plot_that_cannot_be_written_is_one_line(tmp_path: Path, kind: str, path: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r": the plot cannot be written \([A-Z]") as caught:
        DRAW[kind](tmp_path / path)
    assert "\n" not in str(caught.value)
