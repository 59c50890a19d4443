"""SLURM: the batch script of a run, and what its own files and ``sacct`` tell about it.

Beside the run's files stand ``slurm/job.sh``, ``slurm/events`` (a line for each event: seconds since the epoch, job id, word) and
``slurm/rank-R.log``, what each task printed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..engine.errors import LaunchError
from .commands import Start, train_command

FOLDER, SCRIPT, EVENTS = "slurm", "job.sh", "events"

# An option's value in a script stands unquoted: what a partition, a constraint (a100&nvlink) or a time (1-12:00:00) is made of.
_VALUE = re.compile(r"[A-Za-z0-9_.,:=@+/\[\]()&|*!-]+")
_STOPPED = 143  # 128 + SIGTERM: sdp train wrote its checkpoint


@dataclass(frozen=True)
class Job:
    """What is asked of SLURM. ``per_node``: ranks, and GPUs unless ``on_cpu``; ``options``: sbatch's, by name.

    ``signal_seconds``: how long before the time limit the run is told to write a checkpoint.
    """

    name: str
    nodes: int
    per_node: int
    on_cpu: bool
    options: Mapping[str, str]
    signal_seconds: int
    container: str | None = None
    container_mounts: str | None = None


def script(job: Job, start: Start, dump_dir: Path) -> str:
    """The batch script. Raises :class:`LaunchError` for values that SLURM could read as anything else than one value."""
    folder = dump_dir / FOLDER
    if re.search(r'[%\\"\n]', str(folder)):
        raise LaunchError(f"--dump-dir {str(dump_dir)!r}: SLURM replaces % and \\ in the names of log files; choose a name without them")
    asked = {"job-name": re.sub(r"[^A-Za-z0-9_.-]", "_", job.name), "nodes": str(job.nodes), "ntasks-per-node": str(job.per_node)}
    asked |= {} if job.on_cpu else {"gpus-per-node": str(job.per_node)}
    asked |= {**job.options, "signal": f"B:USR1@{job.signal_seconds}", "open-mode": "append"}
    for name, value in asked.items():
        if not _VALUE.fullmatch(value):
            raise LaunchError(f"--{name} {value!r}: not a value that SLURM could know; letters, digits and _.,:=@+/[]()&|*!- are allowed")
    lines = [f"#SBATCH --{name}={value}" for name, value in asked.items()]
    lines += ["#SBATCH --requeue", f'#SBATCH --output="{folder}/job.log"', *(f"#SBATCH {word}" for word in _checked_extra(start.extra))]
    return _TEMPLATE.format(
        options="\n".join(lines),
        directory=shlex.quote(str(start.directory)),
        exports="".join(f"export {name}={shlex.quote(value)}\n" for name, value in start.search_path.items()),
        events=shlex.quote(str(folder / EVENTS)),
        srun=shlex.join([*_srun(job, start, folder), *train_command(start)]),
        stopped=_STOPPED,
    )


def _srun(job: Job, start: Start, folder: Path) -> list[str]:
    words = ["srun", "--kill-on-bad-exit=1", "--open-mode=append", f"--output={folder}/rank-%t.log"]
    if job.container is not None:
        mounts = ",".join(filter(None, [f"{start.directory}:{start.directory}", job.container_mounts]))
        words += [f"--container-image={job.container}", f"--container-mounts={mounts}", f"--container-workdir={start.directory}"]
    return words


def _checked_extra(words: Sequence[str]) -> Sequence[str]:
    for word in words:
        if not word.startswith("-") or not _VALUE.fullmatch(word):
            raise LaunchError(f"--launcher-args {word!r}: for slurm, options of sbatch in the form --name=value")
    return words


_TEMPLATE = """\
#!/bin/bash
{options}
# Written by sdp launch. Near the time limit the run writes a checkpoint and the job goes back to the queue; it resumes there, as it does
# after a node failed.
cd {directory} || exit 1
{exports}export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}"
note() {{ echo "$(date +%s) $SLURM_JOB_ID $*" >> {events}; }}

resume=()
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ]; then resume=(--resume); fi
out_of_time=
trap 'out_of_time=1; note time-limit-near; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

note running
{srun} "${{resume[@]}}" &
srun=$!
while wait "$srun"; code=$?; kill -0 "$srun" 2> /dev/null; do :; done  # the trap interrupts wait

if [ -n "$out_of_time" ] && [ "$code" -eq {stopped} ]; then
    note requeued
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
note ended "$code"
exit "$code"
"""
