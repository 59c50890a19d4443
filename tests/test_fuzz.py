"""Mutated inputs to the command line: exit code 0 or 2, never a traceback, and nothing hangs.

The commands run in this process. One input is a list of edits to a good text, so that hypothesis
can shrink it.
"""

import contextlib
import copy
import hashlib
import io
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sdp.engine.errors import CheckpointError
from sdp.tests.support.checkpoints import load_alone, reseal, save_one_step
from sdp.tests.support.fabricated_runs import make_run
from sdp.tests.support.ranks import rank_alone
from sdp.tests.support.small_runs import SMALL_LLAMA
from sdp.tools.cli import main

SECONDS = 20  # for one input
BASE: dict[str, Any] = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}},
    "zero_optimization": {"stage": 1},
    "env": {"NCCL_DEBUG": "WARN"},
    "sdp": {"groups": 2, "capacity": 0.5, "units": "auto", "placement": "cyclic"},
    "model": {**SMALL_LLAMA, "vocab_size": 260},
    "data": {"path": "nowhere", "sequence_length": 32},
    "training": {"steps": 4, "save_every": 2},
}
CONFIG = json.dumps(BASE)
# The sections that exclude each other: each is mutated in a file of its own.
SYNC = {"every": 4, "outer_optimizer": {"type": "SGD", "params": {"lr": 0.7, "momentum": 0.9, "nesterov": True}}}
MASKING = [{"until": 0.5, "masking": "forward"}, {"masking": "backward"}]
SOURCES = {"path": None, "sources": [{"path": "a", "weight": 0.5}, {"path": "b", "weight": 2}], "sequence_length": 32}
OTHERS = [
    json.dumps(BASE | {section: BASE.get(section, {}) | settings for section, settings in changes.items()})
    for changes in (
        {"sdp": {"sync": SYNC}},
        {"sdp": {"masking": MASKING}},
        {"sdp": {"lr_scale": 0.5, "profile": [2, 2, 1, 1]}, "training": {"save_every": 2}},
        {"data": SOURCES, "training": {"on_spike": "skip"}},
    )
]
UNITS = [f"model.layers.{unit}" for unit in range(4)]
METRICS = "".join(
    json.dumps({"step": step, "tokens": 8 * step, "loss": 3.0, "tokens_per_second": 9.5, "comm_bytes": 7}) + "\n"
    for step in (1, 2, 3)
)
DOCUMENTS = "".join(json.dumps({"text": f"document {number}", "id": number}) + "\n" for number in range(8))
PIECES = [
    b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"Infinity", b"9" * 25, b"9" * 5000, b'"', b"{", b"}", b"[", b"]",
    b",", b":", b"\\ud800", b"\x00", b"\xff\xfe", b"\x1b[31m", b"[" * 1000, b"\n", b'""', b"{}", b"[]", b"10000000000",
    "\u202e".encode(), b"0.5", b'"llama"', b'{"a":1}',
]  # fmt: skip
edits = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from([0, 0, 1, 1, 2, 4, 8, 40]), st.sampled_from(PIECES)),
    min_size=1,
    max_size=3,
)
VALUES = [
    None, True, False, -1, 0, 1, 7, 1.5, 1e308, 10**30, 2**63, float("nan"), float("inf"), "x", "", "\x1b[31m", "../x",
    "9" * 40, 10**307, [], {}, [[]], [None], {"a": 1}, [1, 2, 3], ["x"], {"": {}},
]  # fmt: skip
replacements = st.lists(st.tuples(st.floats(0, 1), st.sampled_from(VALUES)), min_size=1, max_size=2)
ONE_HOST = ["--launcher", "slurm", "--gpus-per-node", "2", "--dry-run"]
tried: dict[str, int] = {}


class HungError(BaseException):
    """A command took too long. Not an Exception, so that the command line does not catch it."""


def mutate(text: str, changes: list[tuple[float, int, bytes]]) -> bytes:
    """Replace, at each relative position, so many bytes by a piece."""
    content = text.encode()
    for where, length, piece in changes:
        at = int(where * len(content))
        content = content[:at] + piece + content[at + length :]
    return content


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in pairs:
        yield value, key
        yield from places_in(below)


def with_other_values(value: Any, changes: list[tuple[float, Any]]) -> Any:
    """Replace the value at each relative position by another one."""
    for where, new in changes:
        places = list(places_in(value))
        container, key = places[min(int(where * len(places)), len(places) - 1)] if places else ([None], 0)
        container[key] = copy.deepcopy(new)
    return value


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise HungError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check(command: str, *words: str) -> None:
    tried[command] = tried.get(command, 0) + 1
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), time_limit():
        code = main([command, *words])
    text = err.getvalue()
    assert code in (0, 2), text[-3000:]
    assert "Traceback" not in text, text[-3000:]
    if code == 2:
        lines = [line for line in text.splitlines() if line.startswith("sdp: error: ")]
        assert len(lines) == 1, text[-3000:]
    out.getvalue().encode()  # what is printed must be text
    text.encode()


def fuzz_config(folder: Path, changes: Any) -> None:
    (folder / "run.json").write_bytes(mutate(CONFIG, changes))
    check("config", str(folder / "run.json"))


def fuzz_hostfile(folder: Path, changes: Any) -> None:
    (folder / "run.json").write_text(CONFIG)
    (folder / "hosts").write_bytes(mutate("worker-0 slots=2\n# two hosts\nworker-1 slots=2\n", changes))
    words = ["--launcher", "mpirun", "--mpi", "openmpi", "--hostfile", str(folder / "hosts"), "--dry-run"]
    check("launch", *words, str(folder / "run.json"), "--dump-dir", str(folder / "run"))


def fuzz_report(folder: Path, changes: Any) -> None:
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run" / "config.json").write_text(CONFIG)
    (folder / "run" / "metrics.jsonl").write_bytes(mutate(METRICS, changes))
    check("report", str(folder / "run"))


def fuzz_prepare(folder: Path, changes: Any) -> None:
    (folder / "in.jsonl").write_bytes(mutate(DOCUMENTS, changes))
    words = ["--input", str(folder / "in.jsonl"), "--output", str(folder / "out"), "--tokenizer", "bytes"]
    check("prepare", *words, "--held-out", "0.3", "--workers", "1", "--overwrite")


def fuzz_plan(folder: Path, changes: Any) -> None:
    (folder / "run.json").write_bytes(mutate(CONFIG, changes))
    check("plan", str(folder / "run.json"), "--world", "2")


def fuzz_structure(folder: Path, changes: Any) -> None:
    (folder / "run.json").write_text(json.dumps(with_other_values(json.loads(CONFIG), changes)))
    check("config", str(folder / "run.json"))
    if int(changes[0][0] * 1000) % 8 == 0:
        check("plan", str(folder / "run.json"), "--world", "2")


def fuzz_other_sections(folder: Path, changes: Any) -> None:
    text = OTHERS[int(changes[0][0] * 1000) % len(OTHERS)]
    (folder / "run.json").write_text(json.dumps(with_other_values(json.loads(text), changes)))
    check("config", str(folder / "run.json"))
    check("launch", *ONE_HOST, str(folder / "run.json"))
    if int(changes[0][0] * 1000) % 8 == 0:
        check("plan", str(folder / "run.json"), "--world", "2")


def fuzz_run_files(folder: Path, changes: Any) -> None:
    if not (folder / "good").exists():
        make_run(folder / "good", steps=10)
    shutil.copytree(folder / "good", folder / "run", dirs_exist_ok=True)
    names = ["config.json", "placement.json", "summary.json", "metrics.jsonl", "evaluations.jsonl"]
    path = folder / "run" / names[int(changes[0][0] * 1000) % len(names)]
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    lines[0] = json.dumps(with_other_values(json.loads(lines[0]), changes))
    path.write_text("\n".join(lines))
    check("report", str(folder / "run"))


def fuzz_checkpoint(folder: Path, changes: Any) -> None:
    """Change ``state.json`` or ``metadata.json``, and make the hashes right, as a forger would."""
    if not (folder / "good").exists():
        with rank_alone():
            save_one_step(folder / "good")
    shutil.copytree(folder / "good", folder / "forged", dirs_exist_ok=True)
    checkpoint = folder / "forged" / "step-1"
    path = checkpoint / ("state.json" if int(changes[0][0] * 1000) % 2 else "metadata.json")
    content = with_other_values(json.loads(path.read_text()), changes)
    if path.name == "state.json":
        content.pop("sha256", None)
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps({**content, "sha256": digest}))
    else:
        path.write_text(json.dumps(content))
        reseal(checkpoint)
    tried["checkpoint"] = tried.get("checkpoint", 0) + 1
    with rank_alone(), time_limit(), contextlib.suppress(CheckpointError):
        load_alone(folder / "forged")


COMMANDS = {
    fuzz_config: 250, fuzz_hostfile: 100, fuzz_report: 120, fuzz_prepare: 70, fuzz_plan: 60,
    fuzz_structure: 100, fuzz_run_files: 100, fuzz_checkpoint: 50, fuzz_other_sections: 100,
}  # fmt: skip
# What each changes: bytes of a text, or values of JSON.
STRATEGIES = dict.fromkeys((fuzz_structure, fuzz_run_files, fuzz_checkpoint, fuzz_other_sections), replacements)
names = [fuzz.__name__ for fuzz in COMMANDS]


def test_what_is_mutated_is_good(tmp_path: Path) -> None:
    """Else every input would be refused for the same reason."""
    (tmp_path / "run.json").write_text(CONFIG)
    for words in (["config", str(tmp_path / "run.json")], ["plan", str(tmp_path / "run.json"), "--world", "2"]):
        assert main(words) == 0
    for number, text in enumerate(OTHERS):
        (tmp_path / f"{number}.json").write_text(text)
        assert main(["config", str(tmp_path / f"{number}.json")]) == 0
        assert main(["launch", *ONE_HOST, str(tmp_path / f"{number}.json")]) == 0


def run_fuzz(fuzz: Any, folder: Path, count: int) -> None:
    """Try ``count`` inputs, always the same ones."""
    health = [HealthCheck.too_slow, HealthCheck.data_too_large]

    @settings(max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=health)
    @given(STRATEGIES.get(fuzz, edits))
    def attempt(changes: Any) -> None:
        fuzz(folder, changes)

    attempt()


@pytest.mark.parametrize(("fuzz", "count"), COMMANDS.items(), ids=names)
def test_mutated_inputs_are_refused_in_one_line(fuzz: Any, count: int, tmp_path: Path) -> None:
    run_fuzz(fuzz, tmp_path, count)
    print(f"inputs tried so far: {sum(tried.values())} {tried}")


@pytest.mark.slow
@pytest.mark.parametrize(("fuzz", "count"), COMMANDS.items(), ids=names)
def test_many_more_mutated_inputs(fuzz: Any, count: int, tmp_path: Path) -> None:
    run_fuzz(fuzz, tmp_path, 20 * count)
