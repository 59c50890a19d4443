"""How many processes the degrees of parallelism, the batch and the devices ask for."""

from __future__ import annotations

from typing import Any

import pytest
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError, LaunchError
from sdp.launcher.degrees import Degrees


def _degrees(
    groups: int, fsdp: int | None = None, tp: int = 1, *, batch: dict[str, int] | None = None, **section: Any
) -> Degrees:
    config = {"sdp": {"groups": groups, **section}, "tensor_parallel": {"autotp_size": tp}, **(batch or {})}
    return Degrees(load_config(config), fsdp)


@pytest.mark.parametrize(
    ("groups", "fsdp", "tp", "nproc", "devices", "expected"),
    [
        (4, None, 1, None, 0, 4),
        (2, 2, 1, None, 0, 4),
        (2, 2, 2, None, 0, 8),
        (2, None, 1, 8, 0, 8),
        (2, None, 1, None, 8, 8),
        (2, 2, 1, None, 8, 4),
        (1, None, 1, None, 1, 1),
    ],
)
def test_process_count(groups: int, fsdp: int | None, tp: int, nproc: int | None, devices: int, expected: int) -> None:
    assert _degrees(groups, fsdp, tp).processes(nproc, devices) == expected


@pytest.mark.parametrize(
    ("degrees", "nproc", "devices", "message"),
    [
        (_degrees(2, 3, 1), 8, 0, r"8 processes \(--nproc\) are not groups 2 .* \* tp 1 .* \* fsdp 3 \(--fsdp\) = 6"),
        (_degrees(3, None, 2), 8, 0, r"8 processes \(--nproc\) are not a multiple of groups 3 .* \* tp 2 .* = 6"),
        (_degrees(4), None, 2, r"2 processes \(visible devices\) are not a multiple of groups 4"),
        (_degrees(4), 4, 2, r"4 processes \(--nproc\) need 4 devices, 2 visible"),
    ],
)  # fmt: skip
def test_counts_that_do_not_fit(degrees: Degrees, nproc: int | None, devices: int, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        degrees.processes(nproc, devices)


@pytest.mark.parametrize(
    ("degrees", "count"),
    [
        (_degrees(2, batch={"train_batch_size": 8}), 6),
        (_degrees(1, batch={"train_batch_size": 7, "gradient_accumulation_steps": 2}), 1),
    ],
)
def test_samples_that_the_processes_do_not_share(degrees: Degrees, count: int) -> None:
    with pytest.raises(
        ConfigError, match=r"train_batch_size \d \(from the configuration\) is not .*; change one of them"
    ):
        degrees.check(count, "given")
