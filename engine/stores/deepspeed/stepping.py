"""How DeepSpeed's own engine takes a step, counts it, and writes to its monitors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ...accounting.memory import StateBytes
from ...backend import Backend, FlatState, GroupPart, Spot, StateToSave, Update
from ...config.schema import Config
from ...distributed.traffic import Traffic
from ...optim.clip import squared_norm
from ...optim.rate_scale import HolderScale, ScaledRates
from ...optim.schedules import keep_shared_state
from ...optim.script_optimizers import refuse_outside_engine, stepped_by_engine
from ...placement.layout import Layout
from ...sync.consistency import check_loss_scale
from .base import DeepSpeedBase
from .checks import UsedParameters
from .local_steps import Box, DeepSpeedLocalSteps, find_boxes, find_untrained_boxes
from .private import set_gradient_norm
from .process_groups import Averages
from .state import DeepSpeedState, check_holders, materialise_state, measured_bytes, predicted_bytes
from .traffic_plan import LocalTrafficPlan, TrafficPlan


class DeepSpeedSteps(DeepSpeedBase):
    """Clips between groups, then lets DeepSpeed step.

    With one group the whole step is DeepSpeed's.
    """

    _local: DeepSpeedLocalSteps | None
    _averages: Averages
    usage: UsedParameters | None  # under ZeRO
    _differences: list[float] | None  # of the present step, see UsedParameters

    @property
    def basic_optimizer(self) -> Optimizer:
        return self.deepspeed.basic_optimizer

    def attach(self, optimizer: Optimizer, config: Config) -> None:
        super().attach(optimizer, config)
        if self.zero is None:
            return
        step = self.deepspeed.optimizer.step  # of ZeRO, which fails without gradients before it steps

        def checked(*args: Any, **kwargs: Any) -> Any:
            refuse_outside_engine(self.basic_optimizer)
            return step(*args, **kwargs)

        self.deepspeed.optimizer.step = checked

    # -- steps -------------------------------------------------------------------------------------

    def check_gradients(self) -> None:
        if self.usage is not None and self._differences is not None:
            self.usage.check(self._differences)
            self._differences = None

    def update(self, gradients: list[torch.Tensor], norm: float, scheduler: Any) -> Update:
        if not self.installed:
            return self._update_alone(norm)
        self.clip(gradients, norm)
        with self.scale.raised_afterwards():
            self._step()
        set_gradient_norm(self.deepspeed, norm)
        if self.local is None:
            self.refresh(after_step=True)
        return Update(norm, skipped=False)

    def _update_alone(self, norm: float) -> Update:
        """DeepSpeed clips by its own norm, and may skip the step."""
        skipped = self.deepspeed.skipped_steps
        self._step()
        own = self.deepspeed.get_global_grad_norm()
        # In float16, DeepSpeed's norm at stage 0 is that of scaled gradients. At stage 3 it uses
        # the scale of the next step.
        if own is not None and self.compute_dtype != torch.float16:
            norm = float(own)
        return Update(norm, self.deepspeed.skipped_steps > skipped)

    def skip_update(self, norm: float) -> Update:
        """All groups skip the step. DeepSpeed lowers a dynamic loss scale and counts the step."""
        state = self.zero or self.copies
        if state is not None:
            with state.skipping():
                self._step()
            return Update(norm, skipped=True)
        engine = self.deepspeed
        engine.zero_grad()
        engine.micro_steps += 1
        engine.global_steps += 1
        engine.skipped_steps += 1
        engine.global_samples += engine.train_batch_size()
        return Update(norm, skipped=True)

    def count_micro_batch(self) -> None:
        self._step()

    def _step(self) -> None:
        with stepped_by_engine(self.basic_optimizer):
            self.deepspeed.step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        if self.stage >= 2:
            raise RuntimeError(
                f"no_sync() has no effect at ZeRO stage {self.stage}, which reduces the gradients of every micro-batch"
            )
        with self.deepspeed.no_sync():
            yield

    def continue_at(self, *, steps: int, micro_steps: int, skipped: int) -> None:
        engine = self.deepspeed
        engine.global_steps, engine.micro_steps, engine.skipped_steps = steps, micro_steps, skipped
        engine.global_samples = steps * engine.train_batch_size()  # DeepSpeed counts the samples of its group

    # -- local steps -------------------------------------------------------------------------------

    @property
    def local(self) -> DeepSpeedLocalSteps | None:
        return self._local

    def begin_local_steps(self) -> None:
        assert self.local_settings is not None
        self._local = DeepSpeedLocalSteps(self, self.local_settings)  # type: ignore[arg-type]

    def end_local_steps(self) -> None:
        self._local = None

    @cached_property
    def boxes(self) -> dict[str, Box]:
        """What this rank averages with other holders in outer steps, by key."""
        return find_boxes(self)

    @cached_property
    def untrained_boxes(self) -> dict[str, Box]:
        return find_untrained_boxes(self)

    def local_weight(self, key: str) -> torch.Tensor:
        """Return the float32 weights of a box, as a view."""
        box = self.boxes[key]
        if box.bundle is None:
            return self.stepped[box.name].detach()
        assert self.zero is not None
        return self.zero.masters[box.bundle].detach()[box.at : box.at + box.numel].view(box.sizes)

    def spot_of(self, name: str) -> Spot:
        box = self.boxes.get(name) or self.untrained_boxes[name]
        start = self.layout.parameters[box.name].offset(self.shard)
        return Spot(box.name, tuple(a + b for a, b in zip(start, box.offsets, strict=True)))

    def only_part(self) -> GroupPart:
        weights = {key: self.local_weight(key) for key in self.boxes}
        if self.zero is None:
            owners, flat = {name: self.stepped[name] for name in self.boxes}, {}
        else:
            groups = self.zero.basic_groups()
            owners = {key: groups[box.bundle][1] for key, box in self.boxes.items() if box.bundle is not None}
            flat = {
                key: FlatState(box.at, groups[box.bundle][0])
                for key, box in self.boxes.items()
                if box.bundle is not None
            }
        create = self.materialise_optimizer_state
        return GroupPart(0, "", weights, owners, self.basic_optimizer, {}, {}, {}, flat, create)

    def norm_in_group(self) -> float:
        """Return the norm of this group's gradient. Collective inside the group."""
        if self._averages.shards is not None:
            counted = self._averages.shards.parts(self.averaged)
        else:  # whole gradients are equal on all ranks of the group
            counted = self.averaged if self.zero is not None or self.at.fsdp == 0 else []
        squared = squared_norm(counted, self.device)
        if self.ranks_inside > 1:
            self.traffic.record("control", "all_reduce", squared.nbytes, self.ranks_inside)
            dist.all_reduce(squared, group=self._process_groups.inside)
        return math.sqrt(squared.item())

    def scale_rates(self, scale: HolderScale) -> None:
        # ZeRO 1 and 2 let the optimizer step on one of its parameter groups at a time.
        pairs = zip(self.basic_optimizer.param_groups, self.bundles, strict=True)
        factors = {id(group): scale.of(bundle.unit, bundle.holders) for group, bundle in pairs}
        ScaledRates(self.basic_optimizer, lambda group, _: factors[id(group)])

    # -- loss scale --------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float | None:
        return self.scale.value if self._config.fp16.enabled else None

    @property
    def may_lower_loss_scale(self) -> bool:
        return self.scale.can_be_lowered

    def loss_scale_state(self) -> dict[str, float] | None:
        return self.scale.state()

    def load_loss_scale(self, state: Mapping[str, float] | None) -> None:
        self.scale.load(state)
        self._check_loss_scale()

    def _check_loss_scale(self) -> None:
        if self._config.fp16.enabled:
            check_loss_scale(f"{self.scale.value} {self.scale.state()}", self.device)

    # -- parameter groups: DeepSpeed has one per unit ----------------------------------------------

    def learning_rates(self) -> list[float]:
        """One rate per parameter group of the user.

        A group without parameters on this rank gets the first group's rate.
        """
        param_groups = self.optimizer.param_groups
        first = {options: param_groups[index]["lr"] for index, options in reversed(list(enumerate(self.options)))}
        return [first.get(options, param_groups[0]["lr"]) for options in range(self.options_count)]

    def names_of_param_groups(self) -> list[list[str]]:
        infos = self.layout.parameters
        return [[infos[name].canonical for name in bundle.names] for bundle in self.bundles]

    def shared_schedule(self, state: dict[str, Any]) -> dict[str, Any]:
        return keep_shared_state(state)  # the schedule's groups depend on the units that this rank holds

    # -- state -------------------------------------------------------------------------------------

    def check_holders(self) -> None:
        self._check_loss_scale()
        if self.zero is None:
            super().check_holders()
        elif self.installed:
            check_holders(self)

    def materialise_optimizer_state(self) -> None:
        if self.zero is None:
            super().materialise_optimizer_state()
        else:
            materialise_state(self)

    def state_to_save(self: Backend) -> StateToSave:
        return DeepSpeedState(self, self.optimizer, self.rank)

    def predicted_state_bytes(self) -> StateBytes:
        return predicted_bytes(self)

    def measured_state_bytes(self, gradient_bytes: int) -> StateBytes:
        return measured_bytes(self, gradient_bytes)

    def planned_traffic(self, accumulation: int, step: int | None = None) -> Traffic:
        """The bytes that this rank sends in a step.

        DeepSpeed's own messages inside the group are not counted (see ``comms_logger``).
        """
        plan = self._plan_for(self.layout_at(step))
        if self.local_settings is None:
            planned, collectives = Traffic(), plan.common_step()
            if self.copies_wake_after(step):
                layout = self.phases["backward"]
                collectives += self._plan_for(layout).refreshes(layout.parameters, untrained=True)
            for one in collectives:
                planned.record(one.scope, one.kind, one.nbytes, len(one.ranks))
            return planned
        boxes = self.boxes.values()
        steps = LocalTrafficPlan(self.layout, self.rank, self.local_settings, plan, boxes)
        return steps.of_round() if step is None else steps.of_step(step)

    def _plan_for(self, layout: Layout) -> TrafficPlan:
        return TrafficPlan(
            layout,
            self._process_groups,
            self._averages.shards,
            rank=self.rank,
            stage=self.stage,
            compute_bytes=self.compute_dtype.itemsize,
            reduces_whole_gradients=self.installed and self.zero is None,
        )

    def traffic_formula(self) -> str:
        planned = self.planned_traffic(1).by_kind()
        between = sum(nbytes for kind, nbytes in planned.items() if kind.startswith("between groups"))
        every = f" in a round of {self.local_settings.every} steps" if self.local_settings is not None else ""
        return (
            f"the shards that holders average{every} = {between:,} (DeepSpeed's own messages inside groups are not "
            "counted)"
        )
