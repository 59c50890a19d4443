"""``sdp.checkpointing``: DeepSpeed's activation checkpointing, by torch.utils.checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils import checkpoint as of_torch

from .accelerator import get_accelerator
from .namespace import attributes

_settings: dict[str, Any] = {}
MODEL_PARALLEL = "model-parallel-rng"


def configure(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Remember that a script has configured checkpointing. DeepSpeed's options have no effect here.

    Activations are never partitioned or moved to the host. Random numbers are restored in any case.
    """
    _settings.update(options, configured=True)


def is_configured() -> bool:
    """Whether :func:`configure` was called."""
    return bool(_settings)


def reset() -> None:
    """Forget the configuration."""
    _settings.clear()


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` and recompute its activations in backward.

    Random numbers are the same in both passes. All arguments may be of any type.
    """
    return of_torch.checkpoint(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Do nothing."""


def set_num_layers(nlayers: int) -> None:
    """Do nothing."""


class CudaRNGStatesTracker:
    """Random number generators by name, next to the device's own one."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all generators."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Make a generator. Raises ValueError if the name or the seed is in use already."""
        if name in self.states_ or seed in self.seeds_:
            raise ValueError(f"the generator {name!r} or the seed {seed} exists already")
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.states_[name] = device.get_rng_state()
        self.seeds_.add(seed)
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """A context in which the device draws from this generator.

        Raises ValueError if there is no generator of this name.
        """
        if name not in self.states_:
            raise ValueError(f"there is no generator {name!r}; call add, or model_parallel_cuda_manual_seed, before")
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


@cache
def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The generators of this process."""
    return CudaRNGStatesTracker()


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed this rank's generator, and a second one with another seed for :meth:`fork`.

    In DeepSpeed the second seed differs between the ranks of tensor parallelism. The engine cuts
    matrices itself, so a script sees one such rank here.
    """
    get_accelerator().manual_seed(seed)
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(MODEL_PARALLEL, seed + 2718)  # DeepSpeed's offset


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed
__getattr__ = attributes(
    __name__,
    dict.fromkeys(("CheckpointFunction", "CheckpointFunctionIterator"), "call checkpointing.checkpoint"),
)
