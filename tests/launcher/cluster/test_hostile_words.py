"""No word can run anything, and the batch script does its work."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from sdp.launcher.cluster.rank import decode
from sdp.tests.support.launch_lines import dry_run

pytestmark = pytest.mark.usefixtures("folder")
HOSTILE = [
    "a b", "a;touch pwned", "$(touch pwned)", "`touch pwned`", "'; touch pwned; '", '"; touch pwned; "',
    "a\ntouch pwned\n", "%h", "&", "",
]  # fmt: skip


@pytest.mark.parametrize("word", HOSTILE)
@pytest.mark.parametrize("launcher", ["local", "deepspeed", "mpirun"])
def test_hostile_words_stay_words(capsys: pytest.CaptureFixture[str], launcher: str, word: str) -> None:
    hosts = (
        [] if launcher == "local" else ["--hostfile", "hosts"] + (["--mpi", "openmpi"] if launcher == "mpirun" else [])
    )
    out = word or "."
    printed = dry_run(capsys, "--launcher", launcher, *hosts, "--env", f"NCCL_X={word}", "run.json", "--dump-dir", out)
    expected = ["train", "run.json", "--dump-dir", out, "--set", f"env.NCCL_X={json.dumps(word)}"]
    command, _, _ = printed.partition("\n#")
    words = shlex.split(command)
    if launcher == "local":
        assert words[-len(expected) :] == expected
        return
    last = max(index for index, found in enumerate(words) if found.endswith("cluster.rank"))
    assert [decode(found) for found in words[last + 3 :]] == expected
    # A remote shell reads the joined words, as pdsh and ssh hand them over.
    joined = " ".join(words[last + 1 :])
    read = subprocess.run(["sh", "-c", f"printf '%s\\n' {joined}"], capture_output=True, text=True, check=True)
    assert read.stdout.splitlines() == words[last + 1 :]
    assert not Path("pwned").exists()


def stand_in_for_srun(script: str) -> None:
    Path("bin").mkdir()
    Path("bin/srun").write_text(f"#!/bin/sh\n{script}\n")
    Path("bin/srun").chmod(0o755)


def run_job(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the batch script that a dry run printed, as SLURM's job 7."""
    environ = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **variables}
    return subprocess.run(["bash", "-c", script.partition("\n")[2]], env=environ, capture_output=True, text=True)


@pytest.mark.parametrize("word", [word for word in HOSTILE if word and not set(word) & set('"\n%')])
def test_hostile_words_in_the_batch_script(capsys: pytest.CaptureFixture[str], folder: Path, word: str) -> None:
    """The script runs under bash with an srun that writes down its words."""
    stand_in_for_srun(f'printf "%s\\n" "$@" > "{folder}/words"\nexit 3')
    printed = dry_run(
        capsys, "--launcher", "slurm", "--gpus-per-node", "2", "--env", f"NCCL_X={word}", "run.json", "--dump-dir", word
    )
    (folder / word / "slurm").mkdir(parents=True)
    ended = run_job(printed, folder, SLURM_RESTART_COUNT="1")
    assert (ended.returncode, ended.stderr) == (3, "")
    words = Path("words").read_text().splitlines()
    assert words[words.index("train") :] == [
        "train", "run.json", "--dump-dir", word, "--set", f"env.NCCL_X={json.dumps(word)}", "--resume",
    ]  # fmt: skip
    assert [line.split()[1:] for line in (folder / word / "slurm/events").read_text().splitlines()] == [
        ["7", "running"],
        ["7", "ended", "3"],
    ]
    assert not list(folder.rglob("pwned"))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("host-a: task 0: Exited with exit code 2\nsrun: error: host-b: tasks 2-3: Terminated", 2),
        ("host-a: tasks 0-1: Exited with exit code 143", 143),
        ("host-b: task 2: Killed\nsrun: error: host-a: task 0: Exited with exit code 1", 137),
        ("host-b: task 2: Out Of Memory\nsrun: error: host-a: task 0: Terminated", 137),
        ("Unable to create step", 143),
    ],
)
def test_the_code_of_the_task_that_failed_first(
    capsys: pytest.CaptureFixture[str], folder: Path, said: str, expected: int
) -> None:
    stand_in_for_srun(f"printf 'srun: error: {said}\\n' >&2\nexit 143")
    printed = dry_run(capsys, "--launcher", "slurm", "--gpus-per-node", "2", "run.json", "--dump-dir", "out")
    Path("out/slurm").mkdir(parents=True)
    assert run_job(printed, folder).returncode == expected
    assert Path("out/slurm/events").read_text().split()[-2:] == ["ended", str(expected)]


@pytest.mark.parametrize(("given", "expected"), [({"SLURM_CPUS_PER_TASK": "6"}, "6"), ({}, "unset")])
def test_srun_is_told_the_cores_of_a_task(
    capsys: pytest.CaptureFixture[str], folder: Path, given: dict[str, str], expected: str
) -> None:
    stand_in_for_srun(f'echo "${{SRUN_CPUS_PER_TASK-unset}}" > "{folder}/cores"')
    printed = dry_run(capsys, "--launcher", "slurm", "--gpus-per-node", "2", "run.json", "--dump-dir", "out")
    Path("out/slurm").mkdir(parents=True)
    assert run_job(printed, folder, **given).returncode == 0
    assert Path("cores").read_text().strip() == expected
