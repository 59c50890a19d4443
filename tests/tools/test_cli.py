"""The command line: exit codes, one-line messages, and which process runs the training."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import sdp
from sdp.engine.errors import DataError, HolderMismatchError
from sdp.launcher import degrees as layout
from sdp.launcher import fatal_errors, local
from sdp.launcher.fatal_errors import FatalError
from sdp.tools import cli as command_line
from sdp.tools.cli import main
from sdp.tools.train.command import STOP_SECONDS

LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_text(json.dumps({"train_batch_size": 8, "sdp": {"groups": 2, "capacity": 0.5}}))
    return path


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replaces the training loop and the local launcher, and records what they were called with."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "")  # so that what a run publishes is undone
        monkeypatch.delenv(name)
    calls = SimpleNamespace(args=None, started=None, outcome=0)

    def run(options: argparse.Namespace, on_stall: object) -> int:
        calls.args = options
        if isinstance(calls.outcome, BaseException):
            raise calls.outcome
        return calls.outcome

    def start_local(*args: object, **options: object) -> int:
        calls.started = (args, options)
        return 0

    monkeypatch.setitem(sys.modules, "sdp.tools.train.rank", SimpleNamespace(run=run))
    monkeypatch.setattr(local, "start_local", start_local)
    monkeypatch.setattr(layout, "visible_devices", lambda: 0)
    monkeypatch.setattr(fatal_errors, "HOLD_BACK_SECONDS", 0.0)
    return calls


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "the following arguments are required: CONFIG"),
        (["train", "missing.json"], "missing.json: no such configuration file"),
        (["config"], "give either a CONFIG to resolve or --schema"),
        (["train", "CONFIG", "--nproc", "0"], "'0' is not a positive whole number"),
        (["train", "CONFIG", "--set", "sdp.gruops=3"], "did you mean groups?"),
        (["train", "CONFIG", "--set", "sdp.groups"], "expected section.key=value"),
        (["train", "CONFIG", "--nproc", "3"], "3 processes (--nproc) are not a multiple of groups 2"),
        (["train", "CONFIG", "--fsdp", "2", "--nproc", "2"], "are not groups 2 (sdp.groups) * tp 1"),
        (["train", "CONFIG", "--nproc", "6"], "train_batch_size 8 (from the configuration) is not"),
        (["train", "CONFIG", "--set", "sdp.capacity=0.25"], "use a capacity of at least 0.5"),
        (["train", "CONFIG", "--set", "data.path=nowhere"], "nowhere: no prepared data here"),
        (["train", "CONFIG", "--dump-dir", "EARLIER"], "EARLIER already holds a run; pass --resume"),
    ],
)
def test_mistakes_are_one_line_and_start_nothing(
    config: Path, training: SimpleNamespace, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    earlier = config.parent / "EARLIER"
    (earlier / "checkpoints" / "step-1").mkdir(parents=True)
    assert main([{"CONFIG": str(config), "EARLIER": str(earlier)}.get(word, word) for word in words]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("sdp: error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert printed.out == ""
    assert training.started is training.args is None
    assert not (earlier / "logs").exists()


def test_partial_launcher_environment_is_a_mistake(
    config: Path, training: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert main(["train", str(config)]) == 2
    assert "MASTER_ADDR, MASTER_PORT missing" in capsys.readouterr().err


def test_help_config_and_launch_do_not_import_torch(config: Path) -> None:
    code = f"""
import sys
from sdp.tools.cli import main
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
assert main(["config", {str(config)!r}]) == main(["config", "--schema"]) == main(["--version"]) == 0
assert main(["launch", "--dry-run", "--launcher", "slurm", "--gpus-per-node", "2", {str(config)!r}]) == 0
assert "torch" not in sys.modules, "torch was imported"
"""
    environ = {**os.environ, "PYTHONPATH": str(Path(sdp.__path__[0]).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_ends_quietly_where_nobody_reads_the_output_any_more() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    environ = {**os.environ, "PYTHONPATH": str(Path(sdp.__path__[0]).parent)}
    command = [sys.executable, "-P", "-m", "sdp", "config", "--schema"]
    done = subprocess.run(
        command, env=environ, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False, timeout=60
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--version"], ["config", "--schema"]])  # less than a buffer, and more
def test_a_full_disk_under_the_output_is_said_in_a_line(words: list[str], unbuffered: str) -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(sdp.__path__[0]).parent), "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-P", "-m", "sdp", *words]
        done = subprocess.run(
            command, env=environ, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert (done.returncode, done.stderr) == (
        2,
        "sdp: error: standard output cannot be written (No space left on device)\n",
    )


def test_another_broken_pipe_is_a_failure(
    config: Path, training: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    training.outcome = BrokenPipeError("of a worker")
    assert main(["train", str(config), "--groups", "1"]) == 1
    assert "BrokenPipeError: of a worker" in capsys.readouterr().err


ENDING = """
import atexit, sys
from sdp.tools import cli as main

class Late:
    def __del__(self):
        print("interpreter ended")

def command():
    atexit.register(print, "handlers called")
    return 3

main.main = command
sys.modules[sys.argv[1]] = Late()
main.entry()
"""


@pytest.mark.parametrize(
    ("module", "last"), [("torch.distributed", "handlers called"), ("no.torch", "interpreter ended")]
)
def test_a_process_that_used_torch_distributed_leaves_without_ending_the_interpreter(module: str, last: str) -> None:
    ended = subprocess.run([sys.executable, "-P", "-c", ENDING, module], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 3, ended.stderr
    assert ended.stdout.splitlines()[0] == "handlers called"
    assert ended.stdout.splitlines()[-1] == last


def test_config_prints_all_defaults_and_overrides(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(config), "--set", "sdp.groups=4", "sdp.seed=7"]) == 0
    resolved = json.loads(capsys.readouterr().out)
    assert resolved["sdp"]["groups"] == 4
    assert resolved["sdp"]["seed"] == 7
    assert resolved["gradient_clipping"] == 0.0


def test_env_section_reaches_the_processes_to_be_started(
    config: Path, training: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")  # the run's file goes over what the shell has
    assert main(["train", str(config), "--set", "env.NCCL_SOCKET_IFNAME=ib0"]) == 0
    assert training.started
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"


def test_starts_a_process_for_each_group(config: Path, training: SimpleNamespace, tmp_path: Path) -> None:
    words = ["train", str(config), "--groups", "4", "--dump-dir", str(tmp_path / "run")]
    assert main(words) == 0
    assert training.args is None
    assert training.started == (
        (words, 4, tmp_path / "run/logs"),
        {"on_cpu": True, "stop_seconds": STOP_SECONDS, "restarts": 0},
    )


def test_default_dump_directory_is_named_after_the_config(config: Path, training: SimpleNamespace) -> None:
    assert main(["train", str(config)]) == 0
    assert training.started[0][2] == Path("runs/small/logs")


def test_one_process_runs_here(config: Path, training: SimpleNamespace) -> None:
    assert main(["train", str(config), "--groups", "1"]) == 0
    assert training.started is None
    assert training.args.dump_dir == Path("runs/small")
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")


def torchrun(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    place = (rank, world_size, rank, world_size, 0, "127.0.0.1", 29400)
    for name, value in zip(LAUNCHER_VARIABLES, place, strict=True):
        monkeypatch.setenv(name, str(value))


def test_started_by_torchrun_runs_here(
    config: Path, training: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torchrun(monkeypatch, 1, 4)
    assert main(["train", str(config), "--fsdp", "2"]) == 0
    assert training.started is None
    assert training.args.fsdp == 2
    assert main(["train", str(config), "--fsdp", "4"]) == 2
    assert "4 processes (torchrun) are not groups 2" in capsys.readouterr().err
    assert main(["train", str(config), "--nproc", "8"]) == 2
    assert "torchrun has already started 4 processes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("outcome", "code", "message"),
    [
        (DataError("shard 3\nis damaged"), 2, "sdp: error: shard 3 is damaged\n"),
        (HolderMismatchError("unit layers.1"), 1, "sdp: error: unit layers.1\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_exit_codes(
    config: Path,
    training: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
    outcome: BaseException,
    code: int,
    message: str,
) -> None:
    training.outcome = outcome
    assert main(["train", str(config), "--groups", "1"]) == code
    assert capsys.readouterr().err == message


def test_failure_of_the_program_shows_a_traceback(
    config: Path, training: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    training.outcome = ValueError("unexpected")
    assert main(["train", str(config), "--groups", "1"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("ValueError: unexpected\n")


@pytest.mark.parametrize(("rank", "printed"), [(0, False), (1, True)])
def test_supervised_rank_leaves_its_error_to_the_launcher(
    config: Path,
    training: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    rank: int,
    printed: bool,
) -> None:
    torchrun(monkeypatch, rank, 2)
    monkeypatch.setenv("SDP_PARENT_PID", str(os.getppid()))
    monkeypatch.setenv("SDP_ERROR_FILE", str(tmp_path / "rank.error"))
    monkeypatch.setattr(command_line, "tie_to_parent", lambda _: None)
    training.outcome = DataError("empty corpus")
    assert main(["train", str(config)]) == 2
    report = FatalError.read(tmp_path / "rank.error")
    assert report is not None
    assert (report.exit_code, report.text) == (2, "sdp: error: empty corpus")
    assert capsys.readouterr().err == ("sdp: error: empty corpus\n" if printed else "")
    assert "SDP_PARENT_PID" not in os.environ


@pytest.mark.parametrize(
    "words",
    [
        ["report", "NAME"],
        ["evaluate", "NAME"],
        ["export", "NAME", "--to", "hf", "out"],
        ["prepare", "--output", "NAME", "--verify"],
    ],
    ids=lambda words: words[0],
)
def test_a_path_that_is_too_long_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word.replace("NAME", "a" * 300) for word in words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("sdp: error: ") and "File name too long" in message and len(message) < 400
