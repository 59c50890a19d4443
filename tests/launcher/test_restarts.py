"""When a run is started again, and how many processes its degrees ask for."""

import fcntl
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError, LaunchError
from sdp.launcher import restarts
from sdp.launcher.degrees import Degrees
from sdp.launcher.restarts import LOCK, End, await_lock, on_fewer_ranks, run_again


class Lives:
    def __init__(self, *ends: End):
        self.ends, self.words = list(ends), list[list[str]]()

    def start(self, words: Sequence[str]) -> End:
        self.words.append(list(words))
        return self.ends[len(self.words) - 1]


LOST, DONE, MISTAKE, STOPPED = End(1, True), End(0, False), End(2, False), End(143, False)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "MOST_SECONDS", 0.01)


@pytest.mark.parametrize(
    ("ends", "most", "code", "starts"),
    [
        ([LOST, LOST, DONE], 3, 0, 3),
        ([LOST, LOST, LOST], 2, 1, 3),
        ([LOST], 0, 1, 1),
        ([MISTAKE], 3, 2, 1),
        ([STOPPED], 3, 143, 1),
        ([LOST, MISTAKE], 3, 2, 2),
        ([End(1, False)], 3, 1, 1),  # the gradient is NaN, say
    ],
)
def test_only_losses_are_answered_by_a_restart(ends: list[End], most: int, code: int, starts: int) -> None:
    lives = Lives(*ends)
    assert run_again(lives.start, most, [], lambda: ["--more"]) == code
    assert lives.words == [[], *[["--resume", "--more"]] * (starts - 1)]


def test_no_restart_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_again(Lives(LOST).start, 3, [15]) == 1
    monkeypatch.setattr(restarts, "MOST_SECONDS", 60.0)
    received: list[int] = []
    threading.Timer(0.3, received.append, [2]).start()
    started = time.monotonic()
    lives = Lives(*[LOST] * 9)
    assert run_again(lives.start, 9, received) == 130
    assert time.monotonic() - started < 10


def test_what_makes_a_restart_impossible_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def prepare() -> list[str]:
        raise LaunchError("3 ranks are left, but a group has 4")

    assert run_again(Lives(LOST).start, 3, [], prepare) == 1
    assert capsys.readouterr().err.splitlines() == [
        "sdp: restart 1 of 3 from the newest checkpoint in 0.01 s",
        "sdp: error: the run is not started again: 3 ranks are left, but a group has 4",
    ]


def test_a_restart_waits_for_the_lock_of_the_run(tmp_path: Path) -> None:
    await_lock(tmp_path / "nowhere", [])
    held = (tmp_path / LOCK).open("a")
    fcntl.flock(held, fcntl.LOCK_EX)
    threading.Timer(0.5, held.close).start()
    started = time.monotonic()
    await_lock(tmp_path, [])
    assert 0.4 < time.monotonic() - started < 20
    with (tmp_path / LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        await_lock(tmp_path, [15])


def degrees(groups: int, tp: int = 1, train: int = 24, micro: int = 1, **section: Any) -> Degrees:
    batch = {"train_batch_size": train, "train_micro_batch_size_per_gpu": micro}
    return Degrees(load_config({"sdp": {"groups": groups, **section}, "tensor_parallel": {"autotp_size": tp}, **batch}))


def words_of(groups: int, fsdp: int, train: int, micro: int, accumulation: int) -> list[str]:
    batch = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    settings = [word for key, value in batch.items() for word in ("--set", f"{key}={value}")]
    return ["--groups", str(groups), "--fsdp", str(fsdp), *settings]


@pytest.mark.parametrize(
    ("given", "started", "left", "expected"),
    [
        (degrees(4), 4, 4, (4, [])),
        (degrees(4), 4, 3, (3, words_of(3, 1, 24, 1, 8))),
        (degrees(4, train=48, micro=2), 8, 7, (6, words_of(3, 2, 48, 2, 4))),
        (degrees(2, tp=2), 8, 5, (4, words_of(1, 2, 24, 1, 12))),
        (degrees(4, capacity=0.5), 8, 4, (4, words_of(2, 2, 24, 1, 6))),
    ],
)
def test_degrees_and_batch_stay_on_fewer_ranks(
    given: Degrees, started: int, left: int, expected: tuple[int, list[str]]
) -> None:
    assert on_fewer_ranks(given, started, left) == expected


@pytest.mark.parametrize(
    ("given", "left", "message"),
    [
        (degrees(2), 1, "1 ranks are left, but a group needs 2 (fsdp * tp)"),
        (degrees(4, train=16), 3, "train_batch_size 16 is not a multiple of train_micro_batch_size_per_gpu 1 * 3 data"),
        (degrees(4, placement={"layers.0": [0, 1]}), 3, "sdp.placement is given for each of 4 groups, but only"),
        (degrees(4, capacity=[1.0, 0.5, 0.5, 1.0], placement="balanced"), 3, "sdp.capacity is given for each of 4"),
        (degrees(4, capacity=0.25), 2, "sdp.capacity: 0.25 × 2 groups = 0.5 holders per unit, and every unit needs at"),
        (degrees(4, capacity=0.25), 1, "sdp.capacity: 0.25 × 1 groups = 0.25 holders per unit"),
    ],
)
def test_what_cannot_go_on_with_fewer_groups(given: Degrees, left: int, message: str) -> None:
    with pytest.raises((LaunchError, ConfigError)) as caught:
        on_fewer_ranks(given, 4, left)
    assert message in str(caught.value)


# -- how many processes the degrees of parallelism, the batch and the devices ask for --------------


def degrees_of(
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
    assert degrees_of(groups, fsdp, tp).processes(nproc, devices) == expected


@pytest.mark.parametrize(
    ("degrees", "nproc", "devices", "message"),
    [
        (degrees_of(2, 3, 1), 8, 0, r"8 processes \(--nproc\) are not groups 2 .* \* tp 1 .* \* fsdp 3 \(--fsdp\) = 6"),
        (degrees_of(3, None, 2), 8, 0, r"8 processes \(--nproc\) are not a multiple of groups 3 .* \* tp 2 .* = 6"),
        (degrees_of(4), None, 2, r"2 processes \(visible devices\) are not a multiple of groups 4"),
        (degrees_of(4), 4, 2, r"4 processes \(--nproc\) need 4 devices, but 2 are visible"),
    ],
)  # fmt: skip
def test_counts_that_do_not_fit(degrees: Degrees, nproc: int | None, devices: int, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        degrees.processes(nproc, devices)


@pytest.mark.parametrize(
    ("degrees", "count"),
    [
        (degrees_of(2, batch={"train_batch_size": 8}), 6),
        (degrees_of(1, batch={"train_batch_size": 7, "gradient_accumulation_steps": 2}), 1),
    ],
)
def test_samples_that_the_processes_do_not_share(degrees: Degrees, count: int) -> None:
    with pytest.raises(
        ConfigError, match=r"train_batch_size \d \(from the configuration\) is not .*; change one of them"
    ):
        degrees.check(count, "given")
