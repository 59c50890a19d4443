"""A run on one host listens on loopback addresses only."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from sdp.engine.distributed.rendezvous import serve_store
from sdp.engine.environment.detect import Environment
from sdp.engine.errors import LaunchError

psutil = pytest.importorskip("psutil")


def listening_addresses(process: subprocess.Popen[bytes]) -> set[str]:
    """The addresses on which the process and its descendants listen."""
    found = set()
    try:
        parent = psutil.Process(process.pid)
        for each in [parent, *parent.children(recursive=True)]:
            connections = each.net_connections(kind="inet")
            found |= {entry.laddr.ip for entry in connections if entry.status == psutil.CONN_LISTEN}
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        pass
    return found


@pytest.mark.parametrize("groups", [1, 2])
def test_no_socket_of_a_local_run_can_be_reached_from_another_host(
    text_corpus: Path, tmp_path: Path, groups: int
) -> None:
    config = {
        "train_batch_size": 4,
        "sdp": {"groups": groups},
        "model": {
            "name": "llama",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        "data": {"path": str(text_corpus), "sequence_length": 16},
        "training": {"steps": 8, "evaluate_batches": 1},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-P", "-m", "sdp", "train", "config.json", "--dump-dir", "run"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found: set[str] = set()
    while process.poll() is None:
        found |= listening_addresses(process)
        time.sleep(0.05)
    assert process.returncode == 0
    assert found <= {"127.0.0.1", "::1"}
    assert found or groups == 1


def test_an_occupied_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = Environment(0, 2, 0, 2, 0, "127.0.0.1", port, "torchrun")
        with pytest.raises(LaunchError, match=f"127.0.0.1:{port}: the port is in use on the host of rank 0") as error:
            serve_store(found, timeout=timedelta(seconds=1))
    assert "\n" not in str(error.value)
