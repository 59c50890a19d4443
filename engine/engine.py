"""The engine that a training loop calls, with the methods of ``deepspeed.DeepSpeedEngine``."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from .backend import Backend
from .batch.call import call_model, loss_of, tensors_in, to_device
from .batch.loss_weights import LossWeights, count_labels
from .batch.size import BatchSize
from .checkpoint.client_state import ClientState, read_client_state
from .checkpoint.load import find_together
from .checkpoint.resume import check_weights, resume
from .checkpoint.run_state import run_state
from .checkpoint.save import Saver
from .checkpoint.settings import (
    describe_changes,
    log_changes,
    settings_to_save,
    use_configured_rates,
)
from .checkpoint.storage.directory import check_tag
from .config.schema import Config
from .deepspeed_names import DeepSpeedNames
from .distributed.agreement import Ranks
from .distributed.call_watch import CallWatch, watch_calls
from .distributed.tensors import local_tensor, outside_inference_mode
from .errors import ConfigError, DataError
from .optim.param_groups import named_rates
from .optim.schedules import Schedule
from .optim.script_optimizers import OptimizedParameters, shortened

log = logging.getLogger("sdp")


@watch_calls
class SDPEngine(DeepSpeedNames):
    """Trains a group's subnetwork: ``loss = engine(batch); engine.backward(loss); engine.step()``.

    :func:`sdp.initialize` makes it. ``step`` acts at the accumulation boundary, as in DeepSpeed.
    """

    def __init__(
        self, backend: Backend, config: Config, batch: BatchSize, optimizer: Optimizer, scheduler: Schedule | Any | None
    ):
        super().__init__(backend, config, batch, optimizer)
        backend.attach(optimizer, config)
        self.calls: CallWatch | None = None  # of a script with several ranks
        self.local_training.follow(0)
        self.lr_scheduler = scheduler
        self.loader: Any = None
        self.training_dataloader: Any = None  # the third value of sdp.initialize, which ends with the epoch
        self.global_steps = self.micro_steps = self.global_samples = 0
        self._losses: list[torch.Tensor] = []  # of the micro-batches since the last step
        self._weights = LossWeights(self.data_ranks_here)  # of these micro-batches, if losses have weights
        self._counts: torch.Tensor | None = None  # labels of the last batch, with training.loss_weighting "tokens"
        self._reduced = False
        self._is_accumulating = False  # whether a step has begun, and its last micro-batch is still to come
        self._zeroed_in_vain = False  # whether a line has said so
        if not self._is_deepspeed:
            optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        self._optimized = self._find_optimized()
        self._saved = backend.state_to_save()
        self._saver = Saver(alone=self.world_size == 1, device=self.device)

    # -- training ----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result. A single mapping or tuple is spread over ``forward``'s arguments.

        If the model is on a GPU, tensors that are not there are copied to it, as FSDP2 does.
        """
        if self.device.type != "cpu" and any(part.device != self.device for part in tensors_in((args, kwargs))):
            with outside_inference_mode():
                # The script may fill the same page-locked memory again after the call.
                args, kwargs = to_device((args, kwargs), self.device, non_blocking=False)
        if self.config.training.loss_weighting == "tokens" and torch.is_grad_enabled():
            self._counts = count_labels(self.module, args, kwargs, self.data_ranks_here)
        if kwargs or len(args) != 1:
            # The reference cuts batches by rows, so arguments travel as one tree.
            return self._backend.forward(lambda module, batch: module(*batch[0], **batch[1]), (args, kwargs))
        return self._backend.forward(call_model, args[0])

    forward = __call__

    def backward(
        self,
        loss: Any,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        weight: float | torch.Tensor | Sequence[float] | None = None,
    ) -> torch.Tensor:
        """Accumulate the gradients of ``loss``, this rank's mean, and return the divided loss.

        At the accumulation boundary, gradients are averaged inside the group and among holders
        while this pass still runs.

        Args:
            loss: A scalar, or a model output that holds one.
            retain_graph: Must be False, because gradients are reduced while the graph is freed.
            scale_wrt_gas: Divide by the accumulation steps, as DeepSpeed does.
            weight: How much this loss counts, usually its number of labels. The gradient of a unit
                is Σ weight·∂loss / Σ weight over all micro-batches of the step on the ranks of its
                holders. A loss of weight 0 counts nothing, and one without a weight counts 1, or
                with ``training.loss_weighting`` "tokens" its labels. If one rank gives weights in a
                step, all must. The reference engine takes one number for each data rank.

        Raises:
            ConfigError: ``retain_graph`` is True, the loss has no gradient, or ``weight`` cannot be
                honoured.
            DataError: All weights of a step are 0.
        """
        if retain_graph:
            raise ConfigError(
                "backward: retain_graph is impossible: gradients are reduced as the graph is freed; add the losses up"
            )
        scalar = loss_of(loss)
        if not scalar.requires_grad:
            raise ConfigError(
                "backward: the loss has no gradient: it was computed without one, or from frozen parameters alone; "
                "call model.train() before, leave torch.no_grad(), and set requires_grad"
            )
        boundary = self.is_gradient_accumulation_boundary() and self._syncing
        scaled = scalar / self._batch.accumulation if scale_wrt_gas else scalar
        weights = self._weights_of(weight, scale_wrt_gas=scale_wrt_gas)
        if weights is None:
            self._backend.backward(scaled, boundary=boundary)
        else:
            self._backend.backward(scalar, boundary=boundary, weights=weights / self._weights.unit)
            self._weights.add(weights, self._backend.losses_here(scalar))
            if boundary:
                total, ranks = self._backend.weigh_gradients(self._weights.totals(), self._weights.unit)
                if not total and self._backend.local is None:
                    raise DataError("no micro-batch of this step has a label that counts; leave such a step out")
                self._weights.note_all(total, ranks)
        self._reduced = boundary
        self._losses.append(scalar.detach())
        if self.loader is not None and self.device.type == "cuda":
            self.loader.fetch_ahead()  # while the device computes; the next call waits for the norm
        return scaled

    def _weights_of(self, weight: Any, *, scale_wrt_gas: bool) -> torch.Tensor | None:
        """Return the weights of a micro-batch by data rank, or None if losses have none.

        Raises ConfigError if the weights cannot be honoured.
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
            weight = [1.0] * self.data_ranks_here
        if not scale_wrt_gas:
            raise ConfigError("backward: weight contradicts scale_wrt_gas=False; give the mean loss of the micro-batch")
        if self._is_deepspeed:
            raise ConfigError(
                'backward: weight is not available in this version with sdp.engine "deepspeed"; use "fsdp2"'
            )
        if self._losses and not self._weights:
            self._weights.begin_after(self._losses, self._batch.accumulation)
        return self._weights.checked(weight, self.device)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """At the accumulation boundary, clip, update the weights and advance the schedule.

        Elsewhere only the micro-batch is counted. If any group's gradient norm is NaN or infinite,
        all skip the step and count it: weights, optimizer state and schedule are unchanged.

        Raises:
            SpikeError: The step is a spike, and ``training.on_spike`` is "rollback" or "stop".
            NonFiniteError: More than ``training.max_skips`` steps in a row were skipped. Those at a
                dynamic loss scale above its minimum do not count.
        """
        if lr_kwargs:
            raise ConfigError("step: lr_kwargs cannot be honoured; leave lr_scheduler out, and step it in the script")
        if not self._syncing:
            raise RuntimeError("step() inside no_sync(): gradients are not averaged there; leave the block first")
        if self.is_gradient_accumulation_boundary():
            if not self._reduced:
                raise RuntimeError(
                    "step() at an accumulation boundary needs a backward() before it, outside no_sync(): call "
                    "engine.backward(loss) instead of loss.backward(), which averages nothing between groups"
                )
            self._warn_of_unfrozen()
            self._update()
            interval = self.config.sdp.check_interval
            if interval and self.global_steps % interval == 0:
                self.check_holders()
        else:
            self._backend.count_micro_batch()
            self._is_accumulating = True
        self.micro_steps += 1

    def _update(self) -> None:
        backend = self._backend
        gradients = backend.gradients()
        self._gradient_bytes = sum(local_tensor(gradient).nbytes for gradient in gradients)
        # The host waits for the device only here. It needs the norm, to skip the step or to clip.
        loss, count = torch.stack(self._losses).double().mean(), None
        if self._weights:
            loss, count = self._weights.weighted_loss(), self._weights.totals().sum().item()
            if backend.local is None:  # the mean of the ranks' values shall be the weighted mean
                loss = loss * (self.layout.mesh.data_ranks / self.data_ranks_here / self._weights.all)
        if backend.local is not None:
            self.local_training.add(self.global_steps + 1, backend.local.step(loss, self.lr_scheduler, count))
            self._count_step()
            for step, known in self.last_steps.note_local_steps():
                self._write_curves(step, known.loss, known.norm)
            return
        squared_norm, mean_loss = backend.squared_grad_norm_and_loss(loss)
        norm, may_lower = math.sqrt(squared_norm), backend.may_lower_loss_scale
        backend.check_gradients()
        # Norm and loss cover all groups, so all ranks decide the same.
        is_spike = self.spikes.check(self.global_steps + 1, mean_loss, norm, before_error=self.forget_micro_batches)
        if math.isfinite(norm) and not is_spike:
            update = backend.update(gradients, norm, self.lr_scheduler)
        else:
            scale = backend.loss_scale_state()
            update = backend.skip_update(norm)
            if is_spike:  # nothing overflowed
                backend.load_loss_scale(scale)
        self.last_steps.note(mean_loss, update.norm, skipped=update.skipped, counts=not is_spike, excused=may_lower)
        self._count_step()
        self._write_curves(self.global_steps, mean_loss, update.norm)
        self.last_steps.report_skips(self.global_steps, self.get_loss_scale())

    def _write_curves(self, step: int, loss: float, norm: float) -> None:
        """Write the monitors' points of ``step``. DeepSpeed's own engine writes its own ones."""
        if self._is_deepspeed or not self.monitor.enabled:
            return
        points = {"Train/Samples/train_loss": loss, "Train/Samples/lr": self.get_lr()[0], "Train/grad_norm": norm}
        if (scale := self.get_loss_scale()) is not None:
            points["Train/Samples/loss_scale"] = scale
        self.monitor.write_events([(name, value, step) for name, value in points.items()])

    def _count_step(self) -> None:
        """Count a step that was taken, or that all groups skipped."""
        self.forget_micro_batches()
        self.global_steps += 1
        self.global_samples += self._batch.train
        self.tput_timer.global_samples += self._batch.train
        self.local_training.after_step(self.global_steps)
        self._backend.use_masking(self.config.masking_schedule.at(self.global_steps + 1))

    def forget_micro_batches(self) -> None:
        """Drop the gradients and the losses since the last step, which is then made again."""
        self._is_accumulating = False
        self.zero_grad()
        self._losses, self._reduced = [], False
        self._weights.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients.

        Between the micro-batches of a step this has no effect, as in DeepSpeed: the engine drops
        the gradients after each step itself. ``optimizer.zero_grad`` is this method, too.
        """
        if self._is_accumulating:
            if self.global_rank == 0 and not self._zeroed_in_vain:
                log.warning(
                    "zero_grad() has no effect between the micro-batches of a step; engine.step() drops the gradients "
                    "after the last one"
                )
            self._zeroed_in_vain = True
            return
        self._backend.zero_grad()

    def _find_optimized(self) -> OptimizedParameters:
        """Warn of parameters that require a gradient and that the optimizer does not have."""
        infos, parameters = self.layout.parameters, self._backend.parameters
        trained = {name: p for name, p in parameters.items() if infos[name].trainable and not self._is_deepspeed}
        # DeepSpeed alone trains parameters that are unfrozen later.
        frozen = {name: p for name, p in parameters.items() if not infos[name].trainable}
        found = OptimizedParameters(
            trained, {} if self._is_deepspeed and self.layout.mesh.sdp == 1 else frozen, self._backend.basic_optimizer
        )
        self._warn_of_still(found.missing, "require a gradient, and the optimizer does not have them")
        return found

    def _warn_of_unfrozen(self) -> None:
        names = self._optimized.unfrozen()
        self._warn_of_still(names, "were frozen in sdp.initialize and are not trained, though the script unfroze them")

    def _warn_of_still(self, names: list[str], what: str) -> None:
        holders = {name: self.layout.parameters[name].holders[0] for name in names}
        mine = [
            name for name in names if self._is_reference or self.layout.mesh.rank(holders[name]) == self.global_rank
        ]
        if mine:
            log.warning(
                "%s: these parameters %s, so they will not move; unfreeze them before sdp.initialize, and give them "
                "to the optimizer", shortened(mine), what
            )  # fmt: skip

    def finish_round(self) -> bool:
        """With local steps: average what groups learned since the last average. Collective.

        Call it after a run's last step. Returns whether anything was averaged.
        """
        return self.local_training.finish(self.global_steps)

    # -- checkpoints -------------------------------------------------------------------------------

    @outside_inference_mode()
    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | float | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        keep: int | None = None,
        background: bool = False,
    ) -> bool:
        """Write weights, optimizer, schedule and data position to ``save_dir/tag``. Collective.

        Holders are compared first, because a unit is written once. An earlier checkpoint of the
        same tag is replaced only when the new one is complete.

        Args:
            save_dir: The directory of all checkpoints.
            tag: The name of this one; default ``step-N``.
            client_state: The caller's own state: JSON values and plain tensors.
            save_latest: Whether a load without a tag finds this checkpoint.
            exclude_frozen_parameters: Has no effect but a warning. A checkpoint has all weights.
            keep: Keep only this many of the checkpoints that are named after steps.
            background: Return when all is copied to host memory; write while training continues.
                :meth:`wait_for_checkpoint` raises the error of a save that failed.

        Raises:
            CheckpointError: Nothing could be written, or ``client_state`` has other values.
            HolderMismatchError: Holders of a unit have different weights or optimizer state.
        """
        if exclude_frozen_parameters and self.global_rank == 0:
            log.warning("save_checkpoint: exclude_frozen_parameters has no effect; a checkpoint has all weights")
        tag = check_tag(tag) if tag is not None else f"step-{self.global_steps}"
        client = ClientState(client_state)
        self.check_holders()
        state = run_state(self, self._backend, self._saved, self.rates_of_parameters(), client.values)
        tensors = self._saved.tensors() | self._saved.random_state()
        self._saver.save(
            Path(save_dir), tag, tensors, state, parameters=self.layout.wholes, keep=keep, background=background,
            files=client.files(), is_newest=save_latest,
        )  # fmt: skip
        return True

    def wait_for_checkpoint(self, *, block: bool = True) -> None:
        """End a background save and raise its error. Without ``block``, only if it is done."""
        self._saver.wait(block=block)

    @outside_inference_mode()
    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | float | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
        *,
        configured_rates: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Continue from ``load_dir/tag`` (default: the newest) of any layout. Collective.

        Learning rates are the checkpoint's, as in DeepSpeed, or with ``configured_rates`` the
        configured ones. ``load_module_only`` loads weights and buffers alone. Without
        ``load_optimizer_states``, the optimizer starts again. Rank 0 logs all settings that differ.

        Returns:
            The checkpoint's path and the client state. Without a checkpoint and without a tag:
            ``(None, {})``, with a warning.

        Raises:
            CheckpointError: The checkpoint is damaged, or of another model, optimizer or data set,
                or ``load_dir`` is itself a checkpoint.
        """
        if custom_load_fn is not None:
            raise ConfigError("load_checkpoint: a script's own custom_load_fn is not supported; leave it out")
        if not load_module_strict and self.global_rank == 0:
            log.warning("load_checkpoint: load_module_strict has no effect; a checkpoint must have all weights")
        ranks = Ranks(alone=self.world_size == 1)
        found = find_together(Path(load_dir), tag, ranks)
        if found is None:
            if self.global_rank == 0:
                log.warning("no checkpoint in %s; starting from the beginning", load_dir)
            return None, {}
        path, state = found
        client = read_client_state(path, state, ranks)
        names = self._backend.names_of_param_groups()
        configured = named_rates(self.optimizer, names)
        if load_module_only:
            resume(path, state, self._backend, self._saved, None, None, ranks=ranks, with_optimizer=False)
            self.forget_micro_batches()
            return str(path), client
        state = state if load_lr_scheduler_states else {**state, "scheduler": None}
        if self.config.sdp.sync is not None:  # what follows drops the state of the present round
            state = check_weights(path, state, self._saved, ranks)
        self.local_training.follow(state["global_steps"])
        in_round = resume(
            path, state, self._backend, self._saved, self.lr_scheduler, self.loader,
            ranks=ranks, with_optimizer=load_optimizer_states,
        )  # fmt: skip
        self.forget_micro_batches()
        self.spikes.load_state_dict(state["spikes"])
        self.local_training.load_state_dict(state["sync"], state["global_steps"], in_round=in_round)
        self.global_steps, self.global_samples = state["global_steps"], state["global_samples"]
        self.micro_steps = self.global_steps * self._batch.accumulation
        self.last_steps.start_at(state["skipped_steps"])
        self._backend.use_masking(self.config.masking_schedule.at(self.global_steps + 1))
        self._backend.continue_at(steps=self.global_steps, micro_steps=self.micro_steps, skipped=self.skipped_steps)
        if configured_rates:
            use_configured_rates(self.optimizer, names, configured, self.lr_scheduler)
        if self.global_rank == 0:
            if self.lr_scheduler is None and state["scheduler"] is not None:
                kept = "configured" if configured_rates else "saved"
                log.warning("%s: has a scheduler's state, and this run has no schedule: the %s rates hold", path, kept)
            own = settings_to_save(self.config, self.optimizer, names)
            changes = describe_changes(state["settings"], own, names)
            log_changes(path, changes, self.global_steps, configured_rates=configured_rates)
        return str(path), client
