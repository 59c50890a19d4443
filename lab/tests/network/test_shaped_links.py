"""``python -m lab.network``: links have the requested rates, and no host is left afterwards."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sdp
from sdp.tests.support.processes import until

ROOT = Path(sdp.__path__[0]).resolve()
pytestmark = pytest.mark.cluster
MODEL = {
    "name": "llama",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "sdp": {"groups": 2, "capacity": 0.5},
    "model": MODEL,
    "data": {"sequence_length": 16},
}


def namespaces() -> set[str]:
    """Return the network namespaces of benchmarks, which are named after a process."""
    return {path.name for path in Path("/run/netns").glob("sdp[0-9]*-*") if re.fullmatch(r"sdp\d+-\w+", path.name)}


@pytest.fixture(autouse=True, scope="module")
def a_machine_that_makes_namespaces() -> None:
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        pytest.skip(f"NOT TESTED, no {', '.join(missing)}: apt-get install iproute2")
    probe = f"sdp-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    if made.returncode:
        pytest.skip(f"NOT TESTED, this machine makes no network namespaces: {made.stderr.strip()}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("count", [60, 1])  # while they are made; once they are there
def test_a_signal_leaves_no_host_behind(number: signal.Signals, count: int) -> None:
    script = f"import signal, time; from lab.network.hosts import hosts; made = hosts({count})\n"
    script += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script += "with made: print('made', flush=True); time.sleep(0.5)"
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT.parent)]))
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    def own() -> set[str]:
        return {name for name in namespaces() if name.startswith(f"sdp{process.pid}-")}

    try:
        assert process.stdout is not None
        until(lambda: len(own()) > 1)
        assert count > 1 or process.stdout.readline() == "made\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (-number, ""), err
        assert not own()
    finally:
        process.kill()
        process.wait()
        for name in own():
            subprocess.run(["ip", "netns", "del", name], check=False)


def test_links_are_as_slow_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(CONFIG))
    before = namespaces()
    bench = ["-m", "sdp", "bench", str(path), "--methods", "ddp,sdp", "--rounds", "1"]
    words = ["50mbit,200mbit", "2", sys.executable, *bench, "--out", str(tmp_path / "{rate}")]
    done = subprocess.run(
        [sys.executable, "-m", "lab.network", *words], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert namespaces() == before
    for rate, speed in (("50mbit", 6.25e6), ("200mbit", 25e6)):
        methods = json.loads((tmp_path / rate / "report.json").read_text())["methods"]
        for row in methods.values():
            # No method is faster than the link, except for the burst that the token bucket lets
            # through.
            assert row["seconds"]["median"] > 0.8 * (row["planned_sent_bytes"] - 200_000) / speed
        assert methods["sdp"]["planned_sent_bytes"] < 0.6 * methods["ddp"]["planned_sent_bytes"]
