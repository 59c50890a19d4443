"""DeepSpeed's live optimizers: loss scale, float32 copies, and ZeRO's partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class LossScale:
    """What one rank's optimizer of DeepSpeed's has losses multiplied by in float16, else 1. Ranks that skip alike have the same."""

    _SAVED = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self._record: Any = getattr(optimizer, "loss_scaler", None) or getattr(
            optimizer, "loss_scale_config", None
        )  # ZeRO's; stage 0's
        self._minimum = getattr(self._record, "min_scale", None) or getattr(self._record, "min_loss_scale", None)
        if hasattr(self._record, "raise_error_at_min_scale"):
            self._record.raise_error_at_min_scale = False  # training.max_skips says when a run ends

    @property
    def value(self) -> float:
        return 1.0 if self._record is None else float(self._record.cur_scale)

    @property
    def can_be_lowered(self) -> bool:
        """Whether an overflow may say no more than that the scale is too high."""
        return self._minimum is not None and self.value > self._minimum

    @contextmanager
    def raised_afterwards(self) -> Iterator[None]:
        """While inside, a step of DeepSpeed's divides by the scale that its losses were multiplied by. It would raise a scale that is
        due before it divides, and halve that step.
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
        """Scale and counts, as JSON; None where the scale does not change."""
        if self._minimum is None:
            return None
        return {key: getattr(self._record, key) for key in self._SAVED if hasattr(self._record, key)}

    def load(self, state: Mapping[str, float] | None) -> None:
        """Go on from :meth:`state`, that of another stage too."""
        for key in self.state() or ():
            if state is not None and key in state:
                setattr(self._record, key, state[key])


@contextmanager
def unstepped(optimizer: Optimizer) -> Iterator[None]:
    """While inside, a step of ``optimizer`` does nothing. DeepSpeed takes one at stage 0 in half precision as it builds, which would decay
    the weights and count as the first.
    """
    kept = vars(optimizer).get("step")  # torch's schedules put one there
    optimizer.step = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        if kept is None:
            del optimizer.step
        else:
            optimizer.step = kept


class MasterCopies:
    """Float32 copies of one rank's whole trained parameters, by which DeepSpeed steps at stage 0 in half precision."""

    def __init__(self, engine: Any, parameters: Mapping[str, nn.Parameter]):
        """``parameters``: the model's, by canonical name."""
        self._optimizer, self._parameters = engine.optimizer, parameters
        names = {id(parameter): name for name, parameter in parameters.items()}
        groups = zip(self._optimizer.fp16_groups, self._optimizer.fp32_groups, strict=True)
        self.masters: dict[str, torch.Tensor] = {
            names[id(parameter)]: master
            for group, masters in groups
            for parameter, master in zip(group, masters, strict=True)
        }

    def spread_masters(self) -> None:
        """The copies were changed from outside: bring the model's parameters up to date."""
        for name, master in self.masters.items():
            self._parameters[name].detach().copy_(master.detach())

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """While inside, a step of DeepSpeed's takes the gradient for an overflow: it cleans up and leaves the weights."""
        checker = self._optimizer.overflow_checker
        checker.check = lambda *_, **__: True
        try:
            yield
        finally:
            del checker.check


class ZeroState:
    """The flat tensors of one rank under ZeRO 1–3, by the index of DeepSpeed's parameter group."""

    def __init__(self, engine: Any, stage: int):
        self._engine, self._optimizer, self._stage = engine, engine.optimizer, stage

    @property
    def offloaded(self) -> bool:
        return bool(self._optimizer.offload_optimizer if self._stage == 3 else self._optimizer.cpu_offload)

    @property
    def masters(self) -> list[torch.Tensor]:
        """Float32 weights: this rank's partition of every group, padding included."""
        optimizer = self._optimizer
        return optimizer.fp32_partitioned_groups_flat if self._stage == 3 else optimizer.single_partition_of_fp32_groups

    @property
    def members(self) -> list[list[nn.Parameter]]:
        """The model's parameters of every group, in the order in which they are partitioned."""
        return self._optimizer.fp16_groups if self._stage == 3 else self._optimizer.bit16_groups

    def take_gradient(self, index: int) -> torch.Tensor:
        """The reduced gradient of this rank's partition of a group, flat float32. It is the optimizer's from now on: it steps by what
        becomes of it.
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
        """ZeRO 3: from now on ``call`` gets each parameter whose gradient was reduced, with what this rank keeps of it.

        None where that is padding alone. On CUDA it is called on DeepSpeed's stream of reductions.
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
        """Reduced gradients of this rank's partitions, each in as many pieces as DeepSpeed has it in."""
        if self._stage < 3:
            self._optimizer._wait_for_offload_copies()
        if self.offloaded:
            return [master.grad for master in self.masters if master.grad is not None]
        return [
            piece for index in range(len(self.masters)) for piece in self._optimizer.averaged_gradients.get(index) or ()
        ]

    def drop_gradients(self) -> None:
        """Forget the gradients of all micro-batches; DeepSpeed's ``zero_grad`` leaves what ZeRO 1 and 2 have reduced already."""
        optimizer = self._optimizer
        optimizer.zero_grad()
        if self._stage == 3:
            return
        for reduced in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            for index in reduced:
                reduced[index] = None
        if self.offloaded:
            optimizer.reset_cpu_buffers()
        optimizer.micro_step_id = -1  # what is accumulated in host memory is overwritten by the next micro-batch

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """While inside, a step of DeepSpeed's takes the gradient for an overflow: it cleans up and leaves the weights."""
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

    def spread_masters(self) -> None:
        """The float32 weights were changed from outside: bring the model's up to date. Collective inside the group."""
        optimizer = self._optimizer
        if self._stage < 3:
            optimizer.update_lp_params()
            return
        for index in range(len(self.masters)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        self.gather_persistent()

    def gather_persistent(self) -> None:
        """ZeRO 3 keeps small parameters whole beside their partitions: make them from these anew. Collective inside the group."""
        persistent = self._optimizer.persistent_parameters
        for parameter in persistent:
            parameter.partition()
        if persistent:
            persistent[0].all_gather(persistent)

    def basic_groups(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        """Every parameter group of torch's optimizer with its partition."""
        groups = self._engine.basic_optimizer.param_groups
        indices = self._optimizer.sub_group_to_group_id if self._stage == 3 else range(len(groups))
        return [(groups[indices[index]], master) for index, master in enumerate(self.masters)]


def local_part(parameter: nn.Parameter) -> torch.Tensor:
    """What this rank has in memory of a model's parameter: under ZeRO 3 its partition, else all of it."""
    return parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter.detach()  # type: ignore[attr-defined]
