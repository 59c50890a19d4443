"""The section ``env`` accepts settings of network libraries, and refuses what chooses code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sdp
from sdp.engine.config.load import load_config
from sdp.engine.config.variables import REFUSED
from sdp.engine.errors import ConfigError


def test_variables_of_the_network_libraries_are_allowed() -> None:
    for folder in (Path(sdp.__path__[0]) / "configs").glob("*.json"):
        load_config(folder)
    names = "NCCL_NET NCCL_IB_HCA NCCL_SOCKET_IFNAME UCX_TLS FI_PROVIDER GLOO_SOCKET_IFNAME OMP_NUM_THREADS TORCH_LOGS"
    load_config({"env": dict.fromkeys(names.split(), "x")})


@pytest.mark.parametrize("pattern", [pattern for patterns in REFUSED.values() for pattern in patterns])
def test_every_variable_of_the_list_is_refused(pattern: str) -> None:
    name = pattern.replace("*", "X")
    with pytest.raises(
        ConfigError, match=f"{name} cannot be set here, because .*; set it where the processes are started"
    ):
        load_config({"env": {name: "x"}})


def test_the_docs_list_every_variable_that_is_refused() -> None:
    page = (Path(sdp.__path__[0]) / "docs" / "clusters.md").read_text()
    for reason, patterns in REFUSED.items():
        rows = [line for line in page.splitlines() if line.startswith(f"| {reason} |")]
        assert len(rows) == 1, reason
        assert re.findall(r"`([^`]+)`", rows[0]) == list(patterns)
