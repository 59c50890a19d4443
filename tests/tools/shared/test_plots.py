"""Plots that cannot be written are one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from sdp.engine.errors import ConfigError
from sdp.tools.shared.plots import plot_bars


def draw(path: Path) -> None:
    plot_bars({"bytes": {"sdp": 1.0, "dense": 2.0}}, "Traffic", path)


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
