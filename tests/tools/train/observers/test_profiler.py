"""``sdp train --profile``."""

import gzip
import json
from pathlib import Path

import pytest
from sdp.tests.support.small_runs import tiny_config
from sdp.tools.cli import main


@pytest.fixture
def arguments(text_corpus: Path, tmp_path: Path) -> list[str]:
    config = tiny_config(text_corpus, groups=1, steps=4)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return ["train", str(path), "--dump-dir", str(tmp_path / "run")]


def test_a_trace_of_the_steps_that_were_asked_for(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--profile", "3-4"]) == 0
    trace = tmp_path / "run" / "profile" / "rank-0-trace.json.gz"
    said = [line for line in capsys.readouterr().err.splitlines() if "profile" in line]
    assert said == [f"profile of steps 3 to 4: {trace} (ui.perfetto.dev); no memory snapshot on a CPU"]
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event["name"] == "backward" and event.get("cat") == "user_annotation" for event in events) == 2
    assert {"data", "forward", "optimizer", "aten::mm"} <= {event["name"] for event in events}
    assert [path.name for path in trace.parent.iterdir()] == [trace.name]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("5-3", "give steps as FIRST-LAST, for example 3-5"),
        ("0", "FIRST-LAST"),
        ("9" * 5000, "9… (4,800 more characters): give steps as FIRST-LAST"),
        ("3-5", "step 5 is after the end of the run, which has only 4 more steps"),
    ],
)
def test_steps_that_cannot_be_are_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], steps: str, message: str
) -> None:
    assert main([*arguments, "--profile", steps]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("sdp: error: --profile") and message in error
