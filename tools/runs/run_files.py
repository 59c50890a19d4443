"""The files of a run. Rank 0 writes them while it trains, and other commands read them."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...data.files import INDEX_FILE
from ...engine.config.schema import Config
from ...engine.errors import ConfigError, DataError, WriteError, quote, shorten
from ...engine.files import refuse_link, require_own_file, write_whole
from ...engine.json_files import parse_json, read_json_file
from ...engine.object_store import Store, fetch, inside
from ...engine.placement.placement import Placement
from ...launcher.restarts import LOCK

log = logging.getLogger("sdp")

CONFIG, PLACEMENT, SUMMARY = "config.json", "placement.json", "summary.json"
METRICS, EVALUATIONS, RESTARTS = "metrics.jsonl", "evaluations.jsonl", "restarts.jsonl"
MOST_LINE_BYTES = 16 << 20  # far above every line that a run writes
CORPUS = "corpus"  # data that the run itself prepared
SENT = (CONFIG, PLACEMENT, SUMMARY, METRICS, EVALUATIONS, RESTARTS)  # to the copy of a run in an object store
DIRECTORIES = ("checkpoints", "logs", "plots", "profile", "start", "tensorboard", "wandb")
PLOT = "plots/loss.png"


class RunFiles:
    """Writes the files of a run to ``dump_dir``, which is made if it is missing.

    A killed run loses at most the line being written, because every line is written at once. NaN
    and Inf are written as null, because JSON has neither. The directory is locked against a second
    run until :meth:`close`. A copy of the run at ``url`` in an object store has no lock, so two
    hosts must not resume it at the same time.

    Raises ConfigError if there is a run and ``resume`` is false, if another run is writing, or if
    the directory cannot be written. Raises WriteError if one of the run's files is a symbolic link.
    """

    def __init__(self, dump_dir: Path, resume: bool, url: str | None = None):
        self.dump_dir = dump_dir
        self._open: dict[str, TextIO] = {}
        for name in (LOCK, CONFIG, PLACEMENT, SUMMARY, METRICS, EVALUATIONS, RESTARTS):
            require_own_file(dump_dir / name)
        for name in DIRECTORIES:
            refuse_link(dump_dir / name)
        require_no_other_run(dump_dir, url, resume=resume)
        try:
            dump_dir.mkdir(parents=True, exist_ok=True)
            self._lock = (dump_dir / LOCK).open("a")
        except OSError as error:
            raise ConfigError(f"--dump-dir {dump_dir}: cannot be written ({error.strerror})") from None
        _lock(self._lock, dump_dir)
        if not resume:
            for name in (METRICS, EVALUATIONS, RESTARTS, SUMMARY):  # left by a run that ended before its first step
                (dump_dir / name).unlink(missing_ok=True)

    def write_config(self, config: Config | Mapping[str, Any]) -> None:
        self._replace(CONFIG, config.resolved() if isinstance(config, Config) else config)

    def write_placement(self, placement: Placement) -> None:
        """Write placement.json: which group holds which unit, and what the placement guarantees."""
        self._replace(PLACEMENT, {**placement.to_json(), "guarantees": placement.guarantees()})

    def step(self, line: Mapping[str, Any]) -> None:
        """Write the line of an optimizer step to metrics.jsonl. ``line["step"]`` counts from 1."""
        self._append(METRICS, line)

    def evaluation(self, line: Mapping[str, Any]) -> None:
        """Write a line to evaluations.jsonl. ``line["step"]`` is 0 before training."""
        self._append(EVALUATIONS, line)

    def summary(self, data: Mapping[str, Any]) -> None:
        """Write summary.json, at the end of the run."""
        self._replace(SUMMARY, data)

    def restart(self, step: int) -> None:
        """Write to restarts.jsonl that the run continues from ``step`` and repeats later steps."""
        last = max((line["step"] for line in _read_lines(self.dump_dir / METRICS)), default=0)
        if last:
            self._append(RESTARTS, {"step": step, "lost_steps": max(0, last - step)})

    def truncate_after(self, step: int, outer_step: float = math.inf) -> None:
        """Remove the summary and the lines after ``step``, which a resumed run writes again.

        In a service, ``outer_step`` counts averages. Lines of later averages are removed, too.
        """
        self._close_lines()
        for name in (METRICS, EVALUATIONS):
            require_own_file(self.dump_dir / name)
            if (self.dump_dir / name).exists():
                kept = [
                    line
                    for line in _read_lines(self.dump_dir / name)
                    if line["step"] <= step and line.get("outer_step", 0) <= outer_step
                ]
                write_whole(self.dump_dir / name, "".join(f"{json.dumps(line)}\n" for line in kept))
        (self.dump_dir / SUMMARY).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files and release the lock of the directory."""
        self._close_lines()
        self._lock.close()

    def _close_lines(self) -> None:
        for file in self._open.values():
            with contextlib.suppress(OSError):  # a line that could not be written was reported before
                file.close()
        self._open.clear()

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        path = self.dump_dir / name
        if name not in self._open:
            require_own_file(path)
        try:
            # Line-buffered. Opened at the first line, so that a run that fails before it leaves no
            # empty file.
            if name not in self._open:
                self._open[name] = path.open("a", buffering=1, encoding="utf-8")
            file = self._open[name]
            if os.fstat(file.fileno()).st_nlink == 0:
                raise WriteError(f"{path}: was removed while the run was writing to it")
            file.write(json.dumps(_finite(line), allow_nan=False) + "\n")
        except OSError as error:
            raise WriteError.of(path, error) from None

    def _replace(self, name: str, data: Mapping[str, Any]) -> None:
        text = json.dumps(_finite(data), indent=2, allow_nan=False) + "\n"
        require_own_file(self.dump_dir / name)
        try:
            write_whole(self.dump_dir / name, text)
        except OSError as error:
            raise WriteError.of(self.dump_dir / name, error) from None


# -- the fields that commands depend on, and their types -------------------------------------------
#
# A run may come from somebody else, or from another version. So only the keys that are read are
# checked, and unknown keys are allowed.

_MOST = 1e18  # far above every figure of a run, and small enough for sums and products of figures

Number = Annotated[float, Field(ge=-_MOST, le=_MOST)] | None
Count = Annotated[int, Field(ge=0, lt=2**63)]
Numbers = dict[str, Annotated[float, Field(ge=-_MOST, le=_MOST)]] | None


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class Line(_Shape):
    """The keys that commands read in a line of metrics, evaluations or restarts (``*.jsonl``)."""

    step: Count
    tokens: Count = 0
    loss: Number = None
    accuracy: Number = None
    subnetwork_losses: list[Number] | None = None
    tokens_per_second: Number = None
    mfu: Number = None
    flops_per_second: Number = None
    step_seconds: Number = None
    comm_bytes: Number = None
    comm_bytes_by_kind: Numbers = None
    spikes_skipped: Count | None = None
    rollbacks: Count | None = None
    lost_steps: Count = 0
    round: Count = 0
    alive: Count = 0
    late: Count = 0
    skipped_tokens: Count = 0
    by_group: dict[str, Numbers] | None = None
    orphans: dict[str, Count] | None = None


class _Named(_Shape):
    name: str | None = None


class _NamedModel(_Shape):
    name: str
    parameters: Count


class _Groups(_Shape):
    groups: Count = 1
    lr_scale: Literal["none", "auto"] | Annotated[float, Field(ge=0, le=4)] = "none"


class _Optimizer(_Shape):
    type: str = ""


class _Training(_Shape):
    steps: Count | None = None


class RunConfig(_Shape):
    """The keys of config.json that a report reads. Other commands read the whole file."""

    model: _Named | None = None
    sdp: _Groups | None = None
    data: _Named | None = None
    optimizer: _Optimizer | None = None
    training: _Training | None = None


class SavedPlacement(_Shape):
    """The keys of placement.json, which says which group holds which unit."""

    groups: Annotated[int, Field(ge=1, le=2**20)]
    units: list[str]
    holders: list[list[Count]]
    costs: list[Count]
    flops: list[Count] = []

    @model_validator(mode="after")
    def _check_lengths(self) -> SavedPlacement:
        lengths = {len(self.units), len(self.holders), len(self.costs), len(self.flops) or len(self.units)}
        if len(lengths) > 1:
            raise ValueError("units, holders, costs and flops have different lengths")
        if any(not held or max(held) >= self.groups for held in self.holders):
            raise ValueError("a unit has no holder, or a holder that is not a group")
        return self


class _Layout(_Shape):
    sdp: Count = 1
    fsdp: Count | None = None
    tp: Count = 1
    paths: Count = 1


class _HeldOut(_Shape):
    before: Number = None
    after: Number = None


class _Rank(_Shape):
    state_measured: dict[str, Count]
    state_predicted: dict[str, Count]
    peak_memory_bytes: Number = None
    baseline_memory_bytes: Number = None
    peak_tensor_bytes: Number = None
    comm_bytes_per_step: Numbers = None


class Summary(_Shape):
    """The keys of summary.json that a report reads."""

    steps: Count = 0
    tokens: Count = 0
    tokens_per_second: Number = None
    model: _NamedModel | None = None
    layout: _Layout | None = None
    held_out: _HeldOut | None = None
    device: str = "cpu"
    dense_state_bytes: Numbers = None
    ddp_comm_bytes_per_step: Number = None
    ranks: list[_Rank] | None = None


def find_wrong_field(shape: type[BaseModel], data: Mapping[str, Any]) -> str | None:
    """Describe the first value in ``data`` that does not fit the pydantic model, or return None."""
    try:
        shape.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        return f"{quote(where)}: {first['msg']}" if where else first["msg"]
    return None


# -- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What the files of a run say. If a file does not exist, its attribute is None or empty."""

    path: Path
    config: dict[str, Any]
    placement: dict[str, Any] | None
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    restarts: list[dict[str, Any]]
    summary: dict[str, Any] | None

    @property
    def name(self) -> str:
        """The name of the run's directory, as printable text."""
        return shorten(self.path.resolve().name)

    @property
    def reads_images(self) -> bool:
        """Whether the run trained on images. If so, ``tokens`` in its files counts images."""
        return (self.config.get("data") or {}).get("name") is not None


def read_run(dump_dir: Path) -> Run:
    """Read the files of the run in ``dump_dir``. A last line that a kill cut off is left out.

    Raises ConfigError if the directory does not hold a run, and DataError if a file is damaged.
    """
    if not (dump_dir / CONFIG).is_file():
        found = "no such directory" if not dump_dir.is_dir() else f"no {CONFIG} in it"
        raise ConfigError(f"{dump_dir}: not the directory of a run ({found}); give the --dump-dir of sdp train")
    if is_model(dump_dir):
        raise ConfigError(
            f"{dump_dir}: a model in the format of Hugging Face, not a run; give the --dump-dir of sdp train, which "
            f"starts from this model with --init-from {dump_dir}"
        )
    return Run(
        path=dump_dir,
        config=_read_object(dump_dir / CONFIG, RunConfig) or {},
        placement=_read_object(dump_dir / PLACEMENT, SavedPlacement),
        metrics=_read_lines(dump_dir / METRICS),
        evaluations=_read_lines(dump_dir / EVALUATIONS),
        restarts=_read_lines(dump_dir / RESTARTS),
        summary=_read_object(dump_dir / SUMMARY, Summary),
    )


def fetch_files(url: str, dump_dir: Path, *, of_run: bool = True, goes_on: bool = False) -> None:
    """Copy the files of a run from its copy at ``url`` in an object store to ``dump_dir``.

    With ``of_run`` false, only the data that the run has prepared is copied. With ``goes_on``,
    newer lines on this host are kept, because the store may not have them yet. Raises StoreError.
    """
    fetch(f"{url}/{CORPUS}", INDEX_FILE, dump_dir / CORPUS)
    store = Store(url)
    for name, size in store.sizes().items() if of_run else ():
        file = inside(dump_dir, name)
        if (name in SENT or name.startswith("start/")) and not (
            goes_on and file.suffix == ".jsonl" and file.is_file() and file.stat().st_size >= size
        ):
            store.get(name, file, size)


def is_model(directory: Path) -> bool:
    """Whether ``directory`` is a Hugging Face model and not a run, according to its config.json."""
    try:
        found = read_json_file(directory / CONFIG)
    except (OSError, ValueError):
        return False  # the reader of the file says what is wrong
    return isinstance(found, dict) and "model_type" in found


def _lock(file: TextIO, dump_dir: Path) -> None:
    """Hold the lock until ``file`` is closed or the process ends.

    Raises ConfigError if another process holds it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{dump_dir}: another run is writing here; wait until it ends, or name another --dump-dir"
        ) from None
    except OSError as error:
        log.warning(
            "%s: its file system has no locks (%s), so make sure that no second run writes to it",
            dump_dir,
            error.strerror,
        )


def require_no_other_run(dump_dir: Path, url: str | None = None, *, resume: bool) -> None:
    """Raise ConfigError if ``dump_dir`` or ``url`` holds a run, unless that run is resumed."""
    if url is not None and not resume and Store(url).read(CONFIG) is not None:
        raise ConfigError(f"{url} already holds a run; pass --resume to continue it or name another --dump-dir")
    try:
        metrics = dump_dir / METRICS
        holds_run = metrics.is_file() and metrics.stat().st_size > 0
        holds_run |= any((dump_dir / "checkpoints").glob("step-*"))
    except OSError as error:
        raise ConfigError(
            f"--dump-dir {shorten(dump_dir)}: cannot be used ({error.strerror}); choose another folder"
        ) from None
    if not resume and holds_run:
        raise ConfigError(f"{dump_dir} already holds a run; pass --resume to continue it or name another --dump-dir")


def _read_object(path: Path, shape: type[BaseModel]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        data = read_json_file(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); the file is damaged") from None
    if not isinstance(data, dict):
        raise DataError(f"{path}: a JSON object is expected, not {type(data).__name__}; the file is damaged")
    if (wrong := find_wrong_field(shape, data)) is not None:
        raise DataError(f"{path}: damaged, or of another version: {wrong}")
    return data


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file.

    A damaged last line is left out, because a kill may leave one. Other damage is an error.
    """
    if not path.is_file():
        return []
    objects: list[dict[str, Any]] = []
    damage: DataError | None = None
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(MOST_LINE_BYTES + 1)
                if line and damage is not None:  # the damaged line was not the last one
                    raise damage
                if not line:
                    break
                try:
                    objects.append(_parse_line(line))
                except ValueError as error:
                    damage = DataError(f"{path}:{number}: not a line of a run ({error}); remove this line")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    return objects


def _parse_line(line: bytes) -> dict[str, Any]:
    if len(line) > MOST_LINE_BYTES:
        raise ValueError(f"it is longer than {MOST_LINE_BYTES >> 20} MiB")
    entry = parse_json(line.decode())
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
        raise ValueError("it is not a JSON object with the key step")
    if (wrong := find_wrong_field(Line, entry)) is not None:
        raise ValueError(wrong)
    return entry


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_finite(entry) for entry in value]
    return value


# -- the phases of a run with a schedule of maskings -----------------------------------------------


@dataclass(frozen=True)
class Phase:
    """Consecutive steps with one masking, from step ``first`` to step ``last``.

    ``tokens`` is the number of tokens that the run had read before the phase.
    """

    masking: str
    first: int
    last: int
    tokens: int


def phases_of(metrics: Iterable[Mapping[str, Any]]) -> list[Phase]:
    """Return the phases of a masking schedule, from metrics.jsonl. Empty without a schedule."""
    phases: list[Phase] = []
    tokens = 0
    for line in metrics:
        masking, step = line.get("masking"), line["step"]
        if masking is not None:
            if phases and phases[-1].masking == masking:
                phases[-1] = Phase(masking, phases[-1].first, step, phases[-1].tokens)
            else:
                phases.append(Phase(masking, step, step, tokens))
        tokens = line.get("tokens", tokens)
    return phases


def describe_phases(phases: Iterable[Phase]) -> str | None:
    """Return a text that says which steps each phase has, or None if there are no phases."""
    return ", then ".join(f"{phase.masking} {phase.first:,}–{phase.last:,}" for phase in phases) or None
