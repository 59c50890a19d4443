"""``sdp plan --html``: one page, whole in itself, with all that the terminal says."""

from __future__ import annotations

import html
import json
import re
import resource
from pathlib import Path

import pytest
from sdp.engine.placement.placement import Placement
from sdp.tools.cli import main
from sdp.tools.plan.page import draw_map

pytestmark = pytest.mark.usefixtures("traced_once")

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "activation_checkpointing": {"mode": "selective"},
    "sdp": {"groups": 2, "capacity": 0.5},
    "model": {
        "name": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "data": {"sequence_length": 32},
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_a_page_that_cannot_be_written(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "file" / "plan.html", "File exists")):
        assert main(["plan", str(config), "--html", str(path)]) == 2
        assert capsys.readouterr().err == f"sdp: error: --html {path}: the page cannot be written ({why})\n"


def test_a_page_never_replaces_what_it_is_of(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=2\n")
    (tmp_path / "link").symlink_to(config)
    before = config.read_text(), hosts.read_text()
    for path, name in (
        (config, "the configuration"),
        (tmp_path / "link", "the configuration"),
        (hosts, "the hostfile"),
    ):
        assert main(["plan", str(config), "--hostfile", str(hosts), "--html", str(path)]) == 2
        assert (
            capsys.readouterr().err == f"sdp: error: --html {path}: the page would replace {name}; name another file\n"
        )
    assert (config.read_text(), hosts.read_text()) == before


def test_what_was_there_stays_where_a_page_cannot_be_written_whole(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    page.write_text("an earlier plan")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # as a disk that fills up: the page is longer
    try:
        assert main(["plan", str(config), "--html", str(page)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().err == f"sdp: error: --html {page}: the page cannot be written (File too large)\n"
    assert page.read_text() == "an earlier plan"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "small.json"]


def test_the_page_needs_nothing_else(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "plan", str(config), "--world", "4", "--html", str(tmp_path / "new" / "plan.html"), "--device-memory",
                "1GB",
            ]
        )
        == 0
    )  # fmt: skip
    text = (tmp_path / "new" / "plan.html").read_text()
    assert not any(word in text for word in ("<script", "http", "src=", "@import"))
    assert text.count('class="bar"') == 1 + 1  # the device has a bar, too
    assert all(f"model.layers.{index}: k = 1" in text for index in range(4))
    printed = capsys.readouterr().out.partition("\n\nIt fits")[0]
    assert "warning: " in printed or "placement: " in printed
    assert html.escape(printed) in text


def test_the_page_has_the_search(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", str(config), "--device-memory", "1GB", "--fit", "--html", str(page)]) == 0
    text, printed = page.read_text(), capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith(("tried: ", "chosen: ", "To train it: "))]
    assert len(lines) > 2
    assert all(html.escape(line) in text for line in lines)


def test_the_map_of_units() -> None:
    placement = Placement(
        4, tuple(f"layers.{index}" for index in range(8)), tuple((unit % 4,) for unit in range(8)), (1,) * 8
    )
    drawing = draw_map(placement)
    assert re.findall(r"M(\d+) (\d+)h", drawing) == [(str(unit), str(unit % 4)) for unit in range(8)]
    assert drawing.count("<rect") == 8
    assert "<title>layers.5: k = 1, held by 1</title>" in drawing
    assert "the first 8 of 8 units, from layers.0. Down: the first 4 of 4 groups." in drawing


@pytest.mark.parametrize(("groups", "units"), [(8, 256), (128, 1000)])
def test_the_map_stays_compact(groups: int, units: int) -> None:
    names = tuple(f"layers.{unit // 8}.mlp.neurons.{unit % 8}" for unit in range(units))
    drawing = draw_map(Placement(groups, names, tuple(((unit * 3) % groups,) for unit in range(units)), (1,) * units))
    assert f'viewBox="0 0 {min(units, 512)} {groups}"' in drawing
    assert len(drawing) < 300_000
