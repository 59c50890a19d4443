"""The runs of a sweep of profiles: tasks, the cells of its tables, and the steps of each."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from ...engine.config.load import load_config
from ...engine.errors import ConfigError
from ...engine.placement.units import find_units
from ...models.registry import build_model
from ..plan.alternatives import largest_size
from ..plan.forecast import forecast
from ..plan.machine import Machine

GROUPS = 8
CAPACITIES = (0.25, 0.375, 0.5, 0.75)
NEURON_GROUPS = 4
DENSE, SMALLER = "dense", "smaller dense"
DROPOUT, STOCHASTIC_DEPTH = "dropout", "stochastic depth"
MATCHED = "FLOP-matched"
PROFILES = ("uniform", "linear", "depth")


@dataclass(frozen=True)
class Task:
    """A model that is small enough to be trained until its size matters, and what it learns.

    Attributes:
        engine: "vectorized" if the model allows it, else "reference".
        size: The key of the model's section that a smaller dense model lowers.
        full: The value of that key in the full model.
        rows: Sequences or images of a step, over all groups.
        equal_units: By granularity, the number of units if all cost the same. Such units are placed
            within every group's memory, with lists of holders. Others are placed by the groups'
            mean.
        controls: By the name of a dense control model, the keys that its section has in addition.
    """

    config: dict[str, Any]
    engine: str
    size: str
    full: int
    profiles: tuple[str, ...]
    equal_units: Mapping[str, int]
    rows: int
    controls: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_LLAMA = {
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 6e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WSD", "params": {"warmup_num_steps": 100, "total_num_steps": 1000, "decay_num_steps": 500}},
    "model": {
        "name": "llama", "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 64, "tie_word_embeddings": True,
    },
    "data": {"sequence_length": 64, "tokenizer": "bytes"},
    "training": {"steps": 1000, "evaluate_batches": 16},
}  # fmt: skip
_RESNET = {
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.05}},
    "scheduler": {"type": "WSD", "params": {"warmup_num_steps": 20, "total_num_steps": 300, "decay_num_steps": 200}},
    "model": {"name": "resnet18", "stem": "cifar", "width": 8},
    "data": {"name": "digits"},
    "training": {"steps": 300, "evaluate_batches": 12, "recalibrate_batches": 20},
}
_CONTROLS = {DROPOUT: {"attention_dropout": 0.1, "residual_dropout": 0.1}, STOCHASTIC_DEPTH: {"stochastic_depth": 0.5}}
TASKS = {
    "llama": Task(
        _LLAMA,
        "vectorized",
        "num_hidden_layers",
        8,
        PROFILES,
        {"block": 8, "neuron": 8 * 2 * NEURON_GROUPS},
        16,
        _CONTROLS,
    ),
    "resnet18": Task(_RESNET, "reference", "width", 8, ("uniform", "depth"), {}, 32),
}


@dataclass(frozen=True)
class Cell:
    """One run: of the dense model, of a control, of a smaller dense model, or of SDP with a
    profile.

    A ``matched`` run has as many operations as the dense model's run. Others have as many steps.
    ``rate`` is the optimizer's learning rate. None: that of the task.
    """

    task: str
    granularity: str  # "" for a dense model
    capacity: float
    profile: str
    seed: int
    matched: bool = False
    rate: float | None = None

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        rate = "" if self.rate is None else f"lr{self.rate}"
        parts = [self.task, self.granularity, f"{self.capacity:g}", self.profile.replace(" ", "_"), rate]
        return "-".join(filter(None, [*parts, f"seed{self.seed}", "matched" if self.matched else ""]))

    @property
    def label(self) -> str:
        """The name of the run's column or line."""
        return f"{self.profile}, {MATCHED}" if self.matched else self.profile

    def config(self, data: Path | None) -> dict[str, Any]:
        """Return the run's configuration as a user would write it."""
        task = TASKS[self.task]
        config = deepcopy(task.config)
        dense = self.granularity == ""
        if self.profile == SMALLER:
            config["model"][task.size] = smaller_size(self.task, self.capacity)
        config["model"] |= task.controls.get(self.profile, {})
        if self.rate is not None:
            config["optimizer"]["params"]["lr"] = self.rate
        groups = 1 if dense else GROUPS
        config["train_micro_batch_size_per_gpu"] = task.rows // groups
        config["steps_per_print"] = 10**6
        config["sdp"] = {"groups": groups, "engine": task.engine, "capacity": 1.0}
        if not dense:
            units = task.equal_units.get(self.granularity)
            profile = linear(units, self.capacity) if units and self.profile == "linear" else self.profile
            config["sdp"] |= {
                "capacity": self.capacity,
                "granularity": self.granularity,
                "profile": profile,
                "check_interval": 0,
            }
            config["sdp"] |= {"placement": "balanced" if units else "cyclic"}
            config["sdp"] |= {"neuron_groups": NEURON_GROUPS} if self.granularity == "neuron" else {}
        if data is not None:
            config["data"]["path"] = str(data)
        if self.matched:
            _stretch(config, matched_steps(replace(self, seed=0, matched=False, rate=None), data))
        config["training"] |= {"seed": self.seed, "evaluate_every": config["training"]["steps"], "save_every": 0}
        return config


def _stretch(config: dict[str, Any], steps: int) -> None:
    """Give the run ``steps`` steps, and its schedule the same shape over them."""
    before, schedule = config["training"]["steps"], config["scheduler"]["params"]
    config["training"]["steps"] = steps
    for key in ("warmup_num_steps", "total_num_steps", "decay_num_steps"):
        schedule[key] = round(schedule[key] * steps / before)


@functools.cache
def matched_steps(cell: Cell, data: Path | None) -> int:
    """Return the steps in which all groups of ``cell`` do as many operations as the dense model's
    run.
    """
    dense = Cell(cell.task, "", 1.0, DENSE, 0)
    return round(TASKS[cell.task].config["training"]["steps"] * operations(dense, data) / operations(cell, data))


@functools.cache
def operations(cell: Cell, data: Path | None) -> float:
    """Return the floating-point operations of one step of all groups.

    Every group's step is traced.
    """
    config = load_config(cell.config(data), ["sdp.engine=fsdp2"])
    groups = config.sdp.groups
    plan = forecast(cell.name, config, Machine((groups,), 1.0, 1.0, 1.0, 1.0), groups)
    traced = sum(len(group_kind.groups) for group_kind in plan.groups)
    assert traced == groups, f"{traced} of {groups} groups are traced"
    return sum(len(group_kind.groups) * group_kind.trace.flops for group_kind in plan.groups)


@functools.cache
def smaller_size(task: str, capacity: float) -> int:
    """Return the layers or width of the largest dense model that is no larger than a group.

    The group has this capacity, and size means the number of parameters.
    """
    chosen, ids = TASKS[task], {"vocab_size": 257} if task == "llama" else {"num_classes": 10, "image_size": 8}

    def built(size: int) -> nn.Module:
        return build_model({**chosen.config["model"], chosen.size: size}, **ids)

    def count(size: int) -> int:
        return sum(parameter.numel() for parameter in built(size).parameters())

    held = count(chosen.full) - (1 - capacity) * sum(unit.numel for unit in find_units(built(chosen.full), "auto"))
    size = largest_size(count, chosen.full, held)
    assert size is not None, f"no {chosen.size} of {task} is small enough"
    return size


def linear(units: int, capacity: float) -> list[int]:
    """Return numbers of holders that fall along a straight line, with the mean of ``capacity``.

    The line ends at one holder, or it begins at all groups.
    """
    mean = capacity * GROUPS
    first = min(float(GROUPS), 2 * mean - 1)
    last = 2 * mean - first
    ideal = [first + (last - first) * unit / (units - 1) for unit in range(units)]
    steps = [round(sum(ideal[: unit + 1])) for unit in range(units)]
    return [after - before for before, after in itertools.pairwise([0, *steps])]


@dataclass(frozen=True)
class Sweep:
    """What is compared. Raises :class:`ConfigError` for controls or profiles that the task lacks.

    With ``controls``, the dense model also runs with dropout and with stochastic depth. With
    ``matched``, SDP and the smaller model also run with as many operations as the dense model. With
    ``rates``, each column of a line runs with each of them and seed 0, and the other seeds have the
    best of them.
    """

    task: str
    granularities: Sequence[str]
    capacities: Sequence[float]
    seeds: int
    profiles: Sequence[str] = ()
    controls: bool = False
    matched: bool = False
    rates: Sequence[float] = ()

    def __post_init__(self) -> None:
        if self.controls and not TASKS[self.task].controls:
            raise ConfigError(
                f"--controls: {self.task} has no controls; choose another --task, or write a grid (sdp study grid)"
            )
        if unknown := [profile for profile in self.profiles if profile not in TASKS[self.task].profiles]:
            raise ConfigError(f"--profile {unknown[0]}: {self.task} has {', '.join(TASKS[self.task].profiles)}")

    @property
    def whole(self) -> list[str]:
        """The columns of models of full size."""
        return [DENSE, *(TASKS[self.task].controls if self.controls else ())]

    @property
    def parts(self) -> list[str]:
        """The columns of what a group has memory for."""
        return [SMALLER, *(self.profiles or TASKS[self.task].profiles)]

    @property
    def lengths(self) -> list[bool]:
        """The values of ``matched`` that runs have: False, and True if the user asked for it."""
        return [False, True] if self.matched else [False]

    def cell(self, granularity: str, capacity: float, profile: str, *, matched: bool = False) -> Cell:
        """Return the run of one column with seed 0 and the task's learning rate.

        All granularities share a dense model's run. A full-size one also serves all capacities and
        lengths.
        """
        if profile in self.whole:
            return Cell(self.task, "", 1.0, profile, 0)
        return Cell(self.task, "" if profile == SMALLER else granularity, capacity, profile, 0, matched)

    def cells(self) -> list[Cell]:
        """Return the run of every column of every line once, with seed 0 and the task's rate."""
        keys = itertools.product(self.lengths, [*self.whole, *self.parts], self.granularities, self.capacities)
        return list(
            dict.fromkeys(
                self.cell(granularity, capacity, profile, matched=matched)
                for matched, profile, granularity, capacity in keys
            )
        )

    def tried(self, cell: Cell) -> list[Cell]:
        """Return the run of ``cell`` with seed 0 and each learning rate."""
        return [replace(cell, rate=rate) for rate in self.rates or (None,)]

    def others(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the runs of ``cells`` with the other seeds.

        Seeds are outermost, so that an unfinished sweep has whole tables of fewer seeds.
        """
        return [replace(cell, seed=seed) for seed in range(1, self.seeds) for cell in cells]
