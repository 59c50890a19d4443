"""``sdp.utils``: the helpers of ``deepspeed.utils`` that scripts use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..accounting.quantities import format_bytes

__path__: list[str] = []

logger = logging.getLogger("sdp")


class RepeatingLoader:
    """Reads a loader again and again, without an end."""

    def __init__(self, loader: Iterable[Any]):
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next batch. Raises StopIteration only if the loader is empty."""
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on these ranks. None or -1 means all ranks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def print_rank_0(message: Any, *_: Any, **__: Any) -> None:
    """Log ``message`` on rank 0."""
    log_dist(str(message), [0])


def instrument_w_nvtx(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``: its calls are not marked in profiles."""
    return function


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory in use on rank 0, if ``force``."""
    if force and torch.cuda.is_available():
        allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        log_dist(f"{message}: {format_bytes(allocated, 'GiB')} in use, {format_bytes(peak, 'GiB')} at most", [0])


class OnDevice:
    """A context in which tensors are made on ``device``, such as "meta", with ``dtype`` where it is
    not "meta".
    """

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True):
        self._device = torch.device(device) if enabled else None
        self._dtype, self._before = dtype, torch.get_default_dtype()

    def __enter__(self) -> None:
        if self._device is not None:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._device is not None:
            self._device.__exit__(*error)
            torch.set_default_dtype(self._before)


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor:
    """The whole value of a parameter of ``engine.module``. Collective inside the group."""
    return param.full_tensor() if isinstance(param, DTensor) else param


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The whole gradient of a parameter of ``engine.module``. Collective inside the group."""
    grad = param.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad
