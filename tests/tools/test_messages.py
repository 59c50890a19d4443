"""Messages repeat input in printable characters, and only its start."""

import json
from pathlib import Path

import pytest
from sdp.engine.errors import MOST_MESSAGE, ConfigError, escape, format_error, quote, shorten
from sdp.tools.cli import main

LONG = "x" * 500_000
DIGITS = "9" * 5000
HOSTILE = "a\x1b]0;title\x07\x9b2J\x00\r\u202eb"


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["config", "run.json", "--set", LONG], "--set xxx"),
        (["config", "run.json", "--set", f"sdp.groups={LONG}"], "sdp.groups: "),
        (["config", "run.json", "--set", f'sdp.groups="{HOSTILE}"'.replace("\x00", "")], "sdp.groups: "),
        (["config", "run.json", "--set", f"sdp.{LONG}=1"], "sdp.xxx"),
        (["config", "run.json", "--set", f"zero_optimization.mics_shard_size={LONG}"], "zero_optimization.mics_"),
        (["config", "run.json", "--set", f"env.{LONG}-=1"], "env.xxx"),
        (["config", "run.json", f"--{LONG}"], "unrecognized arguments: --xxx"),
        (["config", "run.json", f"--{HOSTILE}"], "unrecognized arguments: --a\\x1b]0;"),
        ([LONG], "argument COMMAND: invalid choice: 'xxx"),
        (["train", "run.json", "--nproc", LONG], "argument --nproc: 'xxx"),
        (["launch", "--launcher", "slurm", "--gpus-per-node", "1", "--env", LONG, "run.json"], "--env xxx"),
        (["launch", "--launcher", "slurm", "--gpus-per-node", "1", "--time", HOSTILE, "run.json"], "--time 'a\\x1b]0;"),
        (["launch", "--launcher", "slurm", "--gpus-per-node", "1", "--launcher-args", LONG, "run.json"],
            "--launcher-args: has 500,000 characters"),
        (["launch", "--launcher", "mpirun", "--hostfile", "hosts", "run.json"], "hosts:1: 'xxx"),
        (["launch", "--launcher", "mpirun", "--hostfile", "good", "--include", LONG, "run.json"], "--include xxx"),
        (["launch", "--launcher", "mpirun", "--hostfile", "many", "run.json"], "many:1: slots=20000000 is more than"),
        (["launch", "--launcher", "mpirun", "--hostfile", "digits", "run.json"], "digits:1: slots=999"),
        (["launch", "--launcher", "mpirun", "--hostfile", "good", "--include", f"worker-0:{DIGITS}", "run.json"],
            "--in"),
        (["launch", "--launcher", "slurm", "--nodes", DIGITS, "--gpus-per-node", "1", "run.json"],
            "argument --nodes: 999"),
        (["launch", "--launcher", "slurm", "--nodes", "9" * 9, "--gpus-per-node", "1", "run.json"],
            "999999999 process"),
        (["launch", "--launcher", "mpirun", "--hostfile", "good", "--master-port", DIGITS, "run.json"],
            "argument --ma"),
        (["launch", "--launcher", "mpirun", "--hostfile", "good", "--master-port", "70000", "run.json"],
            "argument --m"),
        (["launch", "--launcher", "slurm", "--status", "binary"], "--status binary: "),
        (["plan", "run.json", "--world", "1" + "0" * 20], "argument --world: 100000000000000000000 is"),
        (["prepare", "--input", "run.json", "--output", "out", "--tokenizer", LONG], "unknown tokenizer 'xxx"),
        (["prepare", "--input", f"{HOSTILE}*".replace("\x00", ""), "--output", "out"], "no file matches 'a\\x1b]0;"),
    ],
    ids=lambda value: value[0][:9] + value[-1][:9] if isinstance(value, list) else value[:9],
)  # fmt: skip
def test_the_command_line_prints_no_raw_and_no_endless_input(
    words: list[str], start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text(json.dumps({"train_batch_size": 4, "sdp": {"groups": 1}}))
    Path("hosts").write_text(LONG)
    Path("many").write_text("worker-0 slots=20000000\n")
    Path("digits").write_text(f"worker-0 slots={DIGITS}\n")
    Path("binary/slurm").mkdir(parents=True)
    Path("binary/slurm/events").write_bytes(b"1 7 \xff\xfe\n1 " + DIGITS.encode() + b" running\n\x80")
    Path("good").write_text("worker-0 slots=1\n")
    assert main(words) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"sdp: error: {start}")
    assert len(message) < 1600, "a value was not shortened where the error was raised"
    assert message.removesuffix("\n").isprintable()


def test_control_characters_are_escaped_and_lines_stay() -> None:
    assert escape(f"first\n\tsecond {HOSTILE}") == "first\n\tsecond a\\x1b]0;title\\x07\\x9b2J\\x00\\r\\u202eb"
    assert escape("plain text, ü, 漢字, 😀") == "plain text, ü, 漢字, 😀"
    escape("half \ud800").encode()


def test_values_are_cut_to_200_characters() -> None:
    assert shorten("short") == "short"
    assert shorten("x" * 200) == "x" * 200
    assert shorten("x" * 1300) == "x" * 200 + "… (1,100 more characters)"
    assert shorten("a\nb\tc\x1b") == "a\\nb\\tc\\x1b"
    assert quote("it's") == repr("it's")
    assert quote("x" * 201) == repr("x" * 200) + "… (1 more characters)"
    assert quote({"a": 1}) == "{'a': 1}"


def test_a_message_keeps_its_start_and_its_end() -> None:
    text = format_error(ConfigError(f"run.json: {LONG}; remove it"))
    assert text.startswith("run.json: xxx")
    assert text.endswith("xxx; remove it")
    assert len(text) < MOST_MESSAGE + 100
    assert format_error(ConfigError("two\n  lines\x1b[2J")) == "two lines\\x1b[2J"
