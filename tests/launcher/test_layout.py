"""How many processes the degrees of parallelism and the devices ask for."""

import pytest
from sdp.engine.config import load_config
from sdp.engine.errors import LaunchError
from sdp.launcher.layout import Degrees


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
    assert Degrees(groups, fsdp, tp, in_one_process=False).processes(nproc, devices) == expected


@pytest.mark.parametrize(
    ("degrees", "nproc", "devices", "message"),
    [
        (
            Degrees(2, 3, 1, False),
            8,
            0,
            r"8 processes \(--nproc\) are not groups 2 .* \* tp 1 .* \* fsdp 3 \(--fsdp\) = 6",
        ),
        (Degrees(3, None, 2, False), 8, 0, r"8 processes \(--nproc\) are not a multiple of groups 3 .* \* tp 2 .* = 6"),
        (Degrees(4, None, 1, False), None, 2, r"2 processes \(visible devices\) are not a multiple of groups 4"),
        (Degrees(4, None, 1, False), 4, 2, r"4 processes \(--nproc\) need 4 devices, 2 visible"),
        (Degrees(4, None, 1, True), 4, 0, r"reference.* run all 4 groups in one process"),
        (Degrees(4, 2, 1, True), None, 0, r"reference.* fsdp 2"),
        (Degrees(2, None, 1, False, (2, 1)), 4, 0, r"4 processes \(--nproc\) are not the 3 of sdp.group_sizes \[2, 1\]"),
        (Degrees(2, 2, 1, False, (2, 1)), None, 0, r"--fsdp 2: sdp.group_sizes says"),
    ],
)
def test_counts_that_do_not_fit(degrees: Degrees, nproc: int | None, devices: int, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        degrees.processes(nproc, devices)


def test_reference_engine_takes_one_process() -> None:
    degrees = Degrees.of(load_config({"sdp": {"groups": 4, "engine": "reference"}}), None)
    assert degrees.processes(None, devices=8) == 1


def test_group_sizes_say_how_many_processes_start() -> None:
    section = {"groups": 2, "group_sizes": [2, 1], "engine": "deepspeed"}
    degrees = Degrees.of(load_config({"sdp": section}), None)
    assert [degrees.processes(None, devices) for devices in (0, 8)] == [3, 3]
