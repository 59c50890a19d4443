"""Smaller dense models that ``sdp advise`` compares with SDP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...engine.accounting.quantities import format_bytes
from ...engine.config.schema import Config
from ...engine.config.sync import SyncSection
from ...engine.errors import SDPError
from ..plan.alternatives import SIZE_KEYS, alternatives, dense_config, largest_dense, smaller_dense
from ..plan.forecast import forecast
from ..plan.machine import Machine
from ..plan.result import Forecast
from .candidate import Candidate, mean_capacity, with_sdp

LARGEST_THAT_FITS, LARGEST_AT_PEAK, SMALLER = "largest dense that fits", "largest dense at SDP's peak", "smaller dense"
DENSE = (LARGEST_THAT_FITS, LARGEST_AT_PEAK, SMALLER)
DILOCO = "DiLoCo"


class SmallerModels:
    """Plans dense models with fewer layers or channels than that of a configuration.

    Args:
        config: the run, with SDP groups.
        machine: where it runs.
        world: number of ranks.
        sync: the local steps that DiLoCo makes.
        memory: bytes of a device. None if memory does not matter.
    """

    def __init__(
        self, config: Config, machine: Machine, world: int, sync: SyncSection, memory: float | None = None
    ) -> None:
        self.config, self.machine, self.world, self.sync, self.memory = config, machine, world, sync, memory
        self._plans: dict[str, Forecast] = {}  # in replicas, by model and local steps
        self.notes: list[str] = []  # a line for each model that cannot be planned, or that needs a word

    def planned(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Plan the models that are compared with the candidates ``found``."""
        full = next((one.parameters for one in found if one.method == "dense"), None)
        if full is None:
            return []
        smaller = list(self._of_equal_state(found, full))
        least = max((one.parameters for one in smaller), default=0)
        return [*smaller, *self._largest(found, full, least)]

    def _of_equal_state(self, found: Sequence[Candidate], full: int) -> Iterator[Candidate]:
        """The largest model that has no more parameters than an SDP group."""
        held = next((one.plans[0][1].layout for one in found if one.method == "forward"), None)
        if held is not None:
            most = max(sum(info.numel for info in held.held(group)) for group in range(held.mesh.sdp))
        else:
            most = int(mean_capacity(self.config) * full)
        small = smaller_dense(self.config, most)
        if small is None:
            self.notes.append(f"{SMALLER}: no size of this model is known that has at most {most:,} parameters")
            return
        if small.model == self.config.model:
            self.notes.append(f"{SMALLER}: a group holds the whole model")
            return
        plans, notes = alternatives(with_sdp(small), self.machine, self.world)
        if plans:
            fitting = [plan for plan in plans if self.memory is None or plan.worst.trace.peak <= self.memory]
            best = (
                min(fitting, key=lambda plan: plan.seconds)
                if fitting
                else min(plans, key=lambda plan: plan.worst.trace.peak)
            )
            yield self._candidate(SMALLER, 1, best, self._capacity(best, full), best.name)
        else:
            self.notes += [f"{SMALLER}, {note}" for note in notes]
        if self.config.sdp.groups == 1:
            return
        try:
            plan = self._replicas(small, self.sync)
            yield self._candidate(f"{SMALLER}, {DILOCO}", self.sync.every, plan, self._capacity(plan, full))
        except SDPError as error:
            self.notes.append(f"{SMALLER}, {DILOCO}: {error}")

    def _largest(self, found: Sequence[Candidate], full: int, least: int) -> Iterator[Candidate]:
        """The largest models that fit, or whose peak is at most that of backward masking. They are
        smaller than the full one and have more than ``least`` parameters.
        """
        if self.config.sdp.groups == 1 or str(self.config.model.get("name")) not in SIZE_KEYS:
            return
        peaks = {one.every > 1: one.peak for one in found if one.method == "backward"}
        name = LARGEST_AT_PEAK if self.memory is None else LARGEST_THAT_FITS
        for sync in (None, self.sync):
            room = self.memory if self.memory is not None else peaks.get(sync is not None)
            if room is None:
                continue
            title = name if sync is None else f"{name}, {DILOCO}"
            try:
                plan = self._largest_within(room, sync)
            except SDPError as error:
                self.notes.append(f"{title}: {error}")
                continue
            if plan is None and self.memory is not None and sync is None:
                self.notes.append(
                    "No dense model of this kind fits in replicas, however small; share each replica among more ranks "
                    "(a lower sdp.groups, and zero_optimization.stage 3)"
                )
            elif plan is not None and least < plan.parameters < full:
                self.notes.append(
                    f"{title}: {plan.parameters:,} of {full:,} parameters (peak "
                    f"{format_bytes(plan.worst.trace.peak)}), in as many replicas as there are groups"
                )
                yield self._candidate(title, 1 if sync is None else sync.every, plan, plan.parameters / full)

    def _capacity(self, small: Forecast, full: int) -> float:
        """The part of the model that a group holds. If groups differ, that of the smaller model."""
        capacity = self.config.sdp.capacity
        return small.parameters / full if isinstance(capacity, list) else capacity

    def _largest_within(self, room: float, sync: SyncSection | None) -> Forecast | None:
        sized = largest_dense(self.config, lambda sized: self._replicas(sized, sync).worst.trace.peak, room)
        return None if sized is None else self._replicas(sized, sync)

    def _replicas(self, config: Config, sync: SyncSection | None) -> Forecast:
        """Plan a dense model in as many replicas as the configuration has groups."""
        key = repr((config.model, sync))
        if key not in self._plans:
            replicas = dense_config(config, self.config.sdp.groups, self.config.zero_optimization.stage)
            self._plans[key] = forecast(SMALLER, with_sdp(replicas, sync=sync), self.machine, self.world)
        return self._plans[key]

    def _candidate(self, name: str, every: int, plan: Forecast, capacity: float, layout: str = "") -> Candidate:
        groups = self.config.sdp.groups
        plans = ((1.0, replace(plan, name=name)),)
        return Candidate(name, "smaller dense", every, groups, capacity, plans, layout)
