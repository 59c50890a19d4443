"""``sdp bench CONFIG --network``: hosts whose links have the rate that was asked for, and that are gone afterwards."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hosts import SDP

pytestmark = pytest.mark.cluster
MODEL = {"name": "llama", "vocab_size": 64, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8, "num_attention_heads": 4}
CONFIG = {"train_micro_batch_size_per_gpu": 1, "sdp": {"groups": 2, "capacity": 0.5}, "model": MODEL, "data": {"sequence_length": 16}}


def namespaces() -> set[str]:
    """Of benchmarks: named after a process."""
    return {path.name for path in Path("/run/netns").glob("sdp[0-9]*-*") if re.fullmatch(r"sdp\d+-\w+", path.name)}


def test_links_are_as_slow_as_asked(tmp_path: Path) -> None:
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        pytest.skip(f"NOT TESTED, no {', '.join(missing)}: apt-get install iproute2")
    path = tmp_path / "small.json"
    path.write_text(json.dumps(CONFIG))
    probe = f"sdp-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    if made.returncode:
        pytest.skip(f"NOT TESTED, this machine makes no network namespaces: {made.stderr.strip()}")
    before = namespaces()
    words = ["bench", path, "--methods", "ddp,sdp-block-forward-0.5", "--rounds", "1", "--network", "50mbit,200mbit", "--out", tmp_path]
    done = subprocess.run([*SDP, *map(str, words)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert namespaces() == before
    slow, fast = json.loads((tmp_path / "report.json").read_text())["races"]
    assert [slow["bytes_per_second"], fast["bytes_per_second"]] == [6.25e6, 25e6]
    for race in (slow, fast):
        for row in race["methods"].values():
            # Nobody is faster than the wire, but for what the bucket lets through at once.
            assert row["seconds"]["median"] > 0.8 * (row["sent_bytes"] - 200_000) / race["bytes_per_second"]
    # How fast is no matter of a test: the machine may be busy.
    assert slow["methods"]["sdp-block-forward-0.5"]["sent_bytes"] < 0.6 * slow["methods"]["ddp"]["sent_bytes"]
    assert (tmp_path / "network.png").exists()
