"""The read-only side of the engine: facts about this rank, evaluation, and the full model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.optim import Optimizer

from .accounting.memory import StateBytes
from .backend import Backend
from .batch.call import checked_weights, target_count
from .batch.size import BatchSize
from .config.schema import Config
from .distributed.agreement import Ranks, agree_on_rates, gather_json, start_max
from .distributed.hosts import machine_id
from .distributed.tensors import outside_inference_mode
from .distributed.traffic import Traffic
from .environment.detect import detect
from .errors import ConfigError, DataError, shorten
from .full_model.evaluation import in_eval_mode
from .full_model.recalibration import tracks_statistics, with_statistics
from .full_model.warnings import Evaluation, warn_of_partial_pass, warn_of_partial_state
from .full_model.whole_copy import UncutModel, check_room, free_bytes
from .full_model.whole_files import write_configuration, write_weights
from .local_training import LastSteps, LocalTraining
from .optim.param_groups import named_rates
from .optim.spikes import SpikeDetector
from .placement.layout import Layout


class EngineFacts:
    """The read-only side of :class:`~sdp.engine.engine.SDPEngine`, with DeepSpeed's names."""

    monitor: Any
    global_steps: int

    def __init__(self, backend: Backend, config: Config, batch: BatchSize, optimizer: Optimizer):
        self._backend, self.config, self._batch, self.optimizer = backend, config, batch, optimizer
        self._gradient_bytes = 0  # at the last step
        environment = detect()
        self.local_rank = environment.local_rank if environment is not None else self.device.index or 0
        self.local_training = LocalTraining(backend, config.sdp.sync)
        self.last_steps = LastSteps(self.local_training, backend.layout.mesh.sdp, config.training.max_skips)
        training = config.training
        self.spikes = SpikeDetector(training.on_spike, training.spike_sigma, training.spike_window)
        self.uncut: UncutModel | None = None  # sdp.initialize sets it
        self.evaluation = Evaluation()
        if "forward" in config.sdp.maskings:
            warn_of_partial_state(self.module, lambda: self.runs_subnetwork)
            warn_of_partial_pass(self.module, self.evaluation, lambda: self.runs_subnetwork)

    @property
    def backend(self) -> Backend:
        """This process's part of the model. Tools and tests use it. Training loops do not."""
        return self._backend

    @property
    def module(self) -> nn.Module:
        """This rank's subnetwork. In the reference engine, the full model."""
        return self._backend.module

    @property
    def deepspeed(self) -> Any:
        """DeepSpeed's own engine of this group. Raises AttributeError with other backends."""
        if self._backend.library_engine is None:
            raise AttributeError(f"sdp.engine {self.config.sdp.engine!r} has no engine of DeepSpeed")
        return self._backend.library_engine

    @property
    def runs_subnetwork(self) -> bool:
        """Whether :attr:`module` runs only a part of the model, in this group or in another one."""
        held = self.layout.placement.holders
        partial = any(len(holders) < self.layout.mesh.sdp for holders in held)
        return partial and not self.layout.keeps_frozen and not self._is_reference

    @property
    def layout(self) -> Layout:
        return self._backend.layout

    @property
    def traffic(self) -> Traffic:
        """Bytes sent by this rank."""
        return self._backend.traffic

    @property
    def exposed_reduction_seconds(self) -> float:
        """Seconds since the start of reductions between groups that backward did not hide.

        On CUDA they are known only with ``wall_clock_breakdown``.
        """
        return self._backend.exposed_seconds

    @property
    def device(self) -> torch.device:
        return self._backend.device

    @property
    def parameters_here(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by canonical name. Sharded ones are DTensors."""
        return self._backend.parameters

    @property
    def frozen_here(self) -> dict[str, nn.Parameter]:
        """This rank's frozen copies by canonical name. Sharded ones are DTensors."""
        return self._backend.frozen

    @property
    def data_ranks_here(self) -> int:
        """The number of data ranks that this process computes for: 1, or in the reference all."""
        return self._backend.data_ranks_here

    @property
    def global_rank(self) -> int:
        return 0 if self._is_reference else dist.get_rank()

    @property
    def world_size(self) -> int:
        """The number of processes that train together. A reference engine is one process."""
        return 1 if self._is_reference else dist.get_world_size()

    def gather_facts(self, facts: Any) -> list[Any]:
        """All ranks' ``facts`` (small JSON), in rank order. Tuples become lists. Collective."""
        return gather_json(facts) if self.world_size > 1 else [facts]

    def start_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start to find the maximum of each value over all ranks. Collective.

        Returns a function that waits for the maxima and returns them. The message has 8 bytes for
        each value. :attr:`traffic` does not count it.
        """
        return start_max(values) if self.world_size > 1 else lambda: list(values)

    def check_holders(self) -> None:
        """Compare weights and optimizer state bit by bit between holders. Collective.

        Raises HolderMismatchError, which names the unit.
        """
        self._backend.check_holders()

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's full averaged gradient before clipping. None before a step.
        With local steps: the mean over the groups, for which this waits, as :meth:`get_loss`."""
        return self.last_steps.norm

    def get_loss(self) -> float | None:
        """The last step's mean loss over micro-batches and ranks. None before the first step."""
        return self.last_steps.loss

    @property
    def skipped_steps(self) -> int:
        """Steps skipped for a NaN or infinite gradient; with local steps, of any group."""
        return self.last_steps.skipped_until()

    def skipped_until(self, step: int) -> int:
        """:attr:`skipped_steps` after ``step``, one of the last steps."""
        return self.last_steps.skipped_until(step)

    def get_loss_scale(self) -> float | None:
        """The factor of the next step's losses (``fp16``). None without loss scaling."""
        return self._backend.loss_scale

    @property
    def was_step_skipped(self) -> bool:
        """Whether the last optimizer step was skipped because a gradient was NaN or infinite."""
        return self.last_steps.was_skipped

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group, for the next step."""
        return self._backend.learning_rates()

    def train_batch_size(self) -> int:
        return self._batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self._batch.accumulation

    def predicted_state_bytes(self) -> StateBytes:
        """Parameter, gradient, optimizer and frozen bytes of this rank, by the placement."""
        return self._backend.predicted_state_bytes()

    def measured_state_bytes(self) -> StateBytes:
        """Bytes of this rank's tensors as they are now. Gradients count as at the last step."""
        return self._backend.measured_state_bytes(self._gradient_bytes)

    def planned_traffic(self, step: int | None = None) -> Traffic:
        """Bytes that this rank sends in one training step, by the placement. None in the reference.

        With local steps (``sdp.sync``) they depend on the ``step``. Without it, they are a round's.

        DeepSpeed's own messages inside the group are not included. ``comms_logger`` counts them.
        """
        return self._backend.planned_traffic(self._batch.accumulation, step)

    def traffic_formula(self) -> str:
        """The bytes that this rank sends between groups in a step, as a formula with numbers."""
        return self._backend.traffic_formula()

    # -- the full model ----------------------------------------------------------------------------

    def evaluate(self, batches: Iterable[Any], weights: Iterable[float] | None = None) -> float:
        """The weighted mean loss of the full model over the batches of all ranks. Collective.

        Holders send the units that this group lacks, one at a time for a chunk of batches. Under
        backward masking nothing is sent. Running statistics are those of :meth:`full_state_dict`.
        Each rank needs at least one batch. Their numbers may differ.

        Args:
            batches: This rank's batches. In the reference engine, those of all ranks.
            weights: A number for each batch, not below 0. By default the number of labels that are
                not -100, without the first of each row if the model says that it shifts labels
                (``loss_type``, see docs/your_model.md).

        Raises:
            ConfigError: There are not as many weights as batches, or one of them is not a number
                from 0.
            DataError: All weights are 0.
        """
        batches = list(batches)
        counts = [target_count(self.module, b) for b in batches] if weights is None else checked_weights(weights)
        if len(counts) != len(batches):
            raise ConfigError(f"evaluate: {len(counts)} weights for {len(batches)} batches; give one for each batch")
        with self.local_training.anchored():
            loss = self._evaluate(lambda each: self._backend.evaluate(each, counts), batches)
        if math.isnan(loss) and not self._any(counts):
            raise DataError(
                "evaluate: no batch of any rank has a label that counts; give batches with labels, or weights"
            )
        if self.monitor.enabled and not self._is_deepspeed:
            self.monitor.write_events([("Eval/loss", loss, self.global_steps)])
        return loss

    def _any(self, counts: Sequence[float]) -> bool:
        """Whether any count of any rank is above 0. Collective."""
        return bool(self.start_max([int(any(counts))])()[0])

    def evaluate_subnetworks(self, batches: Iterable[Any]) -> list[float]:
        """Mean loss per token of each group's subnetwork, over its ranks' batches. Collective."""
        return self._evaluate(self._backend.evaluate_subnetworks, batches)

    @contextmanager
    def recalibrated(self, batches: Iterable[Any]) -> Iterator[None]:
        """A context in which batch norms have the full model's running statistics. Collective.

        Use it to evaluate, save or export the full model. A pass of the full model over ``batches``
        of training data, as many on each rank, measures the statistics. Afterwards each rank has
        its subnetwork's own ones again. Without batch norm nothing happens.
        """
        if not tracks_statistics(self.layout.buffers):
            yield
            return
        with (
            self.local_training.anchored(),
            with_statistics(self.module, self._evaluate(self._backend.batch_statistics, batches)),
        ):
            yield

    def _evaluate(self, evaluation: Callable[[list[Any]], Any], batches: Iterable[Any]) -> Any:
        with in_eval_mode(self.module), self.evaluation.running():
            return evaluation(list(batches))

    @contextmanager
    def full_model(self, dtype: torch.dtype | None = None) -> Iterator[nn.Module]:
        """A context with a copy of the full model in evaluation mode, on every rank. Collective.

        The copy is an ordinary module with the weights of this moment. Each rank may call it when
        it likes, for example to generate text. The end of the context frees its memory.

        Args:
            dtype: The type of the parameters; by default, that of the computation.

        Raises:
            OutOfMemoryError: The copy does not fit on every rank.
            ModelError: The model cannot be copied.
        """
        if self.uncut is None:
            with in_eval_mode(self.module):
                yield self.module
            return
        kind: torch.dtype = getattr(torch, self.config.precision) if dtype is None else dtype
        needed, free = self.uncut.bytes_needed(kind), free_bytes(self.device)
        facts = self.gather_facts([free, machine_id()])
        check_room(needed, [each[0] for each in facts], [each[1] for each in facts], self.device)
        with outside_inference_mode(), self.local_training.anchored():
            values = self.uncut.gather(self._backend.stream_state(), kind, self.device)
        with self.uncut.filled(values, kind, self.device, self.layout) as model:
            yield model

    def full_state_dict(self) -> dict[str, torch.Tensor] | None:
        """Whole weights and persistent buffers by canonical name, on rank 0's CPU. Collective.

        Other ranks get None. Tied parameters appear under each of their names. Parameters cross
        the network one at a time.
        """
        with outside_inference_mode(), self.local_training.anchored():
            streamed = ((name, tensor) for name, tensor in self._backend.stream_state() if tensor is not None)
            state = {name: tensor.detach().cpu().clone() for name, tensor in streamed}
        if self.global_rank != 0:
            return None
        return state | {alias: state[name] for alias, name in self.layout.aliases.items()}

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the whole model's weights to ``save_directory/model.safetensors``. Collective.

        A Hugging Face model's configuration is written too, for ``from_pretrained``.
        """
        self._write_whole(Path(save_directory), "model.safetensors", None)

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "model.safetensors", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the model in the precision of the computation. Collective.

        A name that ends in .bin, .pt or .pth gets a file for ``torch.load``, as DeepSpeed writes
        it, and any other name gets safetensors. ``exclude_frozen_parameters`` must be False.
        """
        if exclude_frozen_parameters:
            raise ConfigError("save_16bit_model: exclude_frozen_parameters must be False: the file has all weights")
        self._write_whole(Path(save_dir), save_filename, getattr(torch, self.config.precision))
        return True

    def _write_whole(self, directory: Path, name: str, dtype: torch.dtype | None) -> None:
        state, problem = self.full_state_dict(), None
        if state is not None:
            try:
                write_weights(state, self.layout.aliases, directory / name, dtype)
                write_configuration(self.module, directory)
            except (OSError, RuntimeError, SafetensorError) as error:  # torch.save raises RuntimeError
                problem = f"{directory}: the model cannot be written ({shorten(error)}); choose another directory"
        # Ranks also wait here, so that none reads the files before they are complete.
        Ranks(alone=self.world_size == 1).agree(problem)

    def rates_of_parameters(self) -> dict[str, float]:
        """The learning rate of every trained parameter of the full model, on all ranks. Collective.

        Raises ConfigError if ranks have different rates for one parameter.
        """
        rates = named_rates(self.optimizer, self._backend.names_of_param_groups())
        return rates if self.world_size == 1 else agree_on_rates(rates, list(self.layout.wholes), self.device)

    @property
    def _is_reference(self) -> bool:
        return self.config.sdp.in_one_process

    @property
    def _is_deepspeed(self) -> bool:
        return self.config.sdp.engine == "deepspeed"
