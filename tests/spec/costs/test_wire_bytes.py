"""Counted bytes against the kernel's: four ranks in a network namespace of their own, where nothing
else is on the loopback.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from sdp.tests.support import wire

# Gloo has no reduce-scatter of its own (it all-reduces and keeps a part), where the count is by
# ring algorithms, as NCCL has them: measured here, so that the difference is known.
GLOO_SENDS = {"reduce_scatter": 2.0}
HEADERS = 0.05  # TCP, IP and gloo's own headers, acknowledgements, and small control messages


def test_counted_bytes_are_on_the_wire() -> None:
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip(
            "this process may not make a network namespace (unshare -n): bytes on the wire are not checked here"
        )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        ["unshare", "-n", "--kill-child", "--fork", sys.executable, "-m", wire.__name__],
        capture_output=True, text=True, env=environment, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for kind, ratio in found["collectives"].items():
        print(f"{kind}: {ratio:.3f} of the formula's bytes")
    for name, (sent, counted, quiet) in found["runs"].items():
        total = sum(counted.values())
        expected = sum(nbytes * GLOO_SENDS.get(kind.split("/")[1], 1.0) for kind, nbytes in counted.items())
        print(
            f"{name}: {sent / 1e6:.2f} MB on the wire, {total / 1e6:.2f} MB counted; {sent / expected:.4f} of what "
            "gloo should send"
        )
        assert quiet < 0.01 * total
        assert expected <= sent <= (1 + HEADERS) * expected, name
    for kind, ratio in found["collectives"].items():
        assert ratio == pytest.approx(GLOO_SENDS.get(kind, 1.0), rel=HEADERS), kind
