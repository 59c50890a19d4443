"""Training runs as plain data. The oracle runs one in this process, stores on ranks."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.config.load import load_config
from sdp.engine.construct import values_to_give
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.placement.layout import Layout
from sdp.engine.placement.tensor_info import Shard
from sdp.engine.placement.units import find_neuron_units
from sdp.engine.subnetwork.initialisation import WeightFiles
from sdp.engine.subnetwork.materialise import give_values
from sdp.tests.support import models
from sdp.tests.support.oracle import Oracle
from torch.distributed.tensor import DTensor

ROWS = 2  # per micro-batch
STEPS = 3


@dataclass(frozen=True)
class Case:
    """Everything that a run depends on."""

    groups: int = 2
    fsdp: int = 1
    stage: int = 0
    accumulation: int = 1
    clip: bool = False
    optimizer: Literal["sgd", "momentum", "adamw", "int8", "bfloat16"] = "sgd"
    placement: Literal["mixed", "cyclic", "profile", "full", "balanced", "random", "contiguous", "alone"] = "mixed"
    model: str = "mlp"
    bf16: bool = False
    checkpointing: Literal["none", "full", "selective"] = "none"
    steps: int = STEPS
    tp: int = 1
    masking: str = "forward"  # or a schedule, as JSON
    neurons: int = 0  # the number of groups into which a branch is cut; 0 means that units are blocks
    branch_scale: Literal["none", "train", "eval"] = "none"
    sync: str = ""  # local steps: the section as JSON
    lr_scale: str = "none"  # rates by holders: as JSON, or "auto"
    paths: str = ""  # the number of paths, and the indices of the blocks of which each has its own: "2: 1 3"
    copies: str = ""  # frozen copies: the section as JSON

    @property
    def data_ranks(self) -> int:
        return self.groups * self.fsdp

    @property
    def world(self) -> int:
        return self.data_ranks * self.tp

    def __str__(self) -> str:
        layout = f"{self.groups}x{self.fsdp}" + f"x{self.tp}" * (self.tp > 1)
        parts = [layout, f"zero{self.stage}", f"acc{self.accumulation}", self.optimizer, self.placement, self.model]
        parts += ["clip"] * self.clip + ["bf16"] * self.bf16 + [self.checkpointing] * (self.checkpointing != "none")
        parts += ["backward"] * (self.masking == "backward") + [f"neurons{self.neurons}"] * (self.neurons > 0)
        parts += [f"scale-{self.branch_scale}"] * (self.branch_scale != "none")
        parts += [f"rates-{self.lr_scale}"] * (self.lr_scale != "none")
        parts += [re.sub(r"[^\w.]+", "-", section).strip("-") for section in (self.sync, self.copies) if section]
        parts += ["paths-" + re.sub(r"\W+", "-", self.paths).strip("-")] * bool(self.paths)
        return "-".join(parts)

    def config(self, engine: str = "fsdp2", **sections: Any) -> dict[str, Any]:
        """Return the configuration as a user writes it."""
        # Larger rates, or a smaller eps, amplify round-off: one unit in the last place of the
        # weights becomes 1e-4.
        peak = {"sgd": 0.3 if self.model.startswith("mlp") else 0.15, "momentum": 0.1}.get(self.optimizer, 0.03)
        optimizers = {
            "sgd": {"type": "SGD", "params": {"lr": 0.1}},
            "momentum": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            # The eps is large, because Adam would turn round-off of a near-zero gradient into full
            # steps.
            "adamw": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-2}},
        }
        return {
            "train_batch_size": ROWS * self.accumulation * self.data_ranks,
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": CLIP if self.clip else 0.0,
            "optimizer": optimizers.get(self.optimizer, self._with_small_state(optimizers["adamw"])),
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": peak / 3, "warmup_max_lr": peak,
                "warmup_num_steps": 3, "warmup_type": "linear"}},
            "bf16": {"enabled": self.bf16},
            "zero_optimization": zero_of(self.stage) if engine == "deepspeed" else {"stage": self.stage},
            "tensor_parallel": {"autotp_size": self.tp},
            "activation_checkpointing": {"mode": self.checkpointing},
            "sdp": {"groups": self.groups, "engine": engine,
                "masking": self.masking if self.masking.isalpha() else json.loads(self.masking),
                "branch_scale": self.branch_scale, **self._placement(), **self._neurons(),
                **({"sync": json.loads(self.sync)} if self.sync else {}),
                **({"paths": self._paths()} if self.paths else {}),
                **({"copies": json.loads(self.copies)} if self.copies else {}),
                "lr_scale": self.lr_scale if self.lr_scale in ("none", "auto") else json.loads(self.lr_scale)},
            **sections,
        }  # fmt: skip

    def _with_small_state(self, section: dict[str, Any]) -> dict[str, Any]:
        return section | {"params": section["params"] | {"state_dtype": self.optimizer}}

    def _neurons(self) -> dict[str, Any]:
        if not self.neurons:
            return {}
        section: dict[str, Any] = {"granularity": "neuron", "neuron_groups": self.neurons}
        if self.placement == "profile" and self.groups > 1:
            section |= {"profile": "depth", "capacity": 0.75}
        if self.placement == "random":
            section |= {"profile": "depth", "capacity": 0.5}
        if self.placement == "mixed" and self.groups > 1:  # the last group holds nothing of the first branch
            units = [unit.name for unit in find_neuron_units(models.build(self.model), self.neurons)]
            holders = {2: [[0], [0], [0, 1], [1], [0, 1]], 4: [[0, 1, 2], [0, 2], [3, 1, 0], [3], [1, 2, 3, 0]]}[
                self.groups
            ]
            section["placement"] = {name: holders[index % len(holders)] for index, name in enumerate(units)}
        return section

    def _paths(self) -> dict[str, Any]:
        count, _, own = self.paths.partition(":")
        names = [f"{'model.' if 'llama' in self.model else ''}{name}" for name in models.unit_names(self.model)]
        return {"count": int(count), "own": [names[int(index)] for index in own.split()]}

    def _placement(self) -> dict[str, Any]:
        if self.placement == "full" or self.groups == 1 or self.paths:
            return {"capacity": 1.0}
        if self.placement == "cyclic":
            return {"capacity": 0.5, "profile": "uniform"}
        if self.placement == "profile":
            return {"profile": [4, 2, 1, 1] if self.groups == 4 else [2, 2, 1, 1]}
        if self.placement == "balanced":
            return {"placement": "balanced", "capacity": [0.75, 0.5] if self.groups == 2 else [0.75, 0.75, 0.5, 0.25]}
        if self.placement == "contiguous":
            return {"placement": "contiguous", "capacity": 0.5 if self.groups == 2 else 0.4}
        if self.placement == "random":
            return {"placement": "random", "seed": 3, "profile": [1, 2, 2, 1] if self.groups == 2 else [1, 3, 2, 4]}
        holders = {2: [[0], [0, 1], [0, 1], [1], [1]], 4: [[0, 1, 2, 3], [0, 2], [3, 1, 0], [3], [1, 2]]}[self.groups]
        return {"placement": dict(zip(models.unit_names(self.model), holders, strict=False))}


def zero_of(stage: int) -> dict[str, Any]:
    """Return DeepSpeed's section. ZeRO 3 would keep a small model whole by default."""
    return {"stage": 3, "stage3_param_persistence_threshold": 0} if stage == 3 else {"stage": stage}


RELATIVE = 1e-5
EPSILON = 2.0**-23
CLIP = 0.25  # below every norm in the table


@dataclass
class Result:
    """Values of one process per step, and on rank 0 the full model before and after."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    traffic: list[dict[str, int]] = field(default_factory=list)
    measured: dict[str, int] = field(default_factory=dict)
    predicted: dict[str, int] = field(default_factory=dict)
    before: dict[str, torch.Tensor] | None = None
    after: dict[str, torch.Tensor] | None = None
    gradients: dict[str, torch.Tensor] | None = None
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # of this process, at the end


def engine_of(case: Case, engine: str = "fsdp2", **sections: Any) -> Any:
    """Make the engine of a case, and fail if an extension would be compiled.

    Compilation takes minutes. If it is killed, its lock blocks all other processes.
    """

    def compiled(*_: Any, **__: Any) -> Any:
        raise AssertionError("an extension is compiled")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("load", "load_inline", "_jit_compile") if engine == "deepspeed" else ():
            patch.setattr(f"torch.utils.cpp_extension.{name}", compiled)
        return sdp.initialize(model=models.build(case.model), config=case.config(engine, **sections))[0]


@contextlib.contextmanager
def said(least: int = logging.INFO) -> Iterator[list[str]]:
    """Collect what the engine logs on this rank, from the level ``least`` on."""
    lines, log = list[str](), logging.getLogger("sdp")
    handler, level = logging.Handler(least), log.level
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    log.setLevel(least)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def data_rank_of(case: Case) -> int:
    """Return this process's data rank. Tensor-parallel ranks are neighbours."""
    return dist.get_rank() // case.tp


def one_step(engine: Any, case: Case, step: int, *, data_rank: int) -> float:
    """Run forward and backward of all micro-batches of a step; return the mean loss.

    It calls ``engine.step()`` after every micro-batch but the last.

    Args:
        engine: The engine.
        case: The case that the engine runs.
        step: The number of the optimizer step.
        data_rank: Whose rows to read.
    """
    total = 0.0
    for micro in range(case.accumulation):
        loss = engine(models.micro_batch(case.model, step, micro, data_rank))
        engine.backward(loss)
        if micro + 1 < case.accumulation:
            engine.step()
        total += loss.item()
    return total / case.accumulation


@contextlib.contextmanager
def elements_read() -> Iterator[list[int]]:
    """Yield a list that gets the number of elements of each read of weight files."""
    counts, fill = list[int](), WeightFiles.fill
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightFiles, "fill", lambda *call, **key: (counts.append(call[1].numel()), fill(*call, **key)))
        yield counts


def full_gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Return this process's gradients as full tensors, by name. Collective inside the group."""
    return {
        name: whole(engine, name, p.grad).clone() for name, p in engine.parameters_here.items() if p.grad is not None
    }


def whole(engine: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor that is cut like the parameter ``name``. Collective inside the group."""
    part = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    info = engine.layout.parameters[name]
    if info.tp_dim is None:
        return part
    parts = [torch.empty_like(part) for _ in range(info.tp)]
    # This bypasses the engine's counting of traffic.
    dist.all_gather(parts, part.contiguous(), group=engine.store.context.tensor_ranks.group)
    return torch.cat(parts, info.tp_dim)


def train(case: Case, engine_name: str = "fsdp2", **sections: Any) -> Result:
    engine = engine_of(case, engine_name, **sections)
    data_rank = data_rank_of(case)
    result = Result(before=engine.full_state_dict())
    for step in range(case.steps):
        engine.traffic.reset()
        result.rates.append(engine.get_lr()[0])
        result.losses.append(one_step(engine, case, step, data_rank=data_rank))
        if step == 0:
            result.gradients = full_gradients(engine)
        engine.step()
        result.norms.append(engine.get_global_grad_norm())
        result.traffic.append(engine.traffic.by_kind())
    result.measured, result.predicted = (
        engine.measured_state_bytes().to_json(),
        engine.predicted_state_bytes().to_json(),
    )
    result.after = engine.full_state_dict()
    result.buffers = {
        name: buffer.cpu().clone() for name, buffer in engine.module.named_buffers() if name in engine.layout.buffers
    }
    return result


def train_in_pieces(case: Case, least: int) -> tuple[Result, float]:
    """The run with buckets of ``least`` bytes or more, and how many reductions a step starts."""
    started, all_reduce = 0, dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal started
        started += bool(kwargs.get("async_op"))
        return all_reduce(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sdp.engine.placement.placement.LEAST_BYTES", least)
        patch.setattr(dist, "all_reduce", counted)
        return train(case), started / case.steps


def oracle_of(case: Case, **arguments: Any) -> Oracle:
    """Make the oracle of a case. ``arguments`` replace those that the case gives."""
    return oracle_for(models.build(case.model), case.config(), case.data_ranks, **arguments)


def oracle_for(model: torch.nn.Module, settings: dict[str, Any], data_ranks: int, **arguments: Any) -> Oracle:
    """Make the oracle of a model, which may be on the meta device, and a configuration."""
    config = load_config(settings)
    mesh = Mesh(config.sdp.groups, data_ranks // config.sdp.groups, config.tensor_parallel.autotp_size)
    layout = Layout.of(model, config, mesh)
    give_values(model, layout, values_to_give(model, config, layout), torch.device("cpu"), Shard())
    optimizer = settings.get("optimizer", {"type": "SGD"})
    kind = getattr(torch.optim, optimizer["type"])
    placement, scale = layout.placement, config.sdp.lr_scale
    held = [len(holders) for holders in placement.holders]
    mean = sum(k * cost for k, cost in zip(held, placement.costs, strict=True)) / max(1, sum(placement.costs))
    by_type = 0.5 if optimizer["type"] == "AdamW" else 1.0
    exponent = {"none": 0.0, "auto": by_type}[scale] if isinstance(scale, str) else scale
    from_settings: dict[str, Any] = {
        "make_optimizer": lambda groups: kind(groups, **optimizer.get("params", {})),
        "clip": config.gradient_clipping,
        "dtype": getattr(torch, config.precision),
        "sync": settings["sdp"].get("sync"),
        "copies": settings["sdp"].get("copies"),
        "rate_factor": lambda piece: 1.0 if piece.unit == "shared" else (len(piece.holders) / mean) ** exponent,
        "place_of": lambda name: re.sub(r"^paths\.\d+\.", "", name),
    }
    return Oracle(model, layout, **from_settings | arguments)


def rate_of(case: Case, step: int) -> float:
    """The rate of a step by the schedule of :meth:`Case.config`."""
    warmup = case.config()["scheduler"]["params"]
    low, high = warmup["warmup_min_lr"], warmup["warmup_max_lr"]
    return low + (high - low) * min(1.0, max(0, step - 1) / 3)


def masking_of(case: Case, step: int) -> str:
    phases = [{"masking": case.masking}] if case.masking.isalpha() else json.loads(case.masking)
    return next(phase["masking"] for phase in phases if step < phase.get("until", math.inf))


def run_oracle(case: Case, **arguments: Any) -> Result:
    """Run the oracle of a case. ``arguments`` replace those that the case gives."""
    groups = oracle_of(case, **arguments)
    result = Result(before=groups.state_dict())
    for step in range(case.steps):
        batches = [
            [models.micro_batch(case.model, step, micro, rank) for rank in range(case.data_ranks)]
            for micro in range(case.accumulation)
        ]
        done = groups.step(batches, rate_of(case, step), masking=masking_of(case, step))
        result.losses.append(done.loss)
        result.norms.append(done.norm)
        result.rates.append(rate_of(case, step))
        if step == 0:
            result.gradients = done.gradients
    result.after = groups.state_dict()
    return result


def mean_loss(groups: Oracle, batches: Sequence[Any], group: int | None = None) -> float:
    """The loss of batches, weighed by what they count, of the full model or of a group's."""
    counts = [float((of["labels"][:, 1:] != -100).sum()) if "input_ids" in of else 1.0 for of in batches]
    losses = [groups.evaluate(batch, group) for batch in batches]
    return sum(count * loss for count, loss in zip(counts, losses, strict=True)) / sum(counts)


def evaluations(groups: Oracle, rows: Sequence[Sequence[Any]]) -> tuple[float, list[float]]:
    """The losses of the full model and of each group's, of the batches of each data rank."""
    of_group = [rows[first : first + groups.size] for first in range(0, len(rows), groups.size)]
    full = mean_loss(groups, [*itertools.chain(*rows)])
    return full, [mean_loss(groups, [*itertools.chain(*of)], group) for group, of in enumerate(of_group)]


_oracle = functools.cache(run_oracle)


def oracle(case: Case) -> Result:
    """Return the oracle's run, which does not depend on ZeRO stage and tensor parallelism."""
    return _oracle(replace(case, stage=0, tp=1, checkpointing="none"))


_native: dict[Case, list[Result]] = {}


def native(ranks: Any, case: Case) -> list[Result]:
    """Return the native run by rank. A case runs once per session."""
    if case not in _native:
        _native[case] = ranks.run(train, case, world=case.world)
    return _native[case]


def assert_same_run(ours: Sequence[Result], theirs: Result, case: Case) -> None:
    """Compare weights, updates, and the loss, norm and rate of every step."""
    assert (
        ours[0].before is not None
        and ours[0].after is not None
        and theirs.before is not None
        and theirs.after is not None
    )
    assert list(ours[0].after) == list(theirs.after)
    for name, after in theirs.after.items():
        assert torch.equal(ours[0].before[name], theirs.before[name]), f"{name}: not initialised equally"
        largest = after.abs().max().item()
        torch.testing.assert_close(
            ours[0].after[name], after, rtol=0, atol=RELATIVE * largest, msg=lambda text, name=name: f"{name}: {text}"
        )
        update, our_update = after - theirs.before[name], ours[0].after[name] - ours[0].before[name]
        step = update.abs().max().item()
        # In either run, each step rounds the weight to float32 once, by half a unit in the last
        # place.
        tolerance = RELATIVE * step + case.steps * EPSILON * largest
        assert tolerance < 1e-2 * step, f"{name}: the update is too small to show a wrong scale"
        deviation = (our_update - update).abs().max().item()
        assert deviation <= tolerance, (
            f"{name}: its update differs by {deviation:.2e}, {deviation / step:.2e} of the update"
        )
    for rank, result in enumerate(ours):
        assert result.norms == pytest.approx(theirs.norms, rel=RELATIVE), f"gradient norm on rank {rank}"
        assert result.rates == theirs.rates, f"learning rate on rank {rank}"
    mean_losses = torch.tensor([result.losses for result in ours], dtype=torch.float64).mean(0).tolist()
    assert mean_losses == pytest.approx(theirs.losses, rel=RELATIVE)
    assert len(set(theirs.rates)) > 1, "the schedule does nothing"
    if case.clip:
        assert min(theirs.norms) > CLIP, "the clipping does nothing"


def assert_state_as_predicted(ours: Sequence[Result]) -> None:
    """Compare predicted and measured state of every rank."""
    for rank, result in enumerate(ours):
        assert result.measured == result.predicted, f"rank {rank}"


def assert_same_gradients(ours: Sequence[Result], theirs: Result) -> None:
    """Compare the gradients of the first step, on every rank that has one of a parameter.

    A slice is compared on the scale of its whole tensor. That of key biases is 0 but for round-off.
    """
    assert theirs.gradients is not None
    seen, largest = set[str](), dict[str, float]()
    for name, gradient in theirs.gradients.items():
        tensor = name.split(":")[0]
        largest[tensor] = max(largest.get(tensor, 0.0), gradient.abs().max().item())
    for rank, result in enumerate(ours):
        assert result.gradients is not None
        seen |= set(result.gradients)
        for name, gradient in result.gradients.items():
            difference = (gradient.cpu() - theirs.gradients[name]).abs().max().item()
            assert difference <= RELATIVE * largest[name.split(":")[0]], f"{name} on rank {rank}"
    assert seen == set(theirs.gradients)


def assert_same_statistics(ours: Sequence[Result], theirs: Result, names: Collection[str]) -> None:
    """Compare running statistics, which are bit for bit the same on all ranks that have them."""
    assert ours[0].after is not None and theirs.after is not None
    for name in names:
        largest = theirs.after[name].abs().max().item()
        torch.testing.assert_close(ours[0].after[name], theirs.after[name], rtol=0, atol=RELATIVE * largest, msg=name)
    for rank, result in enumerate(ours):
        for name, buffer in result.buffers.items():
            assert torch.equal(buffer, ours[0].after[name]), f"{name} on rank {rank}"


def only_parameters(result: Result, model: str) -> Result:
    """Return the result without buffers."""
    names = dict(models.build(model).named_parameters(remove_duplicate=False))
    before, after = (
        state and {name: value for name, value in state.items() if re.sub(r"^paths\.\d+\.", "", name) in names}
        for state in (result.before, result.after)
    )
    return replace(result, before=before, after=after)
