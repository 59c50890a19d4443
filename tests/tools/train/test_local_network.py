"""A run on one host listens on loopback addresses only."""

import logging
import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from sdp.engine.distributed.join import serve_store
from sdp.engine.environment.detect import Environment, free_port
from sdp.engine.errors import LaunchError
from sdp.launcher.local import start_local
from sdp.tests.support.forks.command import ForkedCommand
from sdp.tests.support.small_runs import tiny_config, write_config

psutil = pytest.importorskip("psutil")


def listening_addresses(process: Any) -> set[str]:
    found = set()
    try:
        parent = psutil.Process(process.pid)
        for each in [parent, *parent.children(recursive=True)]:
            connections = each.net_connections(kind="inet")
            found |= {entry.laddr.ip for entry in connections if entry.status == psutil.CONN_LISTEN}
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        pass
    return found


@pytest.mark.parametrize("groups", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_no_socket_of_a_local_run_can_be_reached_from_another_host(
    text_corpus: Path, tmp_path: Path, groups: int
) -> None:
    path, found = write_config(tiny_config(text_corpus, groups=groups, steps=40), tmp_path), set[str]()
    with Path(os.devnull).open("w") as null:
        process = ForkedCommand(["train", path, "--dump-dir", tmp_path / "run"], null, null)
    while process.poll() is None:
        found |= listening_addresses(process)
        time.sleep(0.02)
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


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.mark.parametrize("chosen", [None, "eth7"])
def test_local_ranks_use_the_loopback_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    for name in INTERFACES:
        monkeypatch.setenv(name, chosen) if chosen else monkeypatch.delenv(name, raising=False)
    show = ["/bin/sh", "-c", f"env > {tmp_path}/$RANK"]
    assert start_local([], 2, tmp_path / "logs", command=show) == 0
    for rank in "01":
        lines = (tmp_path / rank).read_text().splitlines()
        assert {f"{name}={chosen or 'lo'}" for name in INTERFACES} <= {*lines}


def test_the_store_listens_on_the_master_address_only() -> None:
    found = Environment(0, 2, 0, 2, 0, "127.0.0.2", free_port(), "torchrun")
    # Rank 0 waits for the other rank.
    other = threading.Thread(target=lambda: dist.TCPStore("127.0.0.2", found.master_port, 2, is_master=False))
    other.start()
    store = serve_store(found, timeout=timedelta(seconds=20))
    other.join()
    assert store is not None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", found.master_port), timeout=5)


def test_a_name_that_the_host_resolves_to_itself_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("sdp"), "propagate", True)
    found = Environment(0, 2, 0, 1, 0, "localhost", free_port(), "torchrun")
    with caplog.at_level("WARNING", logger="sdp"):
        assert serve_store(found, timeout=timedelta(seconds=1)) is None
    assert "rank 0 listens on all interfaces, because its host resolves localhost to" in caplog.text
