"""The engine's calls over the DeepSpeed backend: DeepSpeed's own engine steps, counts and writes to its monitors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ...accounting.memory import StateBytes
from ...distributed.traffic import Traffic
from ...engine import SDPEngine
from ...optim.clip import clip_
from ...optim.schedules import shared
from ...sync.consistency import check_loss_scale
from .backend import DeepSpeedBackend
from .state import DeepSpeedState, check_holders, materialise_state, measured_bytes, predicted_bytes


class DeepSpeedSDPEngine(SDPEngine):
    """:class:`SDPEngine` over ``deepspeed.DeepSpeedEngine``, which is ``engine.deepspeed``."""

    _backend: DeepSpeedBackend

    @property
    def deepspeed(self) -> Any:
        """DeepSpeed's own engine of this group."""
        return self._backend.deepspeed

    def step(self) -> None:
        between = not self.is_gradient_accumulation_boundary()
        super().step()
        if between:
            self.deepspeed.step()  # it counts micro-batches

    def _update(self) -> None:
        if self._backend.installed:
            super()._update()
        else:
            self._step_of_deepspeed()

    def _step_of_deepspeed(self) -> None:
        """With one group the step is DeepSpeed's alone, its norm and its clipping; a gradient that is not finite is skipped."""
        backend, skipped = self._backend, self.deepspeed.skipped_steps
        excused = self._may_lower_scale
        self._gradient_bytes = sum(gradient.nbytes for gradient in backend.gradients())
        totals = backend.squared_grad_norm_and_loss(torch.stack(self._losses).double().mean()).tolist()
        self._grad_norm, self._loss = math.sqrt(totals[0]), totals[1]
        if math.isfinite(self._grad_norm):
            self.deepspeed.step()
            norm = self.deepspeed.get_global_grad_norm()
            # In float16 DeepSpeed's is that of scaled gradients at stage 0, and by the scale of the next step at stage 3.
            if norm is not None and backend.compute_dtype != torch.float16:
                self._grad_norm = float(norm)
        else:
            backend.skip_step()
        self._note_skip(self.deepspeed.skipped_steps > skipped, excused=excused)
        self.skipped_steps = self.deepspeed.skipped_steps
        self._count_step()

    @property
    def _may_lower_scale(self) -> bool:
        return self._backend.scale.can_be_lowered

    def get_loss_scale(self) -> float | None:
        return self._backend.scale.value if self.config.fp16.enabled else None

    def _gradients(self) -> list[torch.Tensor]:
        return self._backend.gradients()

    def _apply(self, gradients: list[torch.Tensor], norm: float) -> None:
        if self.config.gradient_clipping > 0:
            clip_(gradients, norm, self.config.gradient_clipping)
        self._backend.take_step(norm)

    def _skip(self) -> None:
        self._backend.skip_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        if self._backend.stage >= 2:
            raise RuntimeError(
                f"no_sync() is not for ZeRO stage {self._backend.stage}, which reduces the gradients of every micro-batch"
            )
        with self.deepspeed.no_sync(), super().no_sync():
            yield

    # -- state -----------------------------------------------------------------------------------------------------------------

    def _state_to_save(self) -> DeepSpeedState:
        return DeepSpeedState(self._backend, self.optimizer, self.global_rank)

    def _scale_state(self) -> dict[str, float] | None:
        return self._backend.scale.state()

    def _set_scale_state(self, state: Mapping[str, float] | None) -> None:
        self._backend.scale.load(state)
        self._check_loss_scale()

    def _check_loss_scale(self) -> None:
        if self.config.fp16.enabled:
            check_loss_scale(f"{self._backend.scale.value} {self._backend.scale.state()}", self.device)

    @property
    def _basic_optimizer(self) -> Optimizer:
        return self.deepspeed.basic_optimizer

    def _materialise_state(self) -> None:
        if self._backend.zero is None:
            super()._materialise_state()
        else:
            materialise_state(self._backend)

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None, *args: Any, **kwargs: Any
    ) -> tuple[str | None, dict[str, Any]]:
        found = super().load_checkpoint(load_dir, tag, *args, **kwargs)
        engine = self.deepspeed
        engine.global_steps, engine.micro_steps = self.global_steps, self.micro_steps
        engine.global_samples = self.global_steps * engine.train_batch_size()  # DeepSpeed counts those of its group
        engine.skipped_steps = self.skipped_steps
        return found

    def get_lr(self) -> list[float]:
        """Learning rate of every parameter group of the user's, the first's where this rank has nothing of it; DeepSpeed has one a unit."""
        groups = self.optimizer.param_groups
        first = {options: groups[index]["lr"] for index, options in reversed(list(enumerate(self._backend.options)))}
        return [first.get(options, groups[0]["lr"]) for options in range(self._backend.options_count)]

    def _of_scheduler(self, state: dict[str, Any]) -> dict[str, Any]:
        return shared(state)  # its groups are of the units that a rank holds

    def _names_of_groups(self) -> list[list[str]]:
        infos = self.layout.parameters
        return [[infos[name].canonical for name in bundle.names] for bundle in self._backend.bundles]

    def check_holders(self) -> None:
        self._check_loss_scale()
        if self._backend.zero is None:
            super().check_holders()
        elif self._backend.installed:
            check_holders(self._backend)

    def _stepped(self) -> Mapping[str, torch.Tensor]:
        return self._backend.stepped

    # -- facts -----------------------------------------------------------------------------------------------------------------

    def measured_state_bytes(self) -> StateBytes:
        return measured_bytes(self._backend, self._gradient_bytes)

    def predicted_state_bytes(self) -> StateBytes:
        return predicted_bytes(self._backend)

    def planned_traffic(self) -> Traffic:
        """Bytes that this rank sends in a step but for DeepSpeed's messages inside its group, which ``comms_logger`` counts."""
        return self._backend.planned_traffic()

    def traffic_formula(self) -> str:
        between = sum(
            nbytes for kind, nbytes in self.planned_traffic().by_kind().items() if kind.startswith("between groups")
        )
        return f"the shards that holders average = {between:,} (inside groups DeepSpeed's own are not counted)"
