"""The executable specification: N groups of F virtual workers in one process, on one device.

Groups may have different numbers of workers. The code is deliberately simple. The full model is in
memory, each worker runs its own subnetwork on its own rows of the batch, and the gradient of a unit
is the mean over its holders' ranks. Real runs on one device can use it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from ...batch.call import call_model, loss_of, map_leaves, merge_outputs, split_rows, target_count, to_device
from ...config.masking import Masking
from ...distributed.mesh import Holders
from ...distributed.traffic import Traffic
from ...errors import ConfigError
from ...full_model.buffers import held_entries
from ...full_model.recalibration import Statistics, batch_statistics
from ...model_interface import get_sharding_groups
from ...optim.clip import squared_norm
from ...optim.rate_scale import HolderScale
from ...placement.layout import Layout
from ...placement.tensor_info import Shard
from ...placement.units import goes_into_sum
from ...subnetwork.branch_scale import BranchScale
from ...subnetwork.carve import replace_modules
from ..base import TorchOptimizerBackend
from .element_rates import scale_rates
from .local_steps import ReferenceLocalSteps, ones_along
from .other_values import Backward, Valued, cast_parameters
from .stand_ins import cast_inputs, make_stand_ins
from .worker_buffers import WorkerBuffers, buffers_replaced


class ReferenceBackend(TorchOptimizerBackend):
    """Runs all workers of the layout in turn.

    A batch holds the rows of all data ranks, in rank order.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        device: torch.device,
        *,
        compute_dtype: torch.dtype = torch.float32,
        maskings: Sequence[Masking] = (),
    ):
        """``maskings`` are those of the run's phases, in order. Default: the layout's."""
        maskings = maskings or (layout.masking,)
        self.phases = {masking: layout.in_phase(masking) for masking in maskings}
        self.layout, self.module, self.device = self.phases[maskings[0]], model, device
        self.traffic = Traffic()
        self.parameters = dict(model.named_parameters())
        self._compute_dtype = compute_dtype
        self._averaged = False  # whether ``.grad`` holds means, not sums
        groups = range(layout.mesh.sdp)
        self._stand_ins = {
            masking: [make_stand_ins(model, phase, group) for group in groups] for masking, phase in self.phases.items()
        }
        self._scale = BranchScale(layout)
        # Stand-ins are copies that were made before, so skipped blocks are not scaled.
        self._scale.install(model)
        self._enter_phase()
        self._workers = self._of_holders(layout.mesh.data_ranks_of)
        self._divided = self._workers  # by what the present gradients were divided
        self._weigh: list[float] = []  # by worker, the factor of its gradient in the next backward pass
        self._losses: list[torch.Tensor] = []  # of the workers in the last forward pass
        self._held_entries = [held_entries(layout, group, device) for group in range(layout.mesh.sdp)]
        self._local: ReferenceLocalSteps | None = None
        if compute_dtype != torch.float32:  # as FSDP2 does: also of modules that are sharded on their own
            names = [*layout.blocks, *get_sharding_groups(model)]
            views = [view for stand_ins in self._stand_ins.get("backward", ()) for view in stand_ins.values()]
            cast_inputs([model, *map(model.get_submodule, names), *views], compute_dtype)

    def use_masking(self, masking: Masking) -> None:
        if masking != self.layout.masking:
            self.layout = self.phases[masking]
            self._enter_phase()

    def _enter_phase(self) -> None:
        self.stand_ins_of_group = self._stand_ins[self.layout.masking]
        self._scale.use(self.layout)
        self._held = [self._held_indices(group) for group in range(self.layout.mesh.sdp)]
        with self._scale.of_full_model():
            self._all = self._held_indices(None)

    @contextmanager
    def _as_group(self, group: int) -> Iterator[None]:
        """Make the model that of ``group`` in the context: skip or freeze the other units."""
        stand_ins = self.stand_ins_of_group[group]
        for name, stand_in in stand_ins.items():
            if self.layout.keeps_frozen:
                for module, original in zip(stand_in.modules(), self.module.get_submodule(name).modules(), strict=True):
                    module.training = original.training
        with replace_modules(self.module, stand_ins):
            yield

    def _held_indices(self, group: int | None) -> dict[str, torch.Tensor]:
        """Per sliced parameter, the multipliers of ``group``, broadcastable to the parameter.

        A multiplier is 0 for slices that the group does not hold. It is the unit's branch-scale
        factor for slices that feed a branch's sum, and 1 for all others. ``group=None`` means the
        full model.
        """
        held: dict[str, torch.Tensor] = {}
        for unit, holders in zip(self.layout.units, self.layout.placement.holders, strict=True):
            for part in unit.slices if not unit.is_block else ():
                factor = self._scale.factor(unit) if goes_into_sum(part.parameter, part.dim) else 1.0
                factor = factor if group is None or group in holders else 0.0
                if factor != 1.0:
                    held.setdefault(part.parameter, ones_along(self.parameters[part.parameter], part.dim))
                    part.of(held[part.parameter]).fill_(factor)
        return held

    def _of_holders(self, value: Callable[[Holders], float]) -> dict[str, Any]:
        """A value of the holders of each parameter.

        For a sliced parameter, this is a tensor that broadcasts to the parameter, because each
        slice has holders of its own.
        """
        values: dict[str, Any] = {name: value(info.holders) for name, info in self.layout.parameters.items()}
        for part, holders in self.layout.slices():
            if not isinstance(values[part.parameter], torch.Tensor):
                values[part.parameter] *= ones_along(self.parameters[part.parameter], part.dim)
            part.of(values[part.parameter]).fill_(value(holders))
        return values

    @property
    def stand_ins(self) -> dict[str, nn.Module]:
        return {}

    def refresh(self, *, after_step: bool) -> None:
        """A no-op: there is one model, and no copies."""

    @property
    def frozen(self) -> dict[str, nn.Parameter]:
        return {}  # stand-ins share the memory of the one model

    @property
    def data_ranks_here(self) -> int:
        return self.layout.mesh.data_ranks

    @property
    def shard(self) -> Shard:
        return Shard()

    @property
    def exposed_seconds(self) -> float:
        return 0.0

    def _run(
        self,
        call: Callable[[nn.Module, Any], Any],
        batch: Any,
        held: Mapping[str, torch.Tensor] | None = None,
        own: Mapping[str, torch.Tensor] | None = None,
    ) -> Any:
        """``call`` with the module in compute precision, and with the weights ``own`` of a group.

        Slices that are not ``held`` are zero, or copies that are not trained.
        """
        values = {name: weight.to(self._compute_dtype) for name, weight in (own or {}).items()}
        if self._compute_dtype != torch.float32:
            values = cast_parameters(self.module, self._compute_dtype) | values
        for name, indices in (held or {}).items():
            copy_of = self.parameters[name].detach().to(self._compute_dtype)
            value = values.get(name, self.parameters[name])
            indices = indices.to(value.dtype)
            values[name] = value * indices + (copy_of * (1 - indices) if self.layout.keeps_frozen else 0)
        return call(Valued(self.module, values) if values else self.module, batch)

    def forward(self, call: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        """Run all workers in turn."""
        local = self.local
        of_groups = [group.buffers for group in local.groups] if local is not None else None
        buffers = WorkerBuffers(self.module, self.layout, self._held_entries, self.device, of_groups)
        outputs = []
        self._weigh, self._losses = [1.0] * self.layout.mesh.data_ranks, []
        for worker, rows in enumerate(split_rows(batch, self.layout.mesh.data_ranks)):
            group = self.layout.mesh.coordinates(worker).sdp
            buffers.before(worker)
            with self._as_group(group):
                weights = local.groups[group].weights if local is not None else {}
                output = self._run(call, rows, self._held[group], weights)
                outputs.append(self._weighable(output, worker))
            buffers.after(worker)
        buffers.finish()
        return merge_outputs(outputs)

    def _weighable(self, output: Any, worker: int) -> Any:
        """Let the gradient of a worker's loss depend on its weight, which ``backward`` gets."""
        factors = self._weigh

        def scale(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.numel() != 1 or not leaf.requires_grad:
                return leaf
            self._losses.append(leaf.detach().reshape(()))
            return _Weighed.apply(leaf, factors, worker)

        return map_leaves(scale, output) if torch.is_grad_enabled() else output

    def losses_here(self, loss: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._losses)

    def backward(self, loss: torch.Tensor, *, boundary: bool, weights: torch.Tensor | None = None) -> None:
        if weights is not None:
            if len(self._losses) != len(weights):
                raise ConfigError(
                    'backward: with sdp.engine "reference" a weight needs a model that returns its loss; leave it out'
                )
            self._weigh[:] = weights.tolist()
        # ``loss`` is the workers' mean. A unit's gradient is the mean over its holders' workers.
        scaled = self.scaled(loss) * self.layout.mesh.data_ranks
        if self.local is not None:
            self._backward_locally(scaled, boundary=boundary)
            return
        if self._averaged:  # a second pass before the step adds to these gradients, so make them sums again
            self._scale_gradients(lambda name: self._divided[name])
            self._averaged = False
        if self._compute_dtype == torch.float32:
            scaled.backward()
        else:  # recomputed activations need the cast parameters again
            functional_call(
                Backward(self.module), cast_parameters(self.module, self._compute_dtype, "_module."), (scaled,)
            )
        if not boundary:
            return
        self._divided = self._workers
        self._scale_gradients(lambda name: 1 / self._workers[name])
        self._averaged = True

    def weigh_gradients(self, weights: torch.Tensor, unit: float) -> tuple[float, int]:
        mesh, counts = self.layout.mesh, weights.tolist()
        of_group = [
            sum(counts[mesh.data_rank(rank)] for rank in mesh.ranks_of(group)) for group in self.layout.everyone
        ]
        if self.local is not None:
            self.local.weigh_gradients(of_group, unit)
        else:
            # Without labels the gradient is a sum of zeros.
            sums = self._of_holders(lambda holders: sum(of_group[group] for group in holders) / unit or 1.0)
            self._scale_gradients(lambda name: self._workers[name] / sums[name])
            self._divided = sums
        return sum(counts), mesh.data_ranks

    def _backward_locally(self, loss: torch.Tensor, *, boundary: bool) -> None:
        """A group's gradient is the mean over its own workers."""
        assert self.local is not None
        if self._averaged:
            self.local.scale_gradients(to_means=False)
        loss.backward()
        self._averaged = boundary
        if boundary:
            self.local.scale_gradients(to_means=True)

    @property
    def local(self) -> ReferenceLocalSteps | None:
        return self._local

    def scale_rates(self, scale: HolderScale) -> None:
        scale_rates(self.optimizer, self.parameters, self.layout, scale)

    def begin_local_steps(self) -> None:
        assert self._config.sdp.sync is not None
        self._local = ReferenceLocalSteps(self, self._config.sdp.sync, self.clipping)

    def end_local_steps(self) -> None:
        self._local = None

    def gradients(self) -> list[torch.Tensor]:
        return super().gradients() if self.local is None else self.local.gradients()

    def _scale_gradients(self, factor: Callable[[str], Any]) -> None:
        """Multiply every gradient by a function of the parameter's name.

        A parameter without a gradient gets zeros.
        """
        for name, info in self.layout.parameters.items():
            parameter = self.parameters[name]
            if info.trainable:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad *= factor(name)

    def zero_grad(self) -> None:
        self._averaged = False
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.local is not None:
            self.local.zero_grad()

    def squared_grad_norm_and_loss(self, loss: torch.Tensor) -> tuple[float, float]:
        norm = squared_norm([p.grad for p in self.parameters.values() if p.grad is not None], self.device)
        return self.unscaled(norm).item(), loss.item()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Any], weights: Sequence[float]) -> float:
        with self._scale.of_full_model():
            return self._mean_loss(batches, weights, self._all)

    def batch_statistics(self, batches: Sequence[Any]) -> Statistics:
        rows = [part for batch in batches for part in split_rows(batch, self.layout.mesh.data_ranks)]
        return batch_statistics(
            self.module.named_modules(),
            lambda: self.evaluate(rows, [1] * len(rows)),
            self.all_reduce_control,
            self.device,
        )

    @torch.no_grad()
    def evaluate_subnetworks(self, batches: Sequence[Any]) -> list[float]:
        mesh, losses = self.layout.mesh, []
        for group in range(mesh.sdp):
            mine = slice(mesh.rank(group), mesh.rank(group) + mesh.fsdp)
            own = [rows for batch in batches for rows in split_rows(batch, mesh.data_ranks)[mine]]
            state = self.local.groups[group] if self.local is not None else None
            statistics = buffers_replaced(self.module, self.layout, state.buffers if state is not None else {})
            with self._as_group(group), statistics:
                counts = [target_count(self.module, rows) for rows in own]
                losses.append(
                    self._mean_loss(own, counts, self._held[group], state.weights if state is not None else {})
                )
        return losses

    def _mean_loss(
        self,
        batches: Sequence[Any],
        weights: Sequence[float],
        held: Mapping[str, torch.Tensor] | None = None,
        own: Mapping[str, torch.Tensor] | None = None,
    ) -> float:
        total = weight = 0.0
        for batch, count in zip(batches, weights, strict=True):
            if count:  # the mean over no targets is NaN
                total += loss_of(self._run(call_model, to_device(batch, self.device), held, own)).item() * count
                weight += count
        return total / weight if weight else math.nan

    def stream_state(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        # Not state_dict(): a model may save its parameters under other names.
        state = dict(self.module.named_parameters(remove_duplicate=False))
        state |= dict(self.module.named_buffers(remove_duplicate=False))
        for name in (*self.layout.parameters, *self.layout.buffers):
            yield name, state[name].detach()

    def all_reduce_control(self, values: torch.Tensor) -> None:
        """A no-op: there is one process."""

    def agree_on_buffers(self) -> None:
        """A no-op: there is one model."""

    def shard_parameters(self) -> None:
        """A no-op: nothing is sharded."""


class _Weighed(torch.autograd.Function):
    """The identity, whose gradient is multiplied by the factor of a worker."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, factors: list[float], worker: int) -> torch.Tensor:
        ctx.factors, ctx.worker = factors, worker
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients[0] * ctx.factors[ctx.worker], None, None
