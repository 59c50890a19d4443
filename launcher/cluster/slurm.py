"""SLURM: writes and submits the batch script of a run, and reads the state of its job.

The run's directory gets a folder ``slurm`` with these files:

- ``job.sh``: the batch script.
- ``events``: a line for each event: seconds since the epoch, the job's id, and a word such as
  ``running``.
- ``job-ID-rank-R.log``: the output of each rank.
- ``job-ID-srun.log``: the messages of srun about the ranks.
- ``job-ID.log``: the output of the batch script.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ...engine.errors import LaunchError, quote
from ...engine.files import refuse_link
from .commands import Start, train_command

FOLDER, SCRIPT, EVENTS = "slurm", "job.sh", "events"

# The value of an option is not quoted in a script. These characters are enough for a partition, a
# constraint (a100&nvlink) or a time (1-12:00:00).
_VALUE = re.compile(r"[A-Za-z0-9_.,:=@+/\[\]()&|*!-]+")
_EVENT = re.compile(r"\d{1,18} \d{1,18} (submitted|running|requeued|time-limit-near|told-to-end|lost|ended \d+)")
_STOPPED = 143  # 128 + SIGTERM: sdp train wrote its checkpoint


def script(options: Namespace, start: Start, dump_dir: Path) -> str:
    """Return the batch script of a run, for the arguments of ``sdp launch``.

    Raises :class:`LaunchError` for a value that SLURM could read as several options, and for a
    directory whose name SLURM would change.
    """
    folder = dump_dir / FOLDER
    if re.search(r'[%\\"\n]', str(folder)):
        raise LaunchError(
            f"--dump-dir {quote(str(dump_dir))}: SLURM replaces % and \\ in the names of log files; choose a name "
            "without them"
        )
    asked = {
        "job-name": re.sub(r"[^A-Za-z0-9_.-]", "_", dump_dir.name),
        "nodes": str(options.nodes or 1),
        "ntasks-per-node": str(options.gpus_per_node),
    }
    asked |= {} if options.cpu else {"gpus-per-node": str(options.gpus_per_node)}
    asked |= {**options.sbatch, "signal": f"B:USR1@{options.signal_seconds}", "open-mode": "append"}
    for name, value in asked.items():
        if not _VALUE.fullmatch(value):
            raise LaunchError(
                f"--{name} {quote(value)}: cannot be a value for SLURM; letters, digits and _.,:=@+/[]()&|*!- are "
                "allowed"
            )
    for word in start.extra:
        if not word.startswith("-") or not _VALUE.fullmatch(word):
            raise LaunchError(f"--launcher-args {quote(word)}: give options of sbatch in the form --name=value")
    lines = [f"#SBATCH --{name}={value}" for name, value in asked.items()]
    lines += [
        "#SBATCH --requeue",
        f'#SBATCH --output="{folder}/job-%j.log"',
        *(f"#SBATCH {word}" for word in start.extra),
    ]
    return _TEMPLATE.format(
        options="\n".join(lines),
        directory=shlex.quote(str(start.directory)),
        exports="".join(f"export {name}={shlex.quote(value)}\n" for name, value in start.search_path.items()),
        events=shlex.quote(str(folder / EVENTS)),
        folder=shlex.quote(str(folder)),
        srun=shlex.join([*_srun(options, start, folder), *train_command(start)]),
        stopped=_STOPPED,
        restarts=options.restarts,
    )


def _srun(options: Namespace, start: Start, folder: Path) -> list[str]:
    words = ["srun", "--kill-on-bad-exit=1", "--open-mode=append", f"--output={folder}/job-%j-rank-%t.log"]
    if options.container is not None:
        mounts = ",".join(filter(None, [f"{start.directory}:{start.directory}", options.container_mounts]))
        words += [
            f"--container-image={options.container}",
            f"--container-mounts={mounts}",
            f"--container-workdir={start.directory}",
        ]
    return words


def submit(text: str, dump_dir: Path) -> str:
    """Write the batch script ``text`` to ``dump_dir``, submit it with ``sbatch``, and return the
    job's id.

    Raises :class:`LaunchError` if the script cannot be written, or if ``sbatch`` refuses it.
    """
    folder = dump_dir / FOLDER
    for path in (folder, folder / SCRIPT, folder / EVENTS):
        refuse_link(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SCRIPT).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{folder}: cannot be written ({error.strerror}); choose another --dump-dir") from None
    answer = subprocess.run(["sbatch", "--parsable", str(folder / SCRIPT)], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise LaunchError(f"sbatch refused {folder / SCRIPT}: {answer.stderr.strip()}")
    job = answer.stdout.strip().partition(";")[0]
    with (folder / EVENTS).open("a", encoding="utf-8") as events:
        events.write(f"{int(time.time())} {job} submitted\n")
    return job


def status(dump_dir: Path) -> str:
    """Return the state of the last job of ``dump_dir``, such as ``job 7: running``.

    The states are pending, running, done, out of memory, timeout, cancelled and failed. SLURM gives
    the state, if it still knows the job. Otherwise the file ``events`` of the run gives it. A
    failed job counts as out of memory if its logs say so.

    Raises :class:`LaunchError` if no job was submitted for ``dump_dir``.
    """
    lines = _read_regular(dump_dir / FOLDER / EVENTS).splitlines()
    noted = [line.split() for line in lines if _EVENT.fullmatch(line)]  # the last may be incomplete
    if not noted:
        raise LaunchError(f"--status {dump_dir}: no job was submitted for this directory; give a job's --dump-dir")
    job = max((words[1] for words in noted), key=int)
    # The job may write "running" before the process that called sbatch writes "submitted".
    events = [words[2:] for words in noted if words[1] == job and words[2] != "submitted"]
    state = _STATES.get(_asked(job)) or _by_events(events)
    logs = (dump_dir / FOLDER).glob(f"job-{job}[.-]*log")
    if state == "failed" and any(_OUT_OF_MEMORY.search(_read_regular(log)) for log in logs):
        state = "out of memory"
    code = events[-1][1] if events and events[-1][0] == "ended" and state != "done" else None
    return f"job {job}: {state}" + (f", exit code {code}" if code else "")


def _read_regular(path: Path) -> str:
    """Return the text in ``path``, or nothing if it cannot be read. A FIFO would wait forever."""
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except (OSError, ValueError):  # a NUL in the name raises ValueError
        return ""


def _asked(job: str) -> str:
    """Return the state of a job in SLURM's words. Empty if SLURM does not know the job.

    The accounting is asked first, then the controller, which knows a job only for some minutes
    after its end.
    """
    for command, pattern in (
        (["sacct", "-j", job, "-n", "-P", "-o", "State"], r"(?m)^([A-Z_]+)"),
        (["scontrol", "show", "job", "-o", job], r"JobState=([A-Z_]+)"),
    ):
        if shutil.which(command[0]) is None:
            continue
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and (states := re.findall(pattern, answer.stdout)):
            # The job's state comes first, then the states of its steps. For a job whose ranks ran
            # out of memory, sacct says FAILED.
            return "OUT_OF_MEMORY" if states[0] == "FAILED" and "OUT_OF_MEMORY" in states else states[0]
    return ""


def _by_events(events: Sequence[Sequence[str]]) -> str:
    words = [event[0] for event in events]
    if not words or words[-1] == "requeued":
        return "pending"
    words = " ".join(words).rpartition("running")[2].split()  # since the last start
    if events[-1][:2] == ["ended", "0"]:
        return "done"
    if "time-limit-near" in words:
        return "timeout"
    if "told-to-end" in words:
        return "cancelled"
    return "failed" if "ended" in words else "running"


# Messages of torch and of SLURM. SLURM has one if it uses cgroups and one if it samples memory.
_OUT_OF_MEMORY = re.compile(r"out of memory|oom[-_ ]kill|exceeded (job |step )?memory limit", re.IGNORECASE)
_STATES = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "CONFIGURING"), "pending"),
    **dict.fromkeys(("RUNNING", "COMPLETING"), "running"),
    "COMPLETED": "done",
    "OUT_OF_MEMORY": "out of memory",
    **dict.fromkeys(("TIMEOUT", "DEADLINE"), "timeout"),
    "CANCELLED": "cancelled",
    **dict.fromkeys(("FAILED", "NODE_FAIL", "BOOT_FAIL", "PREEMPTED"), "failed"),
}

_TEMPLATE = """\
#!/bin/bash
{options}
# Written by sdp launch. Near the time limit the run writes a checkpoint, and the job goes back to
# the queue. When the job starts again, the run resumes. The same happens after a node failure.
cd {directory} || exit 1
{exports}export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}"
# Since SLURM 22.05, srun reads only SRUN_CPUS_PER_TASK. sbatch sets SLURM_CPUS_PER_TASK only if
# --cpus-per-task was given.
if [ -n "${{SLURM_CPUS_PER_TASK:-}}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi
# This function starts no program, because SLURM may be ending everything that the job starts.
note() {{ printf '%(%s)T %s %s\n' -1 "$SLURM_JOB_ID" "$*" >> {events}; }}

resume=()
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ]; then resume=(--resume); fi
out_of_time= told=
trap 'out_of_time=1; note time-limit-near; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
# SIGTERM comes from scancel or a preemption. Every task gets it too and writes its checkpoint. This
# script waits for the tasks.
trap 'told=1; note told-to-end' TERM

note running
said={folder}/job-$SLURM_JOB_ID-srun.log
{srun} "${{resume[@]}}" 2> "$said" &
srun=$!
while wait "$srun"; code=$?; kill -0 "$srun" 2> /dev/null; do :; done  # a trap interrupts wait
# srun returns the highest exit code. That is often the code of a task that srun killed after another
# task had failed. The first line that srun wrote is about the task that failed first.
first=$(grep -m 1 -E '^srun: error: [^ ]+: tasks? ' "$said")
if [[ "$first" =~ "Exited with exit code "([0-9]+) ]]; then code="${{BASH_REMATCH[1]}}"; fi
if [[ "$first" =~ ": "(Killed|Out Of Memory)$ ]]; then code=137; fi

requeues=
if [ -n "$out_of_time" ]; then
    [ "$code" -ne {stopped} ] || requeues=1
elif [ -z "$told" ] && [ "$code" -ne 0 ] && [ "$code" -ne 2 ]; then
    [ "$(grep -c " $SLURM_JOB_ID lost$" {events})" -ge {restarts} ] || {{ note lost; requeues=1; }}
fi
if [ -n "$requeues" ]; then
    note requeued
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
note ended "$code"
exit "$code"
"""
