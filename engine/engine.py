"""The engine that a training loop talks to: the calls of ``deepspeed.DeepSpeedEngine``, whatever the backend."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from .backend import Backend
from .batch.call import call_model, loss_of
from .batch.size import BatchSize
from .checkpoint.directory import check_tag
from .checkpoint.load import find_together, keys_in, load
from .checkpoint.save import Saver
from .checkpoint.state import SavedState, set_random_state
from .config.schema import Config
from .distributed.agreement import Ranks, agree_on_rates, gather_json
from .distributed.tensors import local_tensor
from .engine_facts import EngineFacts
from .errors import CheckpointError, ConfigError, NonFiniteError
from .full_model.recalibration import tracks_statistics, with_statistics
from .optim import optimizer_state
from .optim.clip import clip_
from .optim.optimizer_state import materialise_state
from .optim.schedules import Schedule, fitting, of_another_kind
from .sync.consistency import check_holders

log = logging.getLogger("sdp")


class SDPEngine(EngineFacts):
    """Trains one group's subnetwork: ``loss = engine(batch); engine.backward(loss); engine.step()``.

    Made by :func:`sdp.initialize`. ``step`` acts at the accumulation boundary only, as DeepSpeed's does.
    """

    def __init__(
        self, backend: Backend, config: Config, batch: BatchSize, optimizer: Optimizer, scheduler: Schedule | Any | None
    ):
        super().__init__(backend, config, batch, optimizer)
        self.lr_scheduler = scheduler
        self.loader: Any = None
        self.training_dataloader: Any = None  # what sdp.initialize returned: it ends with the epoch
        self.global_steps = 0
        self.micro_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self._skipped_in_a_row = 0
        self._excused_in_a_row = 0  # of these, at a loss scale that could be lowered
        self._grad_norm: float | None = None
        self._losses: list[torch.Tensor] = []  # of the micro-batches since the last step
        self._loss: float | None = None
        self._reduced = False
        self._syncing = True
        self._saved = self._state_to_save()
        self._saver = Saver(alone=self.world_size == 1, device=self.device)

    # -- training --------------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for this rank's micro-batch. A single mapping or tuple is spread over ``forward``'s arguments."""
        if kwargs or len(args) != 1:
            # The reference cuts batches by rows, so arguments travel as one tree.
            return self._backend.forward(lambda module, batch: module(*batch[0], **batch[1]), (args, kwargs))
        return self._backend.forward(call_model, args[0])

    forward = __call__

    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Accumulate the gradients of ``loss`` (a scalar, or an output that holds one), the mean over this rank's micro-batch.

        At the accumulation boundary gradients are averaged within the group and among holders, overlapped with this pass.
        ``scale_wrt_gas``: divide by the accumulation steps, as DeepSpeed does. Raises ConfigError for ``retain_graph``.
        """
        if retain_graph:
            raise ConfigError(
                "backward: retain_graph cannot be honoured, gradients are reduced as the graph is freed; add the losses up"
            )
        scalar = loss_of(loss)
        boundary = self.is_gradient_accumulation_boundary() and self._syncing
        self._backend.backward(scalar / self._batch.accumulation if scale_wrt_gas else scalar, boundary=boundary)
        self._reduced = boundary
        self._losses.append(scalar.detach())
        if self.loader is not None and self.device.type == "cuda":
            self.loader.fetch_ahead()  # the device still computes; what comes next, the norm, is waited for
        return scalar

    def step(self) -> None:
        """At the accumulation boundary: clip by the global norm, update the weights, advance the schedule; else only count.

        A step whose gradient is no number, in whichever group, is skipped by all: weights, optimizer and schedule stay, and
        ``skipped_steps`` counts it. Raises NonFiniteError after more than ``training.max_skips`` of them in a row, of which those at a
        dynamic loss scale above its minimum do not count.
        """
        if not self._syncing:
            raise RuntimeError("step() inside no_sync(): gradients are not averaged there; leave the block first")
        if self.is_gradient_accumulation_boundary():
            if not self._reduced:
                raise RuntimeError("step() at an accumulation boundary needs a backward() before it, outside no_sync()")
            self._update()
        self.micro_steps += 1

    def _update(self) -> None:
        gradients = self._gradients()
        self._gradient_bytes = sum(local_tensor(gradient).nbytes for gradient in gradients)
        # The only wait for the device in a step: whether it is skipped, and by what it is clipped, the host must know.
        squared_norm, self._loss = self._backend.squared_grad_norm_and_loss(
            torch.stack(self._losses).double().mean()
        ).tolist()
        self._grad_norm = math.sqrt(squared_norm)
        if math.isfinite(self._grad_norm):  # the norm is of all groups' gradients, so all ranks decide alike
            self._apply(gradients, self._grad_norm)
            self._note_skip(False)
        else:
            excused = self._may_lower_scale
            self._skip()
            self.skipped_steps += 1
            self._note_skip(True, excused=excused)
        self._count_step()

    def _note_skip(self, skipped: bool, *, excused: bool = False) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        self._excused_in_a_row = self._excused_in_a_row + excused if skipped else 0

    @property
    def _may_lower_scale(self) -> bool:
        """Whether an overflow may say no more than that a loss scale is too high."""
        return False

    def _count_step(self) -> None:
        """A step was taken, or skipped by all."""
        self._forget_micro_batches()
        self.global_steps += 1
        self.global_samples += self._batch.train
        if self._skipped_in_a_row:
            self._tell_of_skip(self._grad_norm)
        interval = self.config.sdp.check_interval
        if interval and self.global_steps % interval == 0:
            self.check_holders()

    def _forget_micro_batches(self) -> None:
        self.zero_grad()
        self._losses, self._reduced = [], False

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._backend.parameters.values() if p.grad is not None]

    def _skip(self) -> None:
        """What a backend has to do about a step that is not taken."""

    def _state_to_save(self) -> SavedState:
        return SavedState(self._backend, self.optimizer, self.global_rank)

    def _apply(self, gradients: list[torch.Tensor], norm: float) -> None:
        if self.config.gradient_clipping > 0:
            clip_(gradients, norm, self.config.gradient_clipping)
        self._backend.shard_parameters()  # a forward pass since backward may have left gathered copies of the old weights
        self.optimizer.step()
        gradients.clear()
        self.zero_grad()  # their memory is free before casts of weights are made, to be sent
        self._backend.refresh(after_step=True)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def _tell_of_skip(self, norm: float | None) -> None:
        allowed, counted = self.config.training.max_skips, self._skipped_in_a_row - self._excused_in_a_row
        scale = self.get_loss_scale()
        if counted > allowed:
            at_scale = "" if scale is None else f" and loss scale {scale:g}"
            raise NonFiniteError(
                f"the gradient's norm is {norm} at step {self.global_steps}{at_scale}, for the {counted}. time in a row "
                f"(training.max_skips {allowed}); the weights are those after step {self.global_steps - self._skipped_in_a_row}: lower the "
                "learning rate, or resume from an earlier checkpoint"
            )
        log.warning("step %d was skipped by all groups: the gradient's norm is %s%s (%d in a row, training.max_skips %d)",
                    self.global_steps, norm, "" if scale is None else f", the loss scale is now {scale:g}", counted, allowed)  # fmt: skip

    def zero_grad(self) -> None:
        """Drop all gradients, those of earlier micro-batches too."""
        self._backend.zero_grad()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging them; ``step`` is an error inside."""
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at hand is the last one before an optimizer step."""
        return (self.micro_steps + 1) % self._batch.accumulation == 0

    def train(self, mode: bool = True) -> SDPEngine:
        self.module.train(mode)
        return self

    def eval(self) -> SDPEngine:
        return self.train(False)

    def get_global_grad_norm(self) -> float | None:
        """Norm of the full model's averaged gradient before clipping, at the last step; None before the first."""
        return self._grad_norm

    def get_loss_scale(self) -> float | None:
        """What losses are multiplied by in the step to come (``fp16``); None where they are not."""
        return None

    def get_loss(self) -> float | None:
        """Mean loss of the last step, over its micro-batches and all ranks; None before the first."""
        return self._loss

    @property
    def was_step_skipped(self) -> bool:
        """Whether the last optimizer step was skipped because its gradient was no number."""
        return self._skipped_in_a_row > 0

    # -- the full model --------------------------------------------------------------------------------------------------------

    def evaluate(self, batches: Iterable[Any]) -> float:
        """Token-weighted mean loss of the full model over the batches of all ranks. Collective.

        Units that this group lacks are streamed from their holders, one at a time for a chunk of batches (none are under backward
        masking); running statistics are those of :meth:`full_state_dict`. Ranks may bring different numbers of batches, at least one each.
        """
        return self._in_eval_mode(self._backend.evaluate, batches)

    def evaluate_subnetworks(self, batches: Iterable[Any]) -> list[float]:
        """Token-weighted mean loss of every group's own subnetwork over the batches of its own ranks, by group. Collective."""
        return self._in_eval_mode(self._backend.evaluate_subnetworks, batches)

    @contextmanager
    def recalibrated(self, batches: Iterable[Any]) -> Iterator[None]:
        """While inside, batch norms have the running statistics of the full model: to evaluate, to save and to export it. Collective.

        They are measured by a pass of the full model over ``batches``, equally many on every rank, of training data. Under forward
        masking those that a rank tracks are its own subnetwork's; afterwards it has these again. Without batch norm nothing is done.
        """
        if not tracks_statistics(self.layout.buffers):
            yield
            return
        with with_statistics(self.module, self._in_eval_mode(self._backend.batch_statistics, batches)):
            yield

    def _in_eval_mode(self, evaluation: Callable[[list[Any]], Any], batches: Iterable[Any]) -> Any:
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            return evaluation(list(batches))
        finally:
            self.module.train(modes[0][1])
            for module, training in modes:  # a user may have put single modules into evaluation mode
                module.training = training

    def full_state_dict(self) -> dict[str, torch.Tensor] | None:
        """On rank 0 the whole model's weights and persistent buffers under their canonical names, on the CPU; None elsewhere.

        Collective; tied parameters appear under each of their names. Units cross the network one parameter at a time.
        """
        state = {
            name: tensor.detach().cpu().clone() for name, tensor in self._backend.stream_state() if tensor is not None
        }
        if self.global_rank != 0:
            return None
        return state | {alias: state[name] for alias, name in self.layout.aliases.items()}

    # -- checkpoints -----------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        keep: int | None = None,
        background: bool = False,
    ) -> bool:
        """Write ``save_dir/tag`` (default ``step-N``): weights, optimizer, schedule, position in the data. Collective.

        ``client_state`` must be JSON. Holders are compared first, since equal names are written once. ``keep``: of the checkpoints
        named by steps only so many are left. ``background``: return once everything is copied to host memory and write while
        training goes on; :meth:`wait_for_checkpoint` tells how it ended. Raises CheckpointError or HolderMismatchError; an earlier
        checkpoint of the same tag is replaced only once the new one is whole.
        """
        if not save_latest or exclude_frozen_parameters:
            raise ConfigError(
                "save_checkpoint: a checkpoint is whole and becomes the newest; leave save_latest and exclude_frozen_parameters at "
                "DeepSpeed's defaults"
            )
        self.check_holders()
        state = {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
            "loss_scale": self._scale_state(),
            "mesh": self._saved.mesh_shape(),
            "placement": self.layout.placement.to_json(),
            "learning_rates": self.rates_of_parameters(),
            "scheduler": self._of_scheduler(self.lr_scheduler.state_dict()) if self.lr_scheduler is not None else None,
            "loader": self.loader.state_dict() if self.loader is not None else None,
            "client_state": dict(client_state or {}),
        }
        tag = check_tag(tag) if tag is not None else f"step-{self.global_steps}"
        tensors = self._saved.tensors() | self._saved.random_state()
        self._saver.save(Path(save_dir), tag, tensors, state, keep=keep, background=background)
        return True

    def wait_for_checkpoint(self, *, block: bool = True) -> None:
        """Wait for the checkpoint that is written in the background and raise its CheckpointError; unless ``block``, only if it ended."""
        self._saver.wait(block=block)

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Continue from ``load_dir/tag`` (default: the newest), written under any layout. Collective.

        Returns its path and the client state; ``(None, {})``, and says so, where there is no checkpoint and no tag was asked for. Raises
        CheckpointError for one that is damaged, or of another model, optimizer or data set, and for ``load_dir`` that is itself one.
        """
        everything = load_module_strict and load_optimizer_states and load_lr_scheduler_states and not load_module_only
        if not everything or custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint: a run goes on with all of its state; leave DeepSpeed's options at their defaults, and start from weights "
                "alone with training.init_from"
            )
        ranks = Ranks(alone=self.world_size == 1)
        found = find_together(Path(load_dir), tag, ranks)
        if found is None:
            if self.global_rank == 0:
                log.warning("no checkpoint in %s; starting from the beginning", load_dir)
            return None, {}
        path, state = found
        saved = keys_in(path)
        has_stepped = state["global_steps"] > state.get("skipped_steps", 0) or any(
            key.startswith("optimizer/") for key in saved
        )
        rates = state.get("learning_rates", {})
        # Before anything is changed:
        if self.loader is not None and state["loader"] is not None:
            self.loader.sampler.checked_position(state["loader"])
        if self.lr_scheduler is not None and of_another_kind(state["scheduler"], self.lr_scheduler.state_dict()):
            raise CheckpointError(
                f"{path}: has the state of another kind of learning-rate scheduler; take the one that wrote it"
            )
        ranks.agree(self._merged(path, rates))
        before = bool(self.optimizer.state)
        if has_stepped and not before:
            self._materialise_state()
        # Random numbers are a rank's own: they go on where the same ranks go on.
        random = {
            key: value
            for key, value in self._saved.random_state().items()
            if key in saved and state["mesh"] == self._saved.mesh_shape()
        }
        if not random and self.global_rank == 0:
            log.info("%s: is of another layout or device, so random numbers (dropout) start anew", path)
        names = {*self.layout.wholes, *self.layout.buffers}
        tensors, problem = {}, None
        try:
            tensors = self._saved.tensors(to_load=True)
        except CheckpointError as error:  # of an optimizer's state that no checkpoint can have
            problem = str(error)
        if not has_stepped:
            tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith("optimizer/")}
        try:
            ranks.agree(problem)
            load(path, tensors | random, state["files"], alone=self.world_size == 1, names=names)
        except CheckpointError:
            if not before:
                optimizer_state.clear(self._basic_optimizer)
            raise
        self._saved.loaded()
        self._forget_micro_batches()  # those of the step that is left
        if not has_stepped:
            optimizer_state.clear(self._basic_optimizer)
        self._backend.refresh(after_step=False)
        set_random_state(random)
        self.global_steps, self.global_samples = state["global_steps"], state["global_samples"]
        self.micro_steps = self.global_steps * self._batch.accumulation
        self.skipped_steps = state.get("skipped_steps", 0)
        self._note_skip(False)
        self._set_scale_state(state.get("loss_scale"))
        if self.lr_scheduler is not None and state["scheduler"] is not None:
            saved_schedule = self._of_scheduler(state["scheduler"])
            self.lr_scheduler.load_state_dict(fitting(saved_schedule, self.lr_scheduler.state_dict()))
        elif (self.lr_scheduler is None) != (state["scheduler"] is None) and self.global_rank == 0:
            which = ("the state of a scheduler", "none: the learning rates of then stay")
            which = (
                which if self.lr_scheduler is None else ("no scheduler's state", "one, which begins at its first step")
            )
            log.warning("%s: has %s, and this run has %s", path, *which)
        self._set_rates(rates)  # torch's schedulers do not set it when they are loaded
        if self.loader is not None and state["loader"] is not None:
            self.loader.load_state_dict(state["loader"])
        return str(path), state["client_state"]

    @property
    def _basic_optimizer(self) -> Optimizer:
        """That of the user's or of the configuration, under what an engine wraps it in."""
        return self.optimizer

    def _materialise_state(self) -> None:
        materialise_state(self._basic_optimizer)

    def _scale_state(self) -> dict[str, float] | None:
        """A dynamic loss scale and its counts."""
        return None

    def _set_scale_state(self, state: Mapping[str, float] | None) -> None:
        """Go on from a dynamic loss scale of a checkpoint, where there is one in both."""

    def _names_of_groups(self) -> list[list[str]]:
        """Of every parameter group of the optimizer, which of the full model's parameters it has something of."""
        names = {
            id(parameter): self.layout.parameters[name].canonical
            for name, parameter in self._backend.parameters.items()
        }
        groups = ([names.get(id(parameter)) for parameter in group["params"]] for group in self.optimizer.param_groups)
        return [
            [name for name in group if name is not None] for group in groups
        ]  # a user's may have parameters of no model

    def rates_of_parameters(self) -> dict[str, float]:
        """Learning rate of every trained parameter of the full model, on all ranks. Collective. Raises ConfigError where ranks differ."""
        groups = zip(self.optimizer.param_groups, self._names_of_groups(), strict=True)
        rates = {name: float(group["lr"]) for group, names in groups for name in names}
        return rates if self.world_size == 1 else agree_on_rates(rates, list(self.layout.wholes), self.device)

    def _of_scheduler(self, state: dict[str, Any]) -> dict[str, Any]:
        """What of a scheduler's state is true of any rank."""
        return state

    def _merged(self, path: Path, rates: Mapping[str, float] | Sequence[float]) -> str | None:
        """What is wrong where parameters of one group here had different learning rates."""
        if not isinstance(rates, Mapping):  # of checkpoints of earlier versions, by group
            return None
        for names in self._names_of_groups():
            known = [name for name in names if name in rates]
            other = next((name for name in known if rates[name] != rates[known[0]]), None)
            if other is not None:
                return (
                    f"{path}: has the learning rate {rates[known[0]]:g} for {known[0]} and {rates[other]:g} for {other}, which are in one "
                    "group of this optimizer; make its parameter groups as they were"
                )
        return None

    def _set_rates(self, rates: Mapping[str, float] | Sequence[float]) -> None:
        """``rates``: by parameter; of checkpoints of earlier versions by group, as the rank had them that wrote it."""
        for index, (group, names) in enumerate(zip(self.optimizer.param_groups, self._names_of_groups(), strict=True)):
            by_group = (
                {} if isinstance(rates, Mapping) else dict.fromkeys(names, rates[index]) if index < len(rates) else {}
            )
            known = rates if isinstance(rates, Mapping) else by_group
            rate = next((known[name] for name in names if name in known), group["lr"])
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)  # the optimizer's kernels read this one
            else:
                group["lr"] = rate

    # -- among ranks -----------------------------------------------------------------------------------------------------------

    def gather_facts(self, facts: Any) -> list[Any]:
        """The ``facts`` (a small JSON value) of every rank, in rank order. Collective. Tuples arrive as lists."""
        return gather_json(facts) if self.world_size > 1 else [facts]

    def check_holders(self) -> None:
        """Compare weights and optimizer state bitwise across holders; raises HolderMismatchError naming the unit. Collective."""
        if self.world_size > 1:
            check_holders(self.layout, self._stepped(), self.optimizer, self.global_rank, sharded=self._shards > 1)

    def _stepped(self) -> Mapping[str, torch.Tensor]:
        """This rank's parameters as the optimizer has them."""
        return self._backend.parameters
