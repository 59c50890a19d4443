"""The state of a SLURM job, from the run's files and from sacct and scontrol."""

import os
import subprocess
from pathlib import Path

import pytest
from sdp.tools.cli import main


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The whole PATH: without programs, SLURM's are not there."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


def status(capsys: pytest.CaptureFixture[str], folder: Path, events: str, log: str = "") -> str:
    (folder / "run/slurm").mkdir(parents=True)
    (folder / "run/slurm/events").write_text("".join(f"100 {event}\n" for event in events.split("; ")))
    (folder / "run/slurm/job-7-rank-1.log").write_text(log)
    assert main(["launch", "--launcher", "slurm", "--status", str(folder / "run")]) == 0
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("events", "log", "expected"),
    [
        ("7 submitted", "", "job 7: pending"),
        ("7 running; 7 submitted", "", "job 7: running"),
        ("7 submitted; 7 running; 7 ended 0", "", "job 7: done"),
        ("7 submitted; 7 running; 7 ended 2", "sdp: error: shard 7 is damaged", "job 7: failed, exit code 2"),
        ("7 submitted; 7 running; 7 ended 1", "CUDA out of memory. Tried", "job 7: out of memory, exit code 1"),
        ("7 submitted; 7 running; 7 ended 137", "slurmstepd: error: Detected 1 oom_kill event",
            "job 7: out of memory, exit code 137"),
        ("7 submitted; 7 running; 7 ended 137", "StepId=7.0 exceeded memory limit (2 > 1)",
            "job 7: out of memory, exit code 137"),
        ("7 submitted; 7 running; 7 ended 1; 12 submitted; 12 ended 1", "CUDA out of memory. Tried",
            "job 12: failed, exit code 1"),
        ("7 submitted; 7 running; 7 told-to-end; 7 ended 143", "", "job 7: cancelled, exit code 143"),
        ("7 submitted; 7 running; 7 told-to-end", "", "job 7: cancelled"),
        ("7 running; 7 time-limit-near; 7 told-to-end", "", "job 7: timeout"),
        ("7 running; 7 told-to-end; 7 ended 143; 7 running", "", "job 7: running"),
        ("7 submitted; 7 running; 7 time-limit-near", "", "job 7: timeout"),
        ("7 submitted; 7 running; 7 time-limit-near; 7 ended 143", "", "job 7: timeout, exit code 143"),
        ("7 submitted; 7 running; 7 time-limit-near; 7 requeued", "", "job 7: pending"),
        ("7 running; 7 time-limit-near; 7 requeued; 7 running", "", "job 7: running"),
        ("7 submitted; 7 running; 7 ended 1; 12 submitted", "", "job 12: pending"),
        ("7 submitted; 7 running; 7", "", "job 7: running"),  # half written
        ("7 submitted; 7 running\n 7 ended 137", "", "job 7: running"),  # without its time
    ],
)  # fmt: skip
def test_from_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, bin_folder: Path, events: str, log: str, expected: str
) -> None:
    assert not list(bin_folder.iterdir())
    assert status(capsys, tmp_path, events, log) == expected


@pytest.mark.usefixtures("bin_folder")
def test_binary_events_and_a_fifo_among_the_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "run" / "slurm"
    folder.mkdir(parents=True)
    (folder / "events").write_bytes(b"\xff\xfe\n100 7 running\n100 7 ended 1\n\x80\x00")
    os.mkfifo(folder / "job-7.log")
    words = ["launch", "--launcher", "slurm", "--status", str(tmp_path / "run")]
    assert main(words) == 0
    assert capsys.readouterr().out == "job 7: failed, exit code 1\n"
    (folder / "events").unlink()
    os.mkfifo(folder / "events")
    assert main(words) == 2
    assert "no job was submitted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("PENDING", "pending"),
        ("RUNNING", "running"),
        ("COMPLETED", "done"),
        ("OUT_OF_MEMORY", "out of memory"),
        ("TIMEOUT", "timeout"),
        ("CANCELLED by 0", "cancelled"),
        ("NODE_FAIL", "failed"),
    ],
)
@pytest.mark.parametrize("program", ["sacct", "scontrol"])
def test_slurm_is_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, bin_folder: Path, program: str, state: str, expected: str
) -> None:
    """A job that was killed noted no end."""
    said = f"JobId=7 JobState={state} Reason=None" if program == "scontrol" else state
    (bin_folder / program).write_text(f"#!/bin/sh\necho '{said}'\n")
    (bin_folder / program).chmod(0o755)
    assert status(capsys, tmp_path, "7 submitted; 7 running") == f"job 7: {expected}"


@pytest.mark.parametrize(
    ("said", "expected"),
    [  # SLURM 22.05: the job, its batch script, its steps
        ("FAILED\nFAILED\nOUT_OF_MEMORY", "out of memory"),
        ("FAILED\nFAILED\nFAILED", "failed"),
        ("TIMEOUT\nCANCELLED\nCANCELLED", "timeout"),
        ("RUNNING\nRUNNING\nOUT_OF_MEMORY", "running"),
        ("CANCELLED by 0\nCANCELLED", "cancelled"),
        ("REQUEUED\nCANCELLED", "pending"),
        ("", "running"),  # not yet in the accounting
    ],
)
def test_steps_in_the_accounting(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, bin_folder: Path, said: str, expected: str
) -> None:
    (bin_folder / "sacct").write_text(f"#!/bin/sh\necho '{said}'\n")
    (bin_folder / "sacct").chmod(0o755)
    assert status(capsys, tmp_path, "7 submitted; 7 running") == f"job 7: {expected}"


def test_no_job(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["launch", "--launcher", "slurm", "--status", str(tmp_path)]) == 2
    assert "no job was submitted" in capsys.readouterr().err
    assert main(["launch", "--launcher", "slurm", "--status", str(tmp_path), "run.json"]) == 2
    assert "--status starts nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "restarts", "events"),
    [
        (137, 1, ["running", "lost", "requeued", "running", "ended 137"]),
        (1, 0, ["running", "ended 1", "running", "ended 1"]),
        (2, 1, ["running", "ended 2", "running", "ended 2"]),
    ],
)
def test_a_job_whose_ranks_fail_goes_back_to_the_queue(
    capsys: pytest.CaptureFixture[str], folder: Path, code: int, restarts: int, events: list[str]
) -> None:
    """The script runs twice, with programs in place of SLURM's."""
    words = ["launch", "--launcher", "slurm", "--gpus-per-node", "2", "--dry-run", "--dump-dir", "out"]
    words[6:6] = [*(["--restarts", str(restarts)] if restarts else []), "run.json"]
    assert main(words) == 0
    (folder / "out/slurm").mkdir(parents=True)
    (folder / "job.sh").write_text(capsys.readouterr().out.partition("\n")[2])
    for name, script in (("srun", f'echo "$@" >> started; exit {code}'), ("scontrol", 'echo "$@" >> requeued')):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    environ = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    for restart in ("0", "1"):
        subprocess.run(["bash", "job.sh"], env=environ | {"SLURM_RESTART_COUNT": restart}, check=False)
    assert [line.split(" ", 2)[2] for line in (folder / "out/slurm/events").read_text().splitlines()] == events
    assert "--resume" not in (folder / "started").read_text().splitlines()[0]
    assert (folder / "started").read_text().splitlines()[1].endswith(" --resume")
    requeued = (folder / "requeued").read_text() if "requeued" in events else ""
    assert requeued == "requeue 7\n" * ("requeued" in events)
