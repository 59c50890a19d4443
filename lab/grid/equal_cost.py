"""Compares the rows of a grid at equal operations, and at equal seconds over a link.

The columns of such a grid are lengths of training, each with a schedule of its own. A row whose
steps cost less can make more steps for the same cost. This number of steps lies between two of the
lengths that were trained. So the loss is interpolated over the logarithm of the steps, for the mean
and for each seed. Nothing is extrapolated.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from sdp.engine.config.load import load_config
from sdp.engine.config.method import Masking, MaskingSchedule
from sdp.engine.config.section import Section
from sdp.tools.plan.forecast import Forecast, forecast
from sdp.tools.plan.machine import Machine
from sdp.tools.shared.quantities import quantity

OPERATIONS = "operations"

_Cells = Sequence[Mapping[str, Any]]  # figures of the lengths of one row, shortest first


class EqualCost(Section):
    """The section ``equal_cost`` of a grid: at which costs its rows are compared.

    Attributes:
        reference: The row whose cost all other rows may have.
        device: The operations per second that every device reaches, such as "400TFLOP/s".
        links: The speeds of every device's link, such as "1Gbit/s".
    """

    reference: str
    device: str
    links: Annotated[list[str], Field(min_length=1)]

    def machines(self, groups: int) -> dict[str, Machine]:
        """Return for each speed of links a machine with one device for each group.

        Raises ConfigError for a text that is not a speed.
        """
        rate = quantity(self.device, "FLOP/s", "equal_cost.device")
        speeds = {link: quantity(link, "B/s", "equal_cost.links") for link in self.links}
        return {link: Machine((1,) * groups, rate, 1.0, speed, speed) for link, speed in speeds.items()}


def step_costs(config: Mapping[str, Any], wanted: EqualCost) -> dict[str, float]:
    """Return what a step costs: operations of all groups, and seconds over each link.

    Costs are planned for the engine "fsdp2". If the masking changes during the run, they are means
    over the run's steps.
    """
    planned = load_config(config, ["sdp.engine=fsdp2"])
    groups = planned.sdp.groups
    machines = wanted.machines(groups)
    costs: dict[str, float] = {}
    for masking, share in _phases(planned.sdp.masking, planned.training.steps):
        plans = {link: forecast(link, planned, machine, groups, masking=masking) for link, machine in machines.items()}
        of_phase = {link: plan.seconds for link, plan in plans.items()}
        of_phase[OPERATIONS] = _operations(next(iter(plans.values())), groups)
        for measure, cost in of_phase.items():
            costs[measure] = costs.get(measure, 0.0) + share * cost
    return costs


def _operations(plan: Forecast, groups: int) -> float:
    """Operations of a step of all groups. Groups that were not traced count as the mean of the
    others.
    """
    traced = [(len({*one.groups} - {*plan.untraced}), one.trace.flops) for one in plan.groups]
    return sum(count * flops for count, flops in traced) * groups / sum(count for count, _ in traced)


def _phases(setting: Any, steps: int | None) -> list[tuple[Masking, float]]:
    """The maskings of a run, each with its part of the steps."""
    schedule = MaskingSchedule.of(setting, steps)
    if steps is None or not schedule.ends:
        return [(schedule.maskings[0], 1.0)]
    ends = [0, *schedule.ends, steps]
    return [
        (masking, (end - start) / steps)
        for masking, (start, end) in zip(schedule.maskings, itertools.pairwise(ends), strict=True)
    ]


def loss_after(cells: _Cells, steps: float) -> tuple[float, float | None] | None:
    """Return the mean loss after ``steps`` steps, interpolated, and the deviation over the seeds.

    The result is None if ``steps`` is below the shortest length or above the longest. The deviation
    is None if fewer than two seeds have both neighbouring lengths.
    """
    for cell in cells:
        if math.isclose(steps, cell["steps"]):
            return cell["mean"], _spread([loss for loss in cell["by_seed"] if loss is not None])
    for before, after in itertools.pairwise(cells):
        if before["steps"] < steps < after["steps"]:
            part = math.log(steps / before["steps"]) / math.log(after["steps"] / before["steps"])
            pairs = zip(before["by_seed"], after["by_seed"], strict=True)
            losses = [_between(*pair, part) for pair in pairs if None not in pair]
            return _between(before["mean"], after["mean"], part), _spread(losses)
    return None


def _between(first: float, last: float, part: float) -> float:
    """What lies at ``part`` of the way. It is infinite if an end is: that run diverged."""
    return first + part * (last - first) if math.isfinite(first) and math.isfinite(last) else math.inf


def _spread(losses: Sequence[float]) -> float | None:
    """The sample deviation. None with fewer than two losses, or with one that is infinite."""
    return statistics.stdev(losses) if len(losses) > 1 and all(map(math.isfinite, losses)) else None


@dataclass(frozen=True)
class Comparison:
    """The loss that one row would have at the cost of one column of the reference.

    Attributes:
        measure: "operations", or the speed of a link.
        column: The column of the reference.
        row: The row.
        steps: The number of steps that this row makes for this cost.
        loss: The row's mean loss after these steps. None outside of the lengths that were trained.
        spread: The sample deviation over the seeds. None for one seed, or without a loss.
    """

    measure: str
    column: str
    row: str
    steps: float
    loss: float | None
    spread: float | None


def compare(
    found: Sequence[Mapping[str, Any]], costs: Mapping[str, Mapping[str, float]], wanted: EqualCost
) -> list[Comparison]:
    """Compare all rows at the costs of the reference row.

    ``found`` has the figures of cells, and ``costs`` for each row what :func:`step_costs` returns.
    """
    cells: dict[str, list[Mapping[str, Any]]] = {}
    for cell in sorted(found, key=lambda cell: cell["steps"]):
        cells.setdefault(cell["row"], []).append(cell)
    compared = []
    for measure in (OPERATIONS, *wanted.links):
        for cell in found:
            if cell["row"] != wanted.reference:
                continue
            for row, own in cells.items():
                steps = cell["steps"] * costs[wanted.reference][measure] / costs[row][measure]
                loss, spread = loss_after(own, steps) or (None, None)
                compared.append(Comparison(measure, cell["column"], row, steps, loss, spread))
    return compared


def comparison_tables(compared: Sequence[Comparison], wanted: EqualCost) -> str:
    """Write the comparisons as Markdown, with a table for each measure."""
    texts = []
    for measure in (OPERATIONS, *wanted.links):
        own = [one for one in compared if one.measure == measure]
        columns = list(dict.fromkeys(one.column for one in own))
        rows = list(dict.fromkeys(one.row for one in own))
        cells = {(one.row, one.column): _text(one) for one in own}
        what = "operations" if measure == OPERATIONS else f"seconds over {measure}"
        lines = [
            f"At equal {what} (those of {wanted.reference}); the steps that were possible",
            "",
            f"| | {' | '.join(columns)} |",
            "|---" * (len(columns) + 1) + "|",
            *(f"| {row} | {' | '.join(cells[row, column] for column in columns)} |" for row in rows),
        ]
        texts.append("\n".join(lines))
    return "\n\n".join(texts)


def _text(one: Comparison) -> str:
    if one.loss is None:
        return f"not trained so long ({one.steps:,.0f})"
    spread = "" if one.spread is None else f" ± {one.spread:.4f}"
    return f"{one.loss:.4f}{spread} ({one.steps:,.0f})"
