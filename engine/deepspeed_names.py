"""Names of ``deepspeed.DeepSpeedEngine`` beyond the training loop, and the model's own names."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from .backend import Backend
from .batch.size import BatchSize
from .config.schema import Config
from .deepspeed_facts import REFUSED, DeepSpeedMonitor, ThroughputTimer
from .engine_facts import EngineFacts
from .errors import ConfigError


def _refuse_call(name: str, *_: Any, **__: Any) -> NoReturn:
    raise ConfigError(f"engine.{name}: {REFUSED[name]}")


class DeepSpeedNames(EngineFacts):
    """Makes scripts for DeepSpeed run: names that the engine does not have are the model's.

    A method of DeepSpeed that is out of scope says so when it is called.
    """

    loader: Any
    global_steps: int
    micro_steps: int

    def __init__(self, backend: Backend, config: Config, batch: BatchSize, optimizer: Optimizer):
        super().__init__(backend, config, batch, optimizer)
        self.tput_timer = ThroughputTimer()
        self.monitor = DeepSpeedMonitor(config, writes=self.global_rank == 0)
        self._own_boundary: bool | None = None
        self._syncing = True

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute, as DeepSpeed does, for a name that the engine does not
        have.
        """
        if name.startswith("__") or "_backend" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in REFUSED:
            return functools.partial(_refuse_call, name)
        try:
            return getattr(self._backend.module, name)
        except AttributeError:
            model = type(self._backend.module).__name__
            raise AttributeError(f"neither the engine nor the model ({model}) has the attribute {name!r}") from None

    # -- batches -----------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last one before an optimizer step."""
        if self._own_boundary is not None:
            return self._own_boundary
        return (self.micro_steps + 1) % self._batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next micro-batches are the last before a step. None: the engine counts.

        The losses are divided by ``gradient_accumulation_steps`` in any case, as in DeepSpeed.
        """
        self._own_boundary = is_boundary
        if self._is_deepspeed:
            self.deepspeed.set_gradient_accumulation_boundary(is_boundary)
        if is_boundary is None:  # as if all earlier steps had accumulated as many micro-batches
            self.micro_steps = self.global_steps * self._batch.accumulation
            self._backend.continue_at(steps=self.global_steps, micro_steps=self.micro_steps, skipped=self.skipped_steps)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients are not averaged. ``step`` is an error inside."""
        with self._backend.no_sync():
            self._syncing = False
            try:
                yield
            finally:
                self._syncing = True

    # -- ranks -------------------------------------------------------------------------------------

    @property
    def dp_world_size(self) -> int:
        """The number of ranks that read different data."""
        return self.layout.mesh.data_ranks

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The group of the ranks that read different data. None in one process."""
        if self.layout.mesh.tp > 1:
            raise ConfigError("engine.data_parallel_group: with tensor parallelism, use engine.layout.mesh")
        return dist.group.WORLD if dist.is_initialized() else None

    # -- the configuration -----------------------------------------------------------------------

    def bfloat16_enabled(self) -> bool:
        return self.config.bf16.enabled

    def fp16_enabled(self) -> bool:
        return self.config.fp16.enabled

    def steps_per_print(self) -> int:
        return self.config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return self.config.wall_clock_breakdown

    # -- the model -------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Set the model's mode. In evaluation too, :attr:`module` is this group's subnetwork."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    def to(self, *args: Any, **kwargs: Any) -> DeepSpeedNames:
        """Do nothing if the model may stay as it is. The engine has put it on its device.

        Args:
            args: A device, a type or a tensor that has both, as for ``torch.nn.Module.to``.
            kwargs: ``device`` and ``dtype`` by name. Other options have no effect.

        Raises:
            ConfigError: Another device or another floating-point type is asked for.
        """
        asked = [*args, kwargs.get("device"), kwargs.get("dtype")]
        asked += [fact for value in args if isinstance(value, torch.Tensor) for fact in (value.device, value.dtype)]
        for value in asked:
            if isinstance(value, torch.dtype):
                self._refuse_other_dtype("to", value)
            elif isinstance(value, str | int | torch.device) and not isinstance(value, bool):
                device = torch.device(value)
                if device.type != self.device.type or device.index not in (None, self.device.index):
                    raise ConfigError(f"engine.to: the model stays on {self.device}, but {device} was asked for")
        return self

    def cuda(self, device: int | torch.device | None = None) -> DeepSpeedNames:
        """The same as ``to("cuda")``."""
        return self.to(
            "cuda" if device is None else torch.device("cuda", device) if isinstance(device, int) else device
        )

    def cpu(self) -> DeepSpeedNames:
        """The same as ``to("cpu")``."""
        return self.to("cpu")

    def half(self) -> DeepSpeedNames:
        return self._refuse_other_dtype("half", torch.float16)

    def bfloat16(self) -> DeepSpeedNames:
        return self._refuse_other_dtype("bfloat16", torch.bfloat16)

    def _refuse_other_dtype(self, method: str, dtype: torch.dtype) -> DeepSpeedNames:
        fp16, bf16 = self.config.fp16.enabled, self.config.bf16.enabled
        own = torch.float16 if fp16 else torch.bfloat16 if bf16 else torch.float32
        if dtype != own:
            raise ConfigError(f"engine.{method}: the model computes in {own}; choose another type with bf16 or fp16")
        return self

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the full model's ``generate``. Collective. Arguments may differ between ranks.

        If groups run only a part of the model, the full model is gathered for this call. To call it
        several times, use :meth:`full_model`.

        Raises:
            OutOfMemoryError: The full model does not fit on every rank.
        """
        if not self.runs_subnetwork:
            return self.module.generate(*args, **kwargs)  # type: ignore[operator]
        with self.full_model() as model:
            return model.generate(*args, **kwargs)  # type: ignore[operator]

    def _zero3_consolidated_16bit_state_dict(self) -> dict[str, torch.Tensor] | None:
        """:meth:`full_state_dict` in the type that the model computes in. Collective. None except
        on rank 0.
        """
        state = self.full_state_dict()
        own = torch.float16 if self.config.fp16.enabled else torch.bfloat16 if self.config.bf16.enabled else None
        if state is None or own is None:
            return state
        return {name: tensor.to(own) if tensor.is_floating_point() else tensor for name, tensor in state.items()}

    def destroy(self) -> None:
        """Finish a background checkpoint and drop gradients. Call it after the last step."""
        self.wait_for_checkpoint()
        self._backend.zero_grad()
        if self._is_deepspeed:
            self.deepspeed.destroy()
