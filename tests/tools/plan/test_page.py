"""``sdp plan --html``: one page, whole in itself, with all that the terminal says."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
from sdp.engine.placement.placement import Placement
from sdp.tools.cli import main
from sdp.tools.plan.unit_map import draw_map

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
BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_a_page_that_cannot_be_written(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "file" / "plan.html", "File exists")):
        assert main(["plan", str(config), "--alone", "--html", str(path)]) == 2
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
        assert main(["plan", str(config), "--alone", "--hostfile", str(hosts), "--html", str(path)]) == 2
        assert (
            capsys.readouterr().err
            == f"sdp: error: --html {path}: is {name}, which the page would replace; name another file\n"
        )
    assert (config.read_text(), hosts.read_text()) == before


def test_what_was_there_stays_where_a_page_cannot_be_written_whole(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html = tmp_path / "plan.html"
    html.write_text("an earlier plan")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # as a disk that fills up: the page is longer
    try:
        assert main(["plan", str(config), "--alone", "--html", str(html)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().err == f"sdp: error: --html {html}: the page cannot be written (File too large)\n"
    assert html.read_text() == "an earlier plan"
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
    assert text.count('class="bar"') == 3  # HSDP is FSDP on one node
    assert all(f"model.layers.{index}: k = 1" in text for index in range(4))
    assert all(f"<small>{name}</small>" in text for name in ("precision", "activation checkpointing"))
    assert "selective" in text and "float32" in text
    assert "iB" not in text
    printed = capsys.readouterr().out
    assert "expected time of a step" in printed
    for line in printed.splitlines():
        if line.startswith("- "):
            assert line[2:].replace("'", "&#39;") in text


def test_the_page_warns_and_gives_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, html = tmp_path / "images.json", tmp_path / "plan.html"
    model = {"name": "resnet18", "stem": "cifar", "width": 8}
    path.write_text(
        json.dumps(
            {"train_batch_size": 8, "sdp": {"groups": 2, "capacity": 0.5}, "model": model, "data": {"name": "digits"}}
        )
    )
    assert main(["plan", str(path), "--alone", "--device-memory", "1GB", "--fit", "--html", str(html)]) == 0
    text, printed = html.read_text(), capsys.readouterr().out
    assert '<p class="warning">Warning: a group holds' in text
    assert "Why this layout" in text
    for line in printed.splitlines():
        if line.startswith("chosen: "):
            assert f"<li>{line}</li>" in text
        if line.startswith("tried: "):
            assert f"<li>{line.removeprefix('tried: ')}</li>" in text


def cells(drawing: str) -> int:
    """Held cells: by width in columns, of one pixel less where there are gaps."""
    return len(re.findall("M[0-9.]+ [0-9]+h", drawing))


def test_the_map_of_units() -> None:
    placement = Placement(
        4, tuple(f"layers.{index}" for index in range(8)), tuple((unit % 4,) for unit in range(8)), (1,) * 8
    )
    drawing = draw_map(placement)
    assert drawing.count('class="unit"') == drawing.count('class="count"') - 1 == 8  # one of them in the legend
    assert cells(drawing) == 8
    assert "<title>layers.5: k = 1, held by 1</title>" in drawing
    assert all(
        word in drawing
        for word in ("held by the group", "not held", "k: how many of 4 groups hold the unit", "group 3")
    )


@pytest.mark.parametrize(("groups", "units"), [(8, 256), (128, 1000)])
def test_the_map_stays_compact(groups: int, units: int) -> None:
    names = tuple(f"layers.{unit // 8}.mlp.neurons.{unit % 8}" for unit in range(units))
    drawing = draw_map(Placement(groups, names, tuple(((unit * 3) % groups,) for unit in range(units)), (1,) * units))
    wide, high = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', drawing)[0])
    assert wide <= 1000
    assert high <= 750
    assert len(drawing) < 300_000
    assert ("Drawn are the first 512 of 1000 units" in drawing) == (units == 1000)


def test_a_browser_draws_it(config: Path, tmp_path: Path) -> None:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"NOT TESTED, no browser: none of {', '.join(BROWSERS)} is on PATH")
    image = pytest.importorskip("PIL.Image")
    html = tmp_path / "plan.html"
    assert main(["plan", str(config), "--device-memory", "10MB", "--html", str(html)]) == 0
    pictures = {}
    for scheme in (0, 1):  # dark, light
        png = tmp_path / f"{scheme}.png"
        command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1000,1600",
            f"--screenshot={png}",
                   f"--blink-settings=preferredColorScheme={scheme}", html.as_uri()]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        with image.open(png) as picture:
            pictures[scheme] = {colour: count for count, colour in picture.convert("RGB").getcolors(1 << 24)}
    style = html.read_text()
    for scheme, block in enumerate(re.findall(r":root\{(.*?)\}", style, re.DOTALL)[::-1]):
        colours = {
            name: tuple(bytes.fromhex(full(value))) for name, value in re.findall(r"--([a-z0-9-]+):#([0-9a-f]+)", block)
        }
        for part in (
            "page",
            "card",
            "accent",
            "track",
            "count",
            "good",
            "kind0",
            "kind2",
            "kind6",
        ):  # bars, map, cards, verdict
            assert pictures[scheme].get(colours[part], 0) > 20, (scheme, part)
        assert max(pictures[scheme], key=lambda colour: pictures[scheme][colour]) == colours["page"]
        assert len(pictures[scheme]) > 100  # letters have smooth edges


def full(colour: str) -> str:
    """``fff`` as ``ffffff``."""
    return "".join(2 * digit for digit in colour) if len(colour) == 3 else colour
