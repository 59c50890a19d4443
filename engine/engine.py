"""The engine that a training loop calls, with the methods of ``deepspeed.DeepSpeedEngine``."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from .accounting.memory import StateBytes, measured_state, predicted_state
from .batch.call import LossWeights, call_model, count_labels, loss_of, tensors_in, to_device
from .batch.size import BatchSize
from .checkpoint.checkpoints import Checkpoints
from .config.schema import Config
from .deepspeed_names import REFUSED, DeepSpeedMonitor, ThroughputTimer, refuse_call, refuse_other_place
from .distributed.agreement import agree_on_rates, gather_json, start_max
from .distributed.collectives import Traffic, local_tensor, outside_inference_mode
from .distributed.heartbeat import CallWatch
from .environment.detect import detect
from .errors import ConfigError, DataError
from .full_model.access import FullModel
from .full_model.whole_copy import UncutModel
from .local_steps import LocalTraining
from .optim.clip import LastSteps, LossScaler, SpikeDetector, clip_
from .optim.param_groups import named_rates
from .optim.schedules import Schedule, scale_rates
from .optim.script_optimizers import OptimizedParameters, refuse_steps_of_script
from .placement.layout import Layout
from .stores.store import GroupStore, frozen_copies
from .sync.between import BetweenGroups

log = logging.getLogger("sdp")


class SDPEngine:
    """Trains a group's subnetwork: ``loss = engine(batch); engine.backward(loss); engine.step()``.

    :func:`sdp.initialize` returns an engine. As in DeepSpeed, ``step`` updates weights only after
    the last micro-batch of a step, and attributes that the engine does not have are looked up in
    the model. The engine also has the methods of
    :class:`~sdp.engine.full_model.access.FullModel` and
    :class:`~sdp.engine.checkpoint.checkpoints.Checkpoints`.
    """

    def __init__(
        self,
        store: GroupStore,
        config: Config,
        batch: BatchSize,
        optimizer: Optimizer,
        scheduler: Schedule | Any | None,
        uncut: UncutModel | None = None,
    ):
        self.store, self.config, self._batch, self.optimizer = store, config, batch, optimizer
        self.calls: CallWatch | None = None  # of a script with several ranks
        self.groups = BetweenGroups(store, config)
        self.loss_scaler = LossScaler.of(config)
        tensors = {id(one.tensor): (one.unit, one.holders) for one in store.stepped.values()}
        self.rate_scale = scale_rates(store.optimizer, config.sdp.lr_scale, self.layout.placement, tensors)
        refuse_steps_of_script(store.optimizer)
        environment = detect()
        self.local_rank = environment.local_rank if environment is not None else self.device.index or 0
        self.local_training = LocalTraining(self.groups, config.sdp.sync)
        training = config.training
        self.last_steps = LastSteps(self.local_training, self.layout.mesh.sdp, training.max_skips)
        self.spikes = SpikeDetector(training.on_spike, training.spike_sigma, training.spike_window)
        self._schedule = config.masking_schedule if config.masking_schedule.ends else None
        self.groups.enter_phase(config.masking_schedule.at(1))
        self._full = FullModel(self.groups, config, uncut)
        self.evaluation = self._full.evaluation
        self.evaluate_subnetworks, self.recalibrated = self._full.evaluate_subnetworks, self._full.recalibrated
        self.full_model, self.generate = self._full.full_model, self._full.generate
        self.full_state_dict = self._full.full_state_dict
        self._zero3_consolidated_16bit_state_dict = self._full.consolidated_16bit_state_dict  # DeepSpeed's name
        self.save_pretrained, self.save_16bit_model = self._full.save_pretrained, self._full.save_16bit_model
        self._checkpoints = Checkpoints(self)
        self.save_checkpoint = self._checkpoints.save_checkpoint
        self.load_checkpoint = self._checkpoints.load_checkpoint
        self.wait_for_checkpoint = self._checkpoints.wait_for_checkpoint
        self.tput_timer = ThroughputTimer()
        self.monitor = DeepSpeedMonitor(config, writes=self.global_rank == 0)
        self.local_training.follow(0)
        self.lr_scheduler = scheduler
        self.loader: Any = None
        self.training_dataloader: Any = None  # the third value of sdp.initialize, which ends with the epoch
        self.global_steps = self.micro_steps = self.global_samples = 0
        self._gradient_bytes = 0  # at the last step
        self._losses: list[torch.Tensor] = []  # of the micro-batches since the last step
        self._weights: LossWeights | None = None  # of these micro-batches, if losses have weights
        self._counts: torch.Tensor | None = None  # labels of the last batch, with training.loss_weighting "tokens"
        self._own_boundary: bool | None = None
        self._syncing, self._reduced = True, False
        self._is_accumulating = False  # whether a step has begun, and its last micro-batch is still to come
        self._zeroed_in_vain = False  # whether a line has said so
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        known = {name for one in store.stepped.values() if one.group is not None for name in one.names}
        self._optimized = OptimizedParameters(store.parameters, known, self.layout, store.optimizer, self.global_rank)

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute if the engine has none of this name, as DeepSpeed does."""
        if name.startswith("__") or "store" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # a property, whose own AttributeError says more
        if name in REFUSED:
            return functools.partial(refuse_call, name)
        try:
            return getattr(self.store.module, name)
        except AttributeError:
            model = type(self.store.module).__name__
            raise AttributeError(f"neither the engine nor the model ({model}) has the attribute {name!r}") from None

    # -- training ----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of this group's subnetwork, and return the model's result.

        A single mapping, tuple or list is unpacked into arguments, if the model's ``forward`` takes
        these arguments. Tensors on other devices are copied to the model's GPU.
        """
        if self.device.type != "cpu" and any(part.device != self.device for part in tensors_in((args, kwargs))):
            with outside_inference_mode():
                # The script may fill the same page-locked memory again after the call.
                args, kwargs = to_device((args, kwargs), self.device, non_blocking=False)
        if self.config.training.loss_weighting == "tokens" and torch.is_grad_enabled():
            self._counts = count_labels(self.module, args, kwargs)
        if kwargs or len(args) != 1:
            return self.store.forward(lambda module, batch: module(*batch[0], **batch[1]), (args, kwargs))
        return self.store.forward(call_model, args[0])

    def backward(
        self,
        loss: Any,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        weight: float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Accumulate the gradients of ``loss``. In the last micro-batch of a step, average them.

        Gradients are averaged inside the group and among holders while this pass still runs.

        Args:
            loss: The mean loss of this rank's micro-batch, or a model output that has it.
            retain_graph: Must be False, because gradients are reduced while the graph is freed.
            scale_wrt_gas: Divide the loss by ``gradient_accumulation_steps``, as DeepSpeed does.
            weight: How much this loss counts, usually its number of labels. The gradient of a unit
                is Σ weight·∂loss / Σ weight over all micro-batches of the step on the ranks of the
                unit's holders. A loss with weight 0 does not count. The default is 1, or the number
                of labels if ``training.loss_weighting`` is "tokens". If one rank gives weights in a
                step, all ranks must.

        Returns:
            The loss, divided by ``gradient_accumulation_steps`` if ``scale_wrt_gas`` is True.

        Raises:
            ConfigError: ``retain_graph`` is True, the loss has no gradient, or ``weight``
                contradicts another setting.
            DataError: All weights of a step are 0.
        """
        if retain_graph:
            raise ConfigError(
                "backward: retain_graph is not possible, because gradients are reduced while the graph is freed; "
                "call backward once, with the sum of the losses"
            )
        scalar = loss_of(loss)
        if not scalar.requires_grad:
            raise ConfigError(
                "backward: the loss has no gradient: it was computed in torch.no_grad() or in evaluation mode, or "
                "only from frozen parameters; call model.train() before, leave torch.no_grad(), and set requires_grad"
            )
        boundary = self.is_gradient_accumulation_boundary() and self._syncing
        scaled = scalar / self._batch.accumulation if scale_wrt_gas else scalar
        counted = self._weight_of(weight, scale_wrt_gas=scale_wrt_gas)
        if counted is None:
            self.groups.backward(scaled, self.get_loss_scale(), boundary=boundary)
        else:
            weights, weight = counted
            weighted = scalar * (weight / weights.unit).to(scalar.dtype)
            self.groups.backward(weighted, self.get_loss_scale(), boundary=boundary)
            weights.add(weight, scalar)
            if boundary:
                total, ranks = self.groups.weigh_gradients(weights.total(), weights.unit)
                if not total and not self.groups.is_local:
                    raise DataError(
                        "no micro-batch of this step has a label that counts; leave out batches without labels"
                    )
                weights.note_all(total, ranks)
        self._reduced = boundary
        self._losses.append(scalar.detach())
        if self.loader is not None and self.device.type == "cuda":
            self.loader.fetch_ahead()  # while the device computes; the next call waits for the norm
        return scaled

    def _weight_of(self, weight: Any, *, scale_wrt_gas: bool) -> tuple[LossWeights, torch.Tensor] | None:
        """Return the weights of the step so far, and the weight of this micro-batch.

        If losses have no weights, the result is None. Raises ConfigError for a weight that cannot
        be honoured.
        """
        chosen = self.config.training.loss_weighting
        counts, self._counts = self._counts, None
        if weight is None:
            weight = counts if chosen == "tokens" else None
        elif chosen == "ranks":
            raise ConfigError('backward: weight contradicts training.loss_weighting "ranks"; leave one of them out')
        if weight is None:
            if not self._weights:
                return None
            weight = 1.0
        if not scale_wrt_gas:
            raise ConfigError(
                "backward: with a weight, scale_wrt_gas must be True; give the mean loss of the micro-batch"
            )
        if self._weights is None:
            self._weights = LossWeights()
        if self._losses and not self._weights:
            self._weights.begin_after(self._losses, self._batch.accumulation)
        return self._weights, self._weights.checked(weight, self.device)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """After the last micro-batch of a step, clip, update weights and advance the schedule.

        After other micro-batches, this only counts the micro-batch. If the gradient norm of any
        group is NaN or infinite, all groups skip the step: weights, optimizer state and schedule
        stay. With local steps (``sdp.sync``), only the group itself skips.

        Raises:
            SpikeError: Loss or norm spiked, and ``training.on_spike`` is "rollback" or "stop".
            NonFiniteError: More than ``training.max_skips`` consecutive steps were skipped. Skips
                that lower a dynamic loss scale do not count.
        """
        if lr_kwargs:
            raise ConfigError("step: lr_kwargs is not supported; leave lr_scheduler out, and step it in the script")
        if not self._syncing:
            raise RuntimeError("step() was called inside no_sync(), which averages nothing; leave the block first")
        if not self.is_gradient_accumulation_boundary():
            self._is_accumulating = True
            self.micro_steps += 1
            return
        if not self._reduced:
            raise RuntimeError(
                "step() at an accumulation boundary needs a backward() before it, outside no_sync(): call "
                "engine.backward(loss) instead of loss.backward(), which averages nothing between groups"
            )
        self._optimized.warn_of_unfrozen()
        groups, scaler = self.groups, self.loss_scaler
        gradients = groups.gradients()
        self._gradient_bytes = sum(local_tensor(gradient).nbytes for gradient in gradients)
        # The host waits for the device only here. It needs the norm, to skip the step or to clip.
        loss, count = torch.stack(self._losses).double().mean(), None
        if self._weights:
            loss, count = self._weights.weighted_loss(), self._weights.total().item()
            if not groups.is_local:  # so that the mean over the ranks is the weighted mean
                loss = loss * (self.layout.mesh.data_ranks / self._weights.all)
        max_norm = self.config.gradient_clipping
        if groups.local is not None:
            del gradients
            update = groups.local.step(loss, self.lr_scheduler, max_norm, count)
            self.local_training.add(self.global_steps + 1, update)
            self._count_step()
            for step, known in self.last_steps.note_local_steps():
                self._write_curves(step, known.loss, known.norm)
        else:
            norm, mean_loss = groups.norm_and_loss(loss, 1.0 if scaler is None else scaler.cur_scale)
            may_lower = scaler is not None and scaler.can_be_lowered
            # Norm and loss cover all groups, so all ranks decide the same.
            is_spike = self.spikes.check(self.global_steps + 1, mean_loss, norm, before_error=self.forget_micro_batches)
            is_skipped = is_spike or not math.isfinite(norm)
            if not is_skipped:
                if scaler is not None:
                    torch._foreach_mul_([local_tensor(gradient) for gradient in gradients], 1 / scaler.cur_scale)
                if max_norm > 0:
                    clip_(gradients, norm, max_norm)
                del gradients
                groups.prepare_step()
                self.store.step()
            groups.forget_gradients()  # frees their memory before the weights are cast and sent
            if not is_skipped and self.lr_scheduler is not None:
                self.lr_scheduler.step()
            every = self.config.sdp.copies.refresh_every
            if (self.global_steps + 1) % every == 0 and not (is_skipped and every == 1):
                groups.refresh_trained()
            if scaler is not None and not is_spike:  # in a spike nothing overflowed
                scaler.update(overflow=is_skipped)
            self.last_steps.note(mean_loss, norm, skipped=is_skipped, counts=not is_spike, excused=may_lower)
            self._count_step()
            self._write_curves(self.global_steps, mean_loss, norm)
            self.last_steps.report_skips(self.global_steps, self.get_loss_scale())
        interval = self.config.sdp.check_interval
        if interval and self.global_steps % interval == 0:
            self.check_holders()
        self.micro_steps += 1

    def _write_curves(self, step: int, loss: float, norm: float) -> None:
        if self.monitor.enabled:
            self.monitor.write_step(step, loss, norm, self.get_lr()[0], self.get_loss_scale())

    def _count_step(self) -> None:
        self._begin_step()
        self.global_steps += 1
        self.global_samples += self._batch.train
        self.tput_timer.global_samples += self._batch.train
        if self.config.sdp.sync is not None:
            self.global_steps = self.local_training.after_step(self.global_steps, self.lr_scheduler)
        self._use_masking()

    def _use_masking(self) -> None:
        """Enter the phase of the next step. Collective."""
        if self._schedule is not None:
            masking = self._schedule.at(self.global_steps + 1)
            if masking != self.layout.masking:
                self.groups.enter_phase(masking)

    def go_on_after(self, steps: int, samples: int, skipped: int) -> None:
        """Set the counts of a loaded checkpoint, and the masking of the next step. Collective."""
        self.global_steps, self.global_samples = steps, samples
        self.micro_steps = steps * self._batch.accumulation
        self.last_steps.start_at(skipped)
        self._use_masking()

    def forget_micro_batches(self) -> None:
        """Drop gradients and losses since the last step. The caller repeats the micro-batches."""
        self._begin_step()
        self.groups.forget_gradients()

    def _begin_step(self) -> None:
        self._is_accumulating, self._losses, self._reduced = False, [], False
        if self._weights is not None:
            self._weights.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. A script need not call this, because :meth:`step` drops them.

        As in DeepSpeed, a call between the micro-batches of a step has no effect.
        ``optimizer.zero_grad`` is this method, too.
        """
        if self._is_accumulating:
            if self.global_rank == 0 and not self._zeroed_in_vain:
                log.warning(
                    "zero_grad() has no effect between the micro-batches of a step; engine.step() drops the gradients "
                    "after the last one"
                )
            self._zeroed_in_vain = True
            return
        self.groups.forget_gradients()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last one before an optimizer step."""
        if self._own_boundary is not None:
            return self._own_boundary
        return (self.micro_steps + 1) % self._batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next micro-batch is the last one before an optimizer step.

        If ``is_boundary`` is None, the engine counts micro-batches itself again. As in DeepSpeed,
        losses are divided by ``gradient_accumulation_steps`` in any case.
        """
        self._own_boundary = is_boundary
        if is_boundary is None:  # as if all earlier steps had accumulated as many micro-batches
            self.micro_steps = self.global_steps * self._batch.accumulation

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward averages no gradients. :meth:`step` is an error inside."""
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    def finish_round(self) -> bool:
        """Average all weights that local steps have changed since the last average. Collective.

        Call this after the last step with ``sdp.sync``. Returns whether weights were averaged.
        """
        return self.local_training.finish(self.global_steps)

    # -- the full model ----------------------------------------------------------------------------

    def evaluate(
        self, batches: Iterable[Any], weights: Iterable[float] | None = None, paths: Iterable[Any] | None = None
    ) -> float:
        """Return the mean loss of the full model over the batches of all ranks. Collective.

        Holders send units that this group does not hold, one after the other, so no rank needs
        memory for the whole model. With exact frozen copies, nothing is sent. Batch norms use
        running statistics that are averaged over ranks, as in :meth:`full_state_dict`.

        Args:
            batches: This rank's batches, at least one. Ranks may have different numbers of batches.
            weights: A number ≥ 0 for each batch, its weight in the mean. By default the number of
                labels over which the model averages its loss (docs/evaluation.md).
            paths: With ``sdp.paths``, the path of each batch, or for each batch a list with the
                path of each row.

        Raises:
            ConfigError: Weights or paths are not valid, or are not as many as the batches.
            DataError: All weights are 0.
        """
        loss = self._full.evaluate(list(batches), weights, paths)
        if self.monitor.enabled:
            self.monitor.write_events([("Eval/loss", loss, self.global_steps)])
        return loss

    # -- facts -------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The subnetwork of this rank's group. Its parameters may be shards."""
        return self.store.module

    @property
    def deepspeed(self) -> Any:
        """DeepSpeed's own engine, if ``sdp.engine`` is "deepspeed". Otherwise AttributeError."""
        found = getattr(self.store, "deepspeed", None)
        if found is None:
            raise AttributeError(f"sdp.engine {self.config.sdp.engine!r} has no engine of DeepSpeed")
        return found

    @property
    def runs_subnetwork(self) -> bool:
        """Whether a group's :attr:`module` lacks units of the full model, or has inexact copies."""
        return self._full.is_partial

    @property
    def layout(self) -> Layout:
        return self.store.layout

    @property
    def traffic(self) -> Traffic:
        """The counter of the bytes that this rank sends."""
        return self.store.context.traffic

    @property
    def exposed_reduction_seconds(self) -> float:
        """Seconds that this rank has waited for averages between groups after backward had ended.

        On CUDA the number is right only with ``wall_clock_breakdown``.
        """
        return self.groups.exposed_seconds

    @property
    def device(self) -> torch.device:
        return self.store.context.device

    @property
    def parameters_here(self) -> dict[str, nn.Parameter]:
        """By name, the parameters that this group holds. With several shards they are DTensors."""
        return self.store.parameters

    @property
    def frozen_here(self) -> dict[str, nn.Parameter]:
        """By name, frozen copies of parameters that only other groups hold; DTensors if sharded."""
        self.groups.finish_refresh()
        return frozen_copies(self.store)

    @property
    def global_rank(self) -> int:
        return self.store.context.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in all groups together."""
        return self.layout.mesh.world_size

    @property
    def dp_world_size(self) -> int:
        """The number of ranks that read different data."""
        return self.layout.mesh.data_ranks

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks that read different data."""
        if self.layout.mesh.tp > 1:
            raise ConfigError("engine.data_parallel_group: with tensor parallelism, use engine.layout.mesh instead")
        return dist.group.WORLD

    gather_facts = staticmethod(gather_json)
    start_max = staticmethod(start_max)

    def check_holders(self) -> None:
        """Raise HolderMismatchError if holders differ in weights or optimizer state. Collective."""
        if (local := self.groups.local) is None:
            self.groups.check_holders(self.store.optimizer)
        else:
            self.groups.check_holders(local.outer.optimizer, local.anchors, local.outer.anchors)

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the full model's gradient in the last step, before clipping.

        The result is None before the first step. With local steps, it is the mean of the groups'
        norms, for which this method waits.
        """
        return self.last_steps.norm

    def get_loss(self) -> float | None:
        """Return the mean loss of all ranks in the last step. None before the first step."""
        return self.last_steps.loss

    @property
    def skipped_steps(self) -> int:
        """The number of steps that any group skipped, because its gradient was NaN or infinite."""
        return self.last_steps.skipped_until()

    def skipped_until(self, step: int) -> int:
        """Count the skipped steps up to ``step``, which is the last step or a recent local step."""
        return self.last_steps.skipped_until(step)

    @property
    def was_step_skipped(self) -> bool:
        """Whether the last optimizer step was skipped because a gradient was NaN or infinite."""
        return self.last_steps.was_skipped

    def get_loss_scale(self) -> float | None:
        """Return the loss scale of the next step with ``fp16``. None without loss scaling."""
        return None if self.loss_scaler is None else self.loss_scaler.cur_scale

    def get_lr(self) -> list[float]:
        """Return the learning rate of every parameter group for the next step."""
        return self.groups.learning_rates()

    def rates_of_parameters(self) -> dict[str, float]:
        """Return the learning rates of the full model's trained parameters, by name. Collective.

        Raises ConfigError if two ranks have different rates for the same parameter.
        """
        rates = named_rates(self.store.optimizer, self.groups.names_of_param_groups())
        return rates if self.world_size == 1 else agree_on_rates(rates, list(self.layout.wholes), self.device)

    def train_batch_size(self) -> int:
        return self._batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self._batch.accumulation

    def bfloat16_enabled(self) -> bool:
        return self.config.bf16.enabled

    def fp16_enabled(self) -> bool:
        return self.config.fp16.enabled

    def steps_per_print(self) -> int:
        return self.config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return self.config.wall_clock_breakdown

    def predicted_state_bytes(self) -> StateBytes:
        """Return the bytes of weights, gradients and optimizer state that this rank should have."""
        return predicted_state(self.store, self.config)

    def measured_state_bytes(self) -> StateBytes:
        """Return the measured bytes of weights, the last step's gradients and optimizer state."""
        return measured_state(self.groups, self._gradient_bytes)

    # -- names of DeepSpeed and torch --------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Set the training or evaluation mode. The engine always runs this group's subnetwork."""
        self.module.train(mode)
        return self

    eval = functools.partialmethod(train, False)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Do nothing. Raises ConfigError if the arguments ask for another device or dtype."""
        refuse_other_place(
            "to", [*args, kwargs.get("device"), kwargs.get("dtype")], self.device, self.store.context.compute_dtype
        )
        return self

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Do the same as ``to("cuda")``."""
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    cpu = functools.partialmethod(to, "cpu")
    half = functools.partialmethod(to, torch.float16)
    bfloat16 = functools.partialmethod(to, torch.bfloat16)

    def destroy(self) -> None:
        """Wait until the last checkpoint is written, and drop gradients. Call this at the end."""
        self.wait_for_checkpoint()
        self.groups.forget_gradients()
        if (deepspeed := getattr(self.store, "deepspeed", None)) is not None:
            deepspeed.destroy()
