"""A held-out loss that is NaN is written as null, and ends nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sdp.tests.support.small_runs import write_config
from sdp.tools.cli import main


def test_a_held_out_loss_that_is_nan_ends_nothing(config: dict, tmp_path: Path, capsys) -> None:
    """Weights that are finite, but so large that the forward pass overflows."""
    config |= {"optimizer": {"type": "SGD", "params": {"lr": 1e20}}, "gradient_clipping": 0.0}
    config.pop("scheduler", None)
    config["sdp"] = {"groups": 1}
    config["training"] |= {"steps": 1, "evaluate_every": 1, "save_every": 0}
    run = tmp_path / "run"
    assert main(["train", str(write_config(config, tmp_path)), "--dump-dir", str(run)]) == 0
    lines = [
        json.loads(line, parse_constant=pytest.fail) for line in (run / "evaluations.jsonl").read_text().splitlines()
    ]
    assert lines[0]["loss"] > 0 and lines[-1]["loss"] is None
    assert main(["report", str(run)]) == 0
    assert "full model, before" in capsys.readouterr().out
