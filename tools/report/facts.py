"""Reads the figures of finished (or killed) runs, and finds a dense model to compare them with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from ...engine.errors import MOST_MESSAGE, shorten
from ...engine.optim.schedules import describe_rates
from ...engine.placement.placement import Placement
from ..runs.run_files import Run, describe_phases, phases_of
from ..shared.table import Spread

_SERVED = {"rounds": "round", "groups alive": "alive", "late deliveries": "late", "tokens skipped": "skipped_tokens"}
STATE_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "frozen": "frozen copies",  # for backward masking
    "outer": "anchors and outer state",  # for local steps
}  # in summary.json, and their names in a report
WARM_UP_STEPS = 3  # left out of medians: 1 allocates optimizer state, 2 is probed, 3 follows the probe


@dataclass(frozen=True)
class Facts:
    """The figures of one run, in bytes, seconds, tokens and nats per token.

    A figure that the run did not record is None or missing.

    - ``state``: the counted bytes of parameters, gradients and so on, and their sum "together".
    - ``peak_tensors``: the peak bytes of live tensors in a probed step.
    - ``peak_process``: the peak bytes of the process, less its bytes before the model existed.
    - ``sent`` and ``sent_by_kind``: the bytes that the busiest rank sends per step.
    - ``path_losses``: with several paths, the loss of each path on the samples assigned to it.
    - ``single_path_losses``: with several paths, the loss of each path on all samples.
    """

    name: str
    path: str
    device: str
    model: str | None
    layout: str
    capacity: float | None
    dense: bool
    steps: int
    planned_steps: int | None
    finished: bool
    tokens: int
    reads_images: bool  # an image counts as one token
    loss_before: float | None
    loss_after: float | None
    accuracy_after: float | None
    subnetworks_after: float | None
    after_prefix: float | None  # of the tokens that the router of several paths does not read
    tokens_per_second: float | None
    mfu: float | None
    flops_per_second: float | None  # of a device
    step_seconds: float | None
    state: dict[str, Spread] = field(default_factory=dict)
    state_deviation: float | None = None
    peak_tensors: Spread | None = None
    peak_process: Spread | None = None
    sent: float | None = None
    sent_by_kind: dict[str, float] = field(default_factory=dict)
    dense_state: dict[str, float] = field(default_factory=dict)
    data_parallel_sent: float | None = None
    spikes_skipped: int | None = None  # None if the run did not look for spikes
    rollbacks: int | None = None
    served: dict[str, str] = field(default_factory=dict)  # with a service: rounds, groups and what was lost
    restarts: int = 0
    lost_steps: int = 0  # repeated after a restart
    rates: str | None = None  # the factors of the units' learning rates, with sdp.lr_scale
    masking: str | None = None  # the steps of each phase, with a schedule of maskings
    phase_seconds: dict[str, float] = field(default_factory=dict)  # of a step with each masking of a schedule
    path_losses: list[float | None] = field(default_factory=list)
    single_path_losses: list[float | None] = field(default_factory=list)

    @property
    def sent_per_second(self) -> float | None:
        return self.sent / self.step_seconds if self.sent is not None and self.step_seconds else None


@dataclass(frozen=True)
class Baseline:
    """The dense model with which a report compares its runs.

    If every group holds every unit in one of the runs, ``run`` has the figures measured in that
    run. Otherwise ``run`` is None, and the figures are predictions.
    """

    run: Facts | None
    state: dict[str, float]
    sent: float | None

    @property
    def measured(self) -> bool:
        return self.run is not None

    @property
    def known(self) -> bool:
        return self.measured or bool(self.state) or self.sent is not None


def find_baseline(runs: Sequence[Facts]) -> Baseline:
    """Return the first dense run of several runs, with which a report compares the other runs.

    If there is no dense run, return the first prediction of the dense model that a run recorded.
    """
    dense = next((run for run in runs if run.dense), None) if len(runs) > 1 else None
    if dense is not None:
        return Baseline(dense, {part: spread.largest for part, spread in dense.state.items()}, dense.sent)
    state = next((run.dense_state for run in runs if run.dense_state), {})
    return Baseline(
        None, state, next((run.data_parallel_sent for run in runs if run.data_parallel_sent is not None), None)
    )


def facts_of_all(runs: Sequence[Run]) -> list[Facts]:
    """Read the figures of every run. Runs with the same name are named by their paths."""
    names = [run.name for run in runs]
    return [
        replace(facts_of(run), name=run.name if names.count(run.name) == 1 else shorten(run.path, MOST_MESSAGE))
        for run in runs
    ]


def facts_of(run: Run) -> Facts:
    """Collect the figures of one run from the content of its files."""
    summary = run.summary or {}
    placement = Placement.from_json(run.placement) if run.placement else None
    ranks: list[Mapping[str, Any]] = summary.get("ranks") or []
    settled = run.metrics[WARM_UP_STEPS:] or run.metrics
    last = run.metrics[-1] if run.metrics else {}
    busiest = max(ranks, key=lambda rank: _total(rank, "comm_bytes_per_step"), default={})
    dense_state: dict[str, float] = dict(summary.get("dense_state_bytes") or {})
    before, after = _evaluations(run)
    of_groups, paths = after.get("subnetwork_losses") or [], _paths(run)
    return Facts(
        name=run.name,
        path=str(run.path),
        device=str(summary.get("device", "cpu")),
        model=_model(run),
        layout=_layout(run),
        capacity=_capacity(placement),
        dense=_is_dense(run, placement),
        steps=last.get("step", summary.get("steps", 0)),
        planned_steps=_section(run, "training").get("steps"),
        finished=run.summary is not None,
        tokens=last.get("tokens", summary.get("tokens", 0)),
        reads_images=run.reads_images,
        loss_before=before.get("loss"),
        loss_after=after.get("loss"),
        accuracy_after=after.get("accuracy"),
        subnetworks_after=_mean(of_groups) if paths == 1 else None,
        after_prefix=after.get("loss_after_prefix"),
        tokens_per_second=summary.get("tokens_per_second") or _median(settled, "tokens_per_second"),
        mfu=_median(settled, "mfu"),
        flops_per_second=_median(settled, "flops_per_second"),
        step_seconds=_median(settled, "step_seconds"),
        state=_measured_state(ranks),
        state_deviation=_state_deviation(ranks),
        peak_tensors=Spread.of(rank.get("peak_tensor_bytes") for rank in ranks),
        peak_process=Spread.of(
            max(0, rank["peak_memory_bytes"] - rank["baseline_memory_bytes"])
            for rank in ranks
            if None not in (rank.get("peak_memory_bytes"), rank.get("baseline_memory_bytes"))
        ),
        sent=float(_total(busiest, "comm_bytes_per_step")) if busiest else _median(settled, "comm_bytes"),
        sent_by_kind=dict(busiest.get("comm_bytes_per_step") or last.get("comm_bytes_by_kind") or {}),
        dense_state=dense_state | ({"together": sum(dense_state.values())} if dense_state else {}),
        data_parallel_sent=summary.get("ddp_comm_bytes_per_step"),
        spikes_skipped=last.get("spikes_skipped"),
        rollbacks=last.get("rollbacks"),
        served=_served(run),
        restarts=len(run.restarts),
        lost_steps=sum(line.get("lost_steps", 0) for line in run.restarts),
        rates=_rates(run, placement),
        masking=describe_phases(phases_of(run.metrics)),
        phase_seconds=_phase_seconds(settled),
        path_losses=[_mean(of_groups[path::paths]) for path in range(paths)] if paths > 1 else [],
        single_path_losses=after.get("single_path_losses") or [],
    )


def _section(run: Run, name: str) -> dict[str, Any]:
    return run.config.get(name) or {}


def _model(run: Run) -> str | None:
    model = (run.summary or {}).get("model")
    return f"{model['name']}, {model['parameters'] / 1e6:,.1f} M" if model else _section(run, "model").get("name")


def _is_dense(run: Run, placement: Placement | None) -> bool:
    if placement is None:
        return _section(run, "sdp").get("capacity", 1.0) == 1.0
    return all(len(holders) == placement.groups for holders in placement.holders)


def _layout(run: Run) -> str:
    layout: Mapping[str, Any] = (run.summary or {}).get("layout") or {}
    degrees = {
        "sdp": layout.get("sdp", _section(run, "sdp").get("groups", 1)),
        "fsdp": layout.get("fsdp"),
        "tp": layout.get("tp", 1),
    }
    sizes = " × ".join(
        f"{axis} {degree}" for axis, degree in degrees.items() if degree and (degree > 1 or axis != "tp")
    )
    return f"{sizes}, {layout['paths']} paths" if layout.get("paths", 1) > 1 else sizes


def _paths(run: Run) -> int:
    return (_section(run, "sdp").get("paths") or {}).get("count", 1)


def _capacity(placement: Placement | None) -> float | None:
    """Average over the groups the fraction of the units' parameters that a group holds."""
    if placement is None or not sum(placement.costs):
        return None
    return fmean(placement.held_fraction(group) for group in range(placement.groups))


def _rates(run: Run, placement: Placement | None) -> str | None:
    if placement is None:
        return None
    setting = _section(run, "sdp").get("lr_scale", "none")
    rates = describe_rates(setting, _section(run, "optimizer").get("type", ""), placement)
    return re.sub(r" \(\d+ holders?\)", "", rates) if rates else None  # a column is narrow


def _evaluations(run: Run) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the evaluation before training and the newest one after it. A missing one is empty."""
    before = next((line for line in run.evaluations if line["step"] == 0), {})
    after = next((line for line in reversed(run.evaluations) if line["step"] > 0), {})
    held_out = (run.summary or {}).get("held_out") or {}
    before = before or ({"loss": held_out["before"]} if held_out.get("before") is not None else {})
    after = after or ({"loss": held_out["after"]} if held_out.get("after") is not None else {})
    return before, after


def _median(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [line[key] for line in lines if line.get(key) is not None]
    return float(median(values)) if values else None


def _phase_seconds(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    by_masking = {name: [line for line in lines if line.get("masking") == name] for name in ("backward", "forward")}
    found = {masking: _median(of_phase, "step_seconds") for masking, of_phase in by_masking.items()}
    return {masking: seconds for masking, seconds in found.items() if seconds is not None}


def _served(run: Run) -> dict[str, str]:
    """Describe the rounds of a run with a service, and those of each group by medians."""
    lines = [line for line in run.metrics if "by_group" in line]
    if not lines:
        return {}
    last, groups = lines[-1], sorted({group for line in lines for group in line["by_group"]})
    found = {name: f"{last.get(key, 0):,}" for name, key in _SERVED.items()}
    for group in groups:
        rounds = [line["by_group"][group] for line in lines if group in line["by_group"]]
        size, seconds = (_median(rounds, key) or 0.0 for key in ("bytes", "seconds"))
        found[f"a round of group {group}"] = f"{size / 1e6:.2f} MB, {seconds:.2f} s"
    orphans = (f"{shorten(unit)} since average {since}" for unit, since in (last.get("orphans") or {}).items())
    if text := ", ".join(orphans):
        found["units without a living holder"] = text
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    """Average the values, or return None if one is missing.

    A loss that was NaN or infinite is missing, because JSON has null for it.
    """
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _total(rank: Mapping[str, Any], key: str) -> int:
    return sum((rank.get(key) or {}).values())


def _measured_state(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Spread]:
    states = [{part: rank["state_measured"].get(part, 0) for part in STATE_PARTS} for rank in ranks]
    spreads = {part: Spread.of(state[part] for state in states) for part in STATE_PARTS}
    spreads["together"] = Spread.of(sum(state.values()) for state in states)
    return {
        part: spread
        for part, spread in spreads.items()
        if spread is not None and (part not in ("frozen", "outer") or spread.largest)
    }


def _state_deviation(ranks: Sequence[Mapping[str, Any]]) -> float | None:
    """Find the largest relative difference of counted and predicted bytes, over ranks and parts."""
    pairs = [
        (rank["state_measured"].get(part, 0), rank["state_predicted"].get(part, 0))
        for rank in ranks
        for part in STATE_PARTS
    ]
    deviations = [measured / predicted - 1 if predicted else float(bool(measured)) for measured, predicted in pairs]
    return max(deviations, key=abs, default=None)
