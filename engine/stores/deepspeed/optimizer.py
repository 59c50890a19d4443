"""DeepSpeed's optimizers: their loss scale, their float32 copies, and ZeRO's partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class LossScale:
    """The loss scale of this rank's DeepSpeed optimizer; 1 outside float16.

    It is equal on all ranks as long as they skip the same steps.
    """

    _SAVED = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        # ZeRO has a ``loss_scaler``, stage 0 has a ``loss_scale_config``.
        self._record: Any = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
        self._minimum = getattr(self._record, "min_scale", None) or getattr(self._record, "min_loss_scale", None)
        if hasattr(self._record, "raise_error_at_min_scale"):
            self._record.raise_error_at_min_scale = False  # training.max_skips decides when a run ends

    @property
    def value(self) -> float:
        return 1.0 if self._record is None else float(self._record.cur_scale)

    @property
    def can_be_lowered(self) -> bool:
        """Whether a lower scale might avoid an overflow."""
        return self._minimum is not None and self.value > self._minimum

    @contextmanager
    def raised_afterwards(self) -> Iterator[None]:
        """Delay the increase of the loss scale until after a DeepSpeed step inside the context.

        DeepSpeed would raise the scale before it divides by it. The gradients were multiplied by
        the lower scale, so that step would be half as long.
        """
        optimizer, outcomes = self._optimizer, []
        if self._minimum is None:
            yield
            return
        optimizer._update_scale = outcomes.append
        try:
            yield
        finally:
            del optimizer._update_scale
        for overflow in outcomes:
            optimizer._update_scale(overflow)

    def state(self) -> dict[str, float] | None:
        """Scale and counts, as JSON; None if the scale never changes."""
        if self._minimum is None:
            return None
        return {key: getattr(self._record, key) for key in self._SAVED if hasattr(self._record, key)}

    def load(self, state: Mapping[str, float] | None) -> None:
        """Continue from a result of :meth:`state`, which may come from another ZeRO stage."""
        for key in self.state() or ():
            if state is not None and key in state:
                setattr(self._record, key, state[key])


@contextmanager
def unstepped(optimizer: Optimizer) -> Iterator[None]:
    """Make ``optimizer.step`` a no-op inside the context.

    At stage 0 in half precision, DeepSpeed takes a step while it is built. The step would decay the
    weights and count as the first one.
    """
    kept = vars(optimizer).get("step")  # torch's schedules set this attribute
    optimizer.step = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        if kept is None:
            del optimizer.step
        else:
            optimizer.step = kept


class MasterCopies:
    """Float32 copies of this rank's trained parameters, on which DeepSpeed steps at stage 0 in half
    precision.
    """

    def __init__(self, engine: Any, parameters: Mapping[str, nn.Parameter]):
        """``parameters`` are those of the model, by canonical name."""
        self._optimizer, self._parameters = engine.optimizer, parameters
        names = {id(parameter): name for name, parameter in parameters.items()}
        pairs = zip(self._optimizer.fp16_groups, self._optimizer.fp32_groups, strict=True)
        self.masters: dict[str, torch.Tensor] = {
            names[id(parameter)]: master
            for group, masters in pairs
            for parameter, master in zip(group, masters, strict=True)
        }

    def spread_masters(self) -> None:
        """Copy the float32 weights to the model's parameters, after something else changed them."""
        for name, master in self.masters.items():
            self._parameters[name].detach().copy_(master.detach())

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Make a DeepSpeed step inside the context act as after an overflow: clean up, keep the
        weights.
        """
        checker = self._optimizer.overflow_checker
        checker.check = lambda *_, **__: True
        try:
            yield
        finally:
            del checker.check


class ZeroState:
    """This rank's flat tensors under ZeRO 1 to 3, by the index of DeepSpeed's parameter group."""

    def __init__(self, engine: Any, stage: int):
        self._engine, self._optimizer, self._stage = engine, engine.optimizer, stage
        self._absent: list[nn.Parameter] = []  # small ones that are not gathered now

    @property
    def offloaded(self) -> bool:
        return bool(self._optimizer.offload_optimizer if self._stage == 3 else self._optimizer.cpu_offload)

    @property
    def masters(self) -> list[torch.Tensor]:
        """This rank's float32 partition of every group's weights, including padding."""
        optimizer = self._optimizer
        return optimizer.fp32_partitioned_groups_flat if self._stage == 3 else optimizer.single_partition_of_fp32_groups

    @property
    def members(self) -> list[list[nn.Parameter]]:
        """The model's parameters of every group, in the order in which they are partitioned."""
        return self._optimizer.fp16_groups if self._stage == 3 else self._optimizer.bit16_groups

    def take_gradient(self, index: int) -> torch.Tensor:
        """Return the reduced gradient of this rank's partition of a group, flat and in float32.

        The optimizer uses the same tensor, so changes to it affect the step.
        """
        master = self.masters[index]
        if self._stage < 3:
            self._optimizer._wait_for_offload_copies()
        if self.offloaded:
            return master.grad  # type: ignore[return-value]
        flat = torch.zeros(master.numel(), dtype=torch.float32, device=master.device)
        at = 0
        for piece in self._optimizer.averaged_gradients[index]:
            flat[at : at + piece.numel()].copy_(piece.reshape(-1))
            at += piece.numel()
        self.put_gradient(index, flat)
        return flat

    def put_gradient(self, index: int, flat: torch.Tensor) -> None:
        """Make ``flat`` the gradient of this rank's partition of a group."""
        self._optimizer.averaged_gradients[index] = [flat]

    def on_reduced(self, call: Callable[[torch.Tensor, torch.Tensor | None], None]) -> None:
        """Under ZeRO 3, call ``call`` for each parameter whose gradient was reduced.

        ``call`` also gets this rank's part of the gradient, or None if the part is only padding. On
        CUDA it runs on DeepSpeed's reduction stream.
        """
        optimizer = self._optimizer
        partition_grads = optimizer.partition_grads

        def and_tell(parameters: Sequence[torch.Tensor], partitions: Sequence[torch.Tensor]) -> Any:
            told, kept = list(parameters), partition_grads(parameters, partitions)
            left = iter(kept)
            for parameter in told:
                rank = optimizer._get_param_partition_rank(parameter)
                is_padding = parameter.partition_numel() * rank >= parameter.ds_numel  # type: ignore[attr-defined]
                call(parameter, None if is_padding else next(left))
            return kept

        optimizer.partition_grads = and_tell

    def gradients(self) -> list[torch.Tensor]:
        """The reduced gradients of this rank's partitions, in the pieces in which DeepSpeed keeps
        them.
        """
        if self._stage < 3:
            self._optimizer._wait_for_offload_copies()
        if self.offloaded:
            return [master.grad for master in self.masters if master.grad is not None]
        return [
            piece for index in range(len(self.masters)) for piece in self._optimizer.averaged_gradients.get(index) or ()
        ]

    def drop_gradients(self) -> None:
        """Drop the gradients of all micro-batches.

        DeepSpeed's ``zero_grad`` keeps those that ZeRO 1 and 2 have reduced already.
        """
        optimizer = self._optimizer
        optimizer.zero_grad()
        if self._stage == 3:
            # The first micro-batch of the next step overwrites only the sums of parameters that it
            # uses. The others would keep the gradients of this step.
            optimizer.grad_partitions_flat_buffer.zero_()
            return
        for reduced in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            for index in reduced:
                reduced[index] = None
        if self.offloaded:
            optimizer.reset_cpu_buffers()
        optimizer.micro_step_id = -1  # the next micro-batch overwrites the sums in host memory

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Make a DeepSpeed step inside the context act as after an overflow: clean up, keep the
        weights.
        """
        optimizer = self._optimizer

        def overflow(*_: Any, **__: Any) -> None:
            optimizer.overflow = True

        replaced = "_overflow_check_and_loss_scale_update" if self._stage == 3 else "check_overflow"
        checks = getattr(optimizer, "check_grad_overflow", None)
        setattr(optimizer, replaced, overflow)
        optimizer.check_grad_overflow = True
        try:
            yield
        finally:
            delattr(optimizer, replaced)
            optimizer.check_grad_overflow = checks

    def release_parameters(self) -> None:
        """Drop gathered copies of parameters that ZeRO 3 still keeps for the next modules of a
        pass.
        """
        if self._stage == 3:
            self._optimizer._partition_all_parameters()

    def spread_masters(self) -> None:
        """Copy the float32 weights to the model, after something else changed them.

        Collective inside the group.
        """
        optimizer = self._optimizer
        if self._stage < 3:
            optimizer.update_lp_params()
            return
        for index in range(len(self.masters)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        self.gather_persistent()

    def gather_persistent(self) -> None:
        """Gather again the small parameters that ZeRO 3 keeps whole in addition to their
        partitions.

        Collective inside the group.
        """
        persistent = self._optimizer.persistent_parameters
        for parameter in persistent:
            parameter.partition()
        if persistent:
            persistent[0].all_gather(persistent)

    def note_other_modules(self, parameters: Iterable[nn.Parameter], *, absent: bool) -> None:
        """Make ZeRO 3 learn again in which order modules run, because some come or go.

        It does not gather ``parameters`` after a step while they are ``absent``.
        """
        if self._stage < 3:
            return
        self.release_parameters()
        coordinator = self._optimizer._get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()
        persistent, some = self._optimizer.persistent_parameters, {id(parameter) for parameter in parameters}
        if absent:
            self._absent = [parameter for parameter in persistent if id(parameter) in some]
            persistent[:] = [parameter for parameter in persistent if id(parameter) not in some]
        else:
            persistent += self._absent

    def basic_groups(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        """Pairs of a parameter group of torch's optimizer and its partition."""
        param_groups = self._engine.basic_optimizer.param_groups
        indices = self._optimizer.sub_group_to_group_id if self._stage == 3 else range(len(param_groups))
        return [(param_groups[indices[index]], master) for index, master in enumerate(self.masters)]


def local_part(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of a model's parameter: its partition under ZeRO 3, else the whole
    parameter.
    """
    return parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter.detach()  # type: ignore[attr-defined]
