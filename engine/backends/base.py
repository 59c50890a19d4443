"""How a backend steps a torch optimizer and accounts for its state.

DeepSpeed replaces most of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..accounting.local_traffic import LocalTraffic
from ..accounting.memory import StateBytes, measure_state_bytes, predict_state_bytes
from ..accounting.traffic_plan import describe_formula, plan_traffic, plan_waking
from ..backend import Backend, GroupPart, LocalSteps, Spot, StateToSave, Update
from ..checkpoint.state import SavedState
from ..config.masking import Masking
from ..config.schema import Config
from ..distributed.tensors import local_tensor
from ..distributed.traffic import Traffic
from ..errors import ConfigError
from ..optim.clip import clip_
from ..optim.loss_scale import LossScaler
from ..optim.muon.setup import planned_gathers
from ..optim.optimizer_state import materialise_state
from ..optim.rate_scale import HolderScale, ScaledRates, exponent_of
from ..optim.script_optimizers import on_local_tensors, refuse_steps_of_script, stepped_by_engine
from ..placement.layout import Layout
from ..placement.tensor_info import Shard
from ..sync.consistency import check_holders


class TorchOptimizerBackend:
    """Base of all backends.

    The optimizer steps on ``parameters``, whose ``.grad`` holds the averages.
    """

    layout: Layout
    phases: dict[Masking, Layout]  # the layout with each masking of the run
    rank: int = 0  # this process's rank in the world; 0 in one process
    parameters: dict[str, nn.Parameter]
    optimizer: Optimizer
    rate_scale: HolderScale | None = None
    needs_whole_matrices = False  # whether the optimizer's step depends on them
    _config: Config
    _scaler: LossScaler | None = None

    def attach(self, optimizer: Optimizer, config: Config) -> None:
        self.optimizer, self._config = optimizer, config
        self._scaler = LossScaler.of(config)
        refuse_steps_of_script(self.basic_optimizer)
        exponent = exponent_of(config.sdp.lr_scale, is_sgd=isinstance(self.basic_optimizer, torch.optim.SGD))
        if exponent and self.layout.units:
            self.rate_scale = HolderScale(self.layout.placement, exponent)
            self.scale_rates(self.rate_scale)

    def scale_rates(self, scale: HolderScale) -> None:
        """Give each unit a learning rate by its number of holders."""
        infos = self.layout.parameters
        factors = {id(p): scale.of(infos[name].unit, infos[name].holders) for name, p in self.stepped.items()}
        ScaledRates(self.basic_optimizer, lambda _, parameter: factors.get(id(parameter), 1.0))

    @property
    def basic_optimizer(self) -> Optimizer:
        return self.optimizer

    @property
    def stepped(self) -> Mapping[str, torch.Tensor]:
        return self.parameters

    @property
    def library_engine(self) -> Any:
        return None

    # -- steps -------------------------------------------------------------------------------------

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    @property
    def clipping(self) -> float:
        """The largest norm of a gradient, or 0 for no clipping."""
        return self._config.gradient_clipping

    def clip(self, gradients: list[torch.Tensor], norm: float) -> None:
        """Scale ``gradients`` in place so that the full model's norm is at most
        ``gradient_clipping``.
        """
        if self._config.gradient_clipping > 0:
            clip_(gradients, norm, self._config.gradient_clipping)

    def update(self, gradients: list[torch.Tensor], norm: float, scheduler: Any) -> Update:
        if self._scaler is not None:
            torch._foreach_mul_([local_tensor(gradient) for gradient in gradients], 1 / self._scaler.cur_scale)
            self._scaler.update(overflow=False)
        self.clip(gradients, norm)
        # A forward pass after backward may have left gathered copies of the old weights.
        self.shard_parameters()
        with self.stepping():
            self.optimizer.step()
        gradients.clear()
        self.zero_grad()  # frees the gradients' memory before the weights are cast and sent
        self.refresh(after_step=True)
        if scheduler is not None:
            scheduler.step()
        return Update(norm, skipped=False)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A context for a step of the optimizer.

        Raises ConfigError if the optimizer needs whole matrices and cannot step on shards.
        """
        is_whole = self.needs_whole_matrices and self._shards == 1
        try:
            with stepped_by_engine(self.optimizer), on_local_tensors(self.optimizer) if is_whole else nullcontext():
                yield
        except (RuntimeError, NotImplementedError) as error:
            if not self.needs_whole_matrices or self._shards == 1 or isinstance(error, torch.OutOfMemoryError):
                raise
            raise ConfigError(
                f"optimizer: {type(self.optimizer).__name__} needs whole matrices, and cannot step on shards; use "
                "zero_optimization.stage 0, or an optimizer that steps on single elements, such as AdamW"
            ) from error

    def skip_update(self, norm: float) -> Update:
        if self._scaler is not None:
            self._scaler.update(overflow=True)
        return Update(norm, skipped=True)

    def losses_here(self, loss: torch.Tensor) -> torch.Tensor:
        return loss.detach().reshape(1)

    def weigh_gradients(self, weights: torch.Tensor, unit: float) -> tuple[float, int]:
        raise NotImplementedError

    def check_gradients(self) -> None:
        """A no-op: torch's gradients are right."""

    def count_micro_batch(self) -> None:
        """A no-op: the engine counts."""

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def shard_parameters(self) -> None:
        raise NotImplementedError

    def refresh(self, *, after_step: bool) -> None:
        raise NotImplementedError

    def zero_grad(self) -> None:
        raise NotImplementedError

    # -- local steps -------------------------------------------------------------------------------

    @property
    def local(self) -> LocalSteps | None:
        return None

    def spot_of(self, name: str) -> Spot:
        return Spot(name, self.layout.parameters[name].offset(self.shard))

    def only_part(self) -> GroupPart:
        weights = {name: local_tensor(of.detach()) for name, of in self.stepped.items()}
        return GroupPart(0, "", weights, self.stepped, self.optimizer, {}, {}, {})

    def begin_local_steps(self) -> None:
        raise NotImplementedError

    def end_local_steps(self) -> None:
        raise NotImplementedError

    # -- loss scale --------------------------------------------------------------------------------

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss whose gradients are computed: in float16, ``loss`` times the loss
        scale.
        """
        return loss if self._scaler is None else loss.float() * self._scaler.cur_scale

    def unscaled(self, squared_norm: torch.Tensor) -> torch.Tensor:
        """Return the squared norm of the gradients without the loss scale, in which they still
        are.
        """
        return squared_norm if self._scaler is None else squared_norm / self._scaler.cur_scale**2

    @property
    def loss_scale(self) -> float | None:
        return None if self._scaler is None else self._scaler.cur_scale

    @property
    def may_lower_loss_scale(self) -> bool:
        return self._scaler is not None and self._scaler.can_be_lowered

    def loss_scale_state(self) -> dict[str, float] | None:
        return None if self._scaler is None else self._scaler.state_dict()

    def load_loss_scale(self, state: Mapping[str, float] | None) -> None:
        if self._scaler is not None:
            self._scaler.load_state_dict(state)

    # -- parameter groups --------------------------------------------------------------------------

    def learning_rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def names_of_param_groups(self) -> list[list[str]]:
        infos = self.layout.parameters
        names = {id(parameter): infos[name].canonical for name, parameter in self.parameters.items()}
        members = ([names.get(id(parameter)) for parameter in group["params"]] for group in self.optimizer.param_groups)
        # A user's optimizer may have parameters that the model does not have.
        return [[name for name in group if name is not None] for group in members]

    def shared_schedule(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    # -- state -------------------------------------------------------------------------------------

    def check_holders(self) -> None:
        if self._world_size > 1:
            weights, optimizer = (self.stepped, self.optimizer) if self.local is None else self.local.common_state()
            check_holders(self.layout, weights, optimizer, self.rank, sharded=self._shards > 1)

    def materialise_optimizer_state(self) -> None:
        with self.stepping():
            materialise_state(self.basic_optimizer)

    def state_to_save(self: Backend) -> StateToSave:
        return SavedState(self, self.optimizer, self.rank)

    def continue_at(self, *, steps: int, micro_steps: int, skipped: int) -> None:
        """A no-op: only the engine counts steps."""

    # -- bytes -------------------------------------------------------------------------------------

    def predicted_state_bytes(self) -> StateBytes:
        return predict_state_bytes(
            self.layout,
            self.rank,
            self.optimizer,
            shards=self._shards,
            compute_bytes=self._config.compute_bytes,
            everything=self._config.sdp.in_one_process,
            sync=self._config.sdp.sync,
        )

    def measured_state_bytes(self, gradient_bytes: int) -> StateBytes:
        state = measure_state_bytes(self.parameters.values(), self.frozen.values(), self.optimizer, gradient_bytes)
        if self.local is None:
            return state
        outer = self.local.nbytes()
        on_host = outer if self.local.sync.offload == "cpu" else 0
        return replace(state, outer=outer, outer_on_host=on_host)

    def planned_traffic(self, accumulation: int, step: int | None = None) -> Traffic:
        if self._config.sdp.in_one_process:
            return Traffic()
        stage, compute_bytes = self._config.zero_optimization.stage, self._config.compute_bytes
        group = self.layout.mesh.coordinates(self.rank).sdp
        gathers = planned_gathers(self.optimizer, self.layout, group, self._shards)
        weighted = self._config.training.loss_weighting == "tokens"
        if self._config.sdp.sync is not None:
            plan = LocalTraffic(
                self.layout, self.rank, self._config.sdp.sync, stage=stage, accumulation=accumulation,
                compute_bytes=compute_bytes,
            )  # fmt: skip
            planned = plan.of_round() if step is None else plan.of_step(step)
            for _ in range(self._config.sdp.sync.every if step is None else 1):
                planned.add(gathers)
                if weighted:
                    local = step is None or step > self._config.sdp.sync.start_after
                    self._plan_weights(planned, local=local)
            return planned
        planned = plan_traffic(
            self.layout_at(step), self.rank, stage=stage, accumulation=accumulation, compute_bytes=compute_bytes
        )
        if self.copies_wake_after(step):
            planned.add(plan_waking(self.phases["backward"], self.rank, stage=stage, compute_bytes=compute_bytes))
        planned.add(gathers)
        if weighted:
            self._plan_weights(planned, local=False)
        return planned

    def _plan_weights(self, planned: Traffic, *, local: bool) -> None:
        """Add the messages about the weights of the losses of a step."""
        mesh = self.layout.mesh
        ranks = mesh.fsdp * mesh.tp if local else mesh.world_size
        planned.record("control", "all_reduce", 8 * mesh.data_ranks, ranks)
        if local:  # with the loss
            planned.record("control", "all_reduce", 8, mesh.world_size)

    def layout_at(self, step: int | None) -> Layout:
        """Return the layout of a step's phase. None: of the present phase."""
        schedule = self._config.masking_schedule
        return self.layout if step is None or not schedule.ends else self.phases[schedule.at(step)]

    def copies_wake_after(self, step: int | None) -> bool:
        """Return whether all frozen copies are refreshed after ``step``, because their phase
        begins.
        """
        schedule = self._config.masking_schedule
        return step is not None and schedule.switches_after(step) and schedule.at(step + 1) == "backward"

    def traffic_formula(self) -> str:
        stage, compute_bytes = self._config.zero_optimization.stage, self._config.compute_bytes
        formula = describe_formula(self.layout, self.rank, stage=stage, compute_bytes=compute_bytes)
        sync = self._config.sdp.sync
        return formula if sync is None else f"every {sync.every} steps in local steps, without compression: {formula}"

    # -- facts -------------------------------------------------------------------------------------

    @property
    def frozen(self) -> dict[str, nn.Parameter]:
        raise NotImplementedError

    @property
    def shard(self) -> Shard:
        raise NotImplementedError

    @property
    def _world_size(self) -> int:
        return 1 if self._config.sdp.in_one_process else dist.get_world_size()

    @property
    def _shards(self) -> int:
        """The number of ranks that share a parameter's state."""
        alone = self._config.sdp.in_one_process
        return 1 if alone else self.layout.mesh.shards(self._config.zero_optimization.stage)
