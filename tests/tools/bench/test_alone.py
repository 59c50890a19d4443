"""``sdp bench CONFIG --alone``: one rank's share, counted as the placement says. Speeds are never
asserted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sdp.tests.support.bench_configs import CONFIG

LAYER, SHARED = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32, 2 * 64 * 32 + 32


@pytest.mark.parametrize(
    ("settings", "ranks", "own"),
    [
        (["sdp.masking=forward"], 4, SHARED + 2 * LAYER),
        (["sdp.masking=backward", "zero_optimization.stage=1"], 8, (SHARED + 2 * LAYER) / 2),
    ],
)
def test_a_share_is_what_the_placement_says(tmp_path: Path, settings: list[str], ranks: int, own: float) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    words = [str(path), "--alone", "--rounds", "1", "--nproc", str(ranks), "--out", str(tmp_path / "out")]
    # In a process of its own, because it makes process groups.
    command = [sys.executable, "-m", "sdp", "bench", *words, "--set", *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "equal" in done.stdout and "NOT equal" not in done.stdout
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    share, dense = report["shares"]["SDP"], report["shares"]["dense"]
    whole, sharded = SHARED + 4 * LAYER, ranks // 4
    assert dense["flops_per_step"] > share["flops_per_step"] > 0.5 * dense["flops_per_step"]
    assert share["state_bytes"] == share["predicted_state_bytes"] < dense["state_bytes"]
    if sharded == 1:
        assert (share["parameters"], dense["parameters"]) == (own, whole)
        assert share["state_bytes"] == 16 * own  # float32 weights, gradients and two moments
    assert share["peak_bytes"] > share["state_bytes"]
    assert len(share["step_seconds"]) == 2 and share["tokens_per_step"] == 2 * 16
