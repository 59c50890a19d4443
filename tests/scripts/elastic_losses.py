"""Kills groups of one elastic run, again and again, and measures what each loss costs.

Run it with ``python -m sdp.tests.scripts.elastic_losses --kills 100 --hangs 10 --out losses.json``.
It prints a table. The groups are forked, so a return takes no time for imports.

``--stuck 10`` adds main threads that hang while the other threads of the process run.

A kill comes every five seconds, but never before the last victim is back. Holders are compared bit
for bit after each step, and a difference would end the run. Then the same training runs without a
loss, on as many samples, with several seeds. The first one is the seed of the run with losses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import signal
import statistics
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from sdp.engine.backends.fsdp2.backend import FSDP2Backend
from sdp.tests.support.clusters.elastic_runs import MICRO, SECONDS, ElasticRun, elastic_config
from sdp.tests.support.processes import until, written_lines
from sdp.tests.support.small_runs import make_corpus
from sdp.tools.train.loop.meter import StepMeter

GROUPS = 4
SAVE_EVERY = 100  # steps
PAUSE_SECONDS = 5.0  # from one loss to the next
SLEEP_SECONDS = 0.1  # of a step
END_SECONDS = 60.0  # of the run after the last loss, or less if losses took longer
TAIL_BYTES = 1 << 16
# A rank is killed, is stopped by SIGSTOP, or its main thread hangs in the backward pass.
KILL, STOP, STUCK = "kill", "stop", "stuck"


def newest(run: ElasticRun, after: int) -> list[dict[str, Any]]:
    """Return the newest lines of metrics.jsonl with steps after ``after``."""
    with (run.dump_dir / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        whole = file.read().split(b"\n")[1:-1]
    return [line for line in map(json.loads, whole) if line["step"] > after]


def lose(run: ElasticRun, group: int, kind: str) -> float:
    """Kill, stop or block a rank of a group, and wait until the group is back.

    Returns:
        The seconds until the others have committed a step without it.
    """
    last, ranks = run.wait_for(1, GROUPS)[-1], run.ranks()[group]
    step, generation = last["step"], last["generation"]

    def lines() -> list[dict[str, Any]]:
        assert run.process.poll() is None, run.said
        return newest(run, step)

    began = time.monotonic()
    if kind == STUCK:
        sign = sign_of(run.dump_dir, group)
        sign.touch()
        began = until(lambda: not sign.exists() and time.monotonic(), seconds=SECONDS, pause=0.001)
    else:
        os.kill(ranks[0], signal.SIGKILL if kind == KILL else signal.SIGSTOP)
    # With local steps, the group may be back before a round ended without it.
    goes_on = lambda: any(line["generation"] > generation for line in lines())  # noqa: E731
    try:
        until(goes_on, seconds=SECONDS, pause=0.002)
    except AssertionError as error:
        raise AssertionError(f"{error}; the run says:\n{run.said}") from None
    took = time.monotonic() - began
    if kind == STOP:
        os.kill(ranks[0], signal.SIGCONT)  # it notices, and ends
    step = lines()[-1]["step"]
    until(lambda: any(line["groups"] == GROUPS for line in lines()), seconds=SECONDS, pause=0.05)
    return took


def sign_of(dump_dir: Path, group: int) -> Path:
    """Return the file that makes a rank of the group hang."""
    return dump_dir.with_suffix(f".{group}")


def prepare_ranks(dump_dir: Path, seconds: float, end: Path) -> None:
    """Let the ranks of this process hang when they are told to, and each step take at least so many
    seconds, as with a larger model, until the file ``end`` exists.
    """
    begin, backward = StepMeter.begin, FSDP2Backend.backward

    def begins(self: StepMeter) -> None:
        begin(self)
        if not end.exists():
            time.sleep(seconds)

    def goes_back(self: FSDP2Backend, *args: Any, **keywords: Any) -> None:
        sign = sign_of(dump_dir, int(os.environ["SDP_ELASTIC_GROUP"]))
        if sign.exists():
            sign.unlink()
            threading.Event().wait()
        backward(self, *args, **keywords)

    StepMeter.begin = begins  # type: ignore[method-assign]
    FSDP2Backend.backward = goes_back  # type: ignore[method-assign]


def measure(
    config: Path, dump_dir: Path, *, kills: int, hangs: int, stuck: int = 0, seed: int = 0, sleep: float = SLEEP_SECONDS
) -> dict[str, Any]:
    """Run the groups, lose some of them so often, let the run end, and return what was measured.

    Each step sleeps until all losses are over. So the number of steps says how long that takes at
    most, and the run ends soon afterwards.
    """
    heartbeat = json.loads(config.read_text())["sdp"]["elastic"]["heartbeat_seconds"]
    longest = kills * PAUSE_SECONDS + (hangs + stuck) * (heartbeat + PAUSE_SECONDS) + END_SECONDS
    steps = math.ceil(longest / sleep / SAVE_EVERY) * SAVE_EVERY
    end = dump_dir.with_suffix(".end")
    prepare = partial(prepare_ranks, dump_dir, sleep, end)
    run = ElasticRun(config, dump_dir, "--set", f"training.steps={steps}", prepare=prepare)
    draws = random.Random(seed)
    took: dict[str, list[float]] = {KILL: [], STOP: [], STUCK: []}
    started = time.monotonic()
    try:
        run.wait_for(10, GROUPS)
        for kind in [KILL] * kills + [STOP] * hangs + [STUCK] * stuck:
            began = time.monotonic()
            took[kind].append(lose(run, draws.randrange(GROUPS), kind))
            time.sleep(max(0.0, PAUSE_SECONDS - (time.monotonic() - began)))
        last = run.wait_for(1, GROUPS)[-1]
        end.touch()
        code = run.process.wait(20 * longest)
    finally:
        run.kill()
    lines, said = run.lines(), run.said
    joined = len(re.findall(r"^sdp: group .* joined after step ", said, re.MULTILINE))
    went_on = re.findall(r"^sdp: group .* was lost after .* went on after ([\d.]+) s", said, re.MULTILINE)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "a step is missing, or there twice"
    # With local steps, those groups count that are alive when the round ends.
    every = json.loads(config.read_text())["sdp"].get("sync", {"every": 1})["every"]
    counting = {(line["step"] - 1) // every: line["groups"] for line in lines}
    samples, learned = lines[-1]["samples"], sum(MICRO * counting[(line["step"] - 1) // every] for line in lines)
    skipped = lines[-1].get("skipped_samples", 0)  # of unfinished rounds, with local steps
    assert samples - skipped == learned, "a sample is missing, or there twice"
    evaluations = map(json.loads, (run.dump_dir / "evaluations.jsonl").read_text().splitlines())
    evaluated = [line for line in evaluations if line["groups"] == GROUPS][-1]  # so they read equal held-out samples
    seconds = [line["step_seconds"] for line in lines if line["step"] <= last["step"]]
    return {
        "exit_code": code,
        "seconds": round(time.monotonic() - started, 1),
        "kills": kills,
        "hangs": hangs,
        "stuck": stuck,
        "steps": len(lines),
        "last_loss_before_step": last["step"],
        "generations": last["generation"],
        # If a generation does not end because a group joins, its last attempt may not be committed.
        "share_committed": last["step"] / (last["step"] + last["generation"] - 1 - joined),
        "share_of_samples": learned / samples,
        "lost": len(went_on),
        "joined": joined,
        "step_seconds": statistics.median(seconds),
        "kill_to_next_step_seconds": took[KILL],
        "stop_to_next_step_seconds": took[STOP],
        "stuck_to_next_step_seconds": took[STUCK],
        "loss_to_next_step_seconds": [float(seconds) for seconds in went_on],
        "ready_to_next_step_seconds": [float(each) for each in re.findall(r"([\d.]+) s after \w+ \w+ ready", said)],
        "held_out_loss": evaluated["loss"],
        "held_out_samples": next(line["samples"] for line in lines if line["step"] == evaluated["step"]),
        "loss": lines[-1]["loss"],
        "load_average": os.getloadavg()[1],
    }


def measure_undisturbed(config: Path, folder: Path, samples: int, seeds: int) -> dict[str, Any]:
    """Train without elastic groups and without a loss on ``samples``, with each of the seeds.

    These runs neither compare holders nor save, because that takes two thirds of their time.
    """
    steps, losses = round(samples / (MICRO * GROUPS)), []
    same = {"sdp.elastic.enabled": "false", "sdp.check_interval": 0, "training.save_every": 0}
    for seed in range(seeds):
        settings = {**same, "training.steps": steps, "training.seed": seed}
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        run = ElasticRun(config, folder / f"undisturbed-{seed}", "--nproc", str(GROUPS), *words)
        try:
            assert run.process.wait(3600) == 0, run.said
        finally:
            run.kill()
        lines = (run.dump_dir / "evaluations.jsonl").read_text().splitlines()
        losses.append(json.loads(lines[-1])["loss"])
    return {"undisturbed_steps": steps, "undisturbed_held_out_losses": losses}


def measure_restarts(config: Path, dump_dir: Path, times: int) -> dict[str, Any]:
    """Kill a rank of a run without elastic groups, and start the run again from its checkpoint.

    This is what FSDP does: a lost rank ends all. Launchers and ranks are new interpreters.
    """
    words = ["--nproc", str(GROUPS), "--set", "sdp.elastic.enabled=false"]
    seconds: list[float] = []
    lost: list[int] = []

    def wait_for(first: int, last: int = 10**9) -> int:
        """Wait until the newest step is one of these, and return it."""

        def step() -> int | None:
            lines = written_lines(dump_dir / "metrics.jsonl")
            newest = lines[-1]["step"] if lines else 0
            return newest if first <= newest <= last else None

        return until(step, seconds=SECONDS, pause=0.005)

    run = ElasticRun(config, dump_dir, *words, new_interpreters=True)
    try:
        for _ in range(times):
            saved = wait_for(SAVE_EVERY * (len(lost) + 1)) // SAVE_EVERY * SAVE_EVERY
            wait_for(saved + SAVE_EVERY // 3)
            began = time.monotonic()
            os.kill(_ranks_of(run.process.pid)[-1], signal.SIGKILL)
            run.end()
            at = run.lines()[-1]["step"]
            run = ElasticRun(config, dump_dir, *words, "--resume", new_interpreters=True)
            wait_for(0, saved)  # the lines after the checkpoint are removed
            wait_for(saved + 1)
            seconds.append(time.monotonic() - began)
            lost.append(at - saved)
        run.stop()
    finally:
        run.kill()
    return {"restart_to_next_step_seconds": seconds, "steps_made_again": lost}


def _ranks_of(launcher: int) -> list[int]:
    """Return the process ids of a launcher's ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == launcher and b"LOCAL_RANK=" in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


def table(found: dict[str, Any], heartbeat: float) -> str:
    """Return the results as a table in Markdown."""
    step = found["step_seconds"]

    def median(key: str, less: float = 0.0) -> str:
        values = found[key]
        return f"{statistics.median(values) - less:.2f}" if values else "–"

    rows = {
        "kills, SIGSTOP, main threads that hang": f"{found['kills']}, {found['hangs']}, {found['stuck']}",
        "exit code": found["exit_code"],
        "committed steps": f"{found['steps']:,}",
        "of them up to the last loss": f"{found['last_loss_before_step']:,}",
        "share of the steps attempted until then": f"{found['share_committed']:.2%}",
        "share of the samples that counts": f"{found['share_of_samples']:.2%}",
        "s of a step, median": f"{step:.3f}",
        "s from a kill to the next step, median": median("kill_to_next_step_seconds"),
        "the same without the repeated step": median("kill_to_next_step_seconds", step),
        "s from SIGSTOP to the next step, less heartbeat and step, median": median(
            "stop_to_next_step_seconds", heartbeat + step
        ),
        "s from a hang of a main thread to the next step, less heartbeat and step, median": median(
            "stuck_to_next_step_seconds", heartbeat + step
        ),
        "s from a returning group's being ready to its first step, median": median("ready_to_next_step_seconds"),
        "load average of the machine": f"{found['load_average']:.1f}",
    }
    if losses := found.get("undisturbed_held_out_losses"):
        rows[f"held-out loss after {found['held_out_samples']:,} samples"] = f"{found['held_out_loss']:.4f}"
        rows["without losses, same samples, by seed"] = ", ".join(f"{loss:.4f}" for loss in losses)
    return "\n".join(["| measured | value |", "|---|---:|", *(f"| {name} | {value} |" for name, value in rows.items())])


def write_config(folder: Path, corpus: Path, heartbeat: float, every: int = 0) -> Path:
    """Write the configuration of the run, with local steps if ``every`` is above 0.

    The budget of restarts is per half minute.
    """
    config = elastic_config(corpus, groups=GROUPS, restarts=20, restart_window=30, heartbeat_seconds=heartbeat)
    config["training"] |= {"evaluate_every": SAVE_EVERY, "save_every": SAVE_EVERY}
    if every:
        config["sdp"]["sync"] = {"every": every}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def main() -> None:
    """Measure, print the table and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--hangs", type=int, default=10, help="how often a group is stopped (SIGSTOP)")
    parser.add_argument("--stuck", type=int, default=0, help="how often a main thread hangs in the backward pass")
    parser.add_argument("--heartbeat", type=float, default=5.0)
    parser.add_argument("--every", type=int, default=0, help="the steps of a round, 0 for no local steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sleep", type=float, default=SLEEP_SECONDS, help="the seconds that each step sleeps")
    parser.add_argument("--undisturbed", type=int, default=3, help="the seeds of the runs without losses")
    parser.add_argument(
        "--restarts", type=int, default=0, help="measure only this many restarts of a run without elastic groups"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        config = write_config(Path(name), make_corpus(Path(name)), options.heartbeat, options.every)
        if options.restarts:
            restarts = json.dumps(measure_restarts(config, Path(name) / "run", options.restarts))
            options.out.write_text(restarts + "\n")
            print(restarts)
            return
        losses = {"kills": options.kills, "hangs": options.hangs, "stuck": options.stuck}
        found = measure(config, Path(name) / "run", **losses, seed=options.seed, sleep=options.sleep)
        log = (Path(name) / "run" / "logs" / "groups.log").read_text()
        if options.undisturbed:
            found |= measure_undisturbed(config, Path(name), found["held_out_samples"], options.undisturbed)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    options.out.with_suffix(".log").write_text(log)
    print(table(found, options.heartbeat))


if __name__ == "__main__":
    main()
