"""``sdp.utils``: the helpers of ``deepspeed.utils`` that scripts use."""

from __future__ import annotations

import logging as _logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch as _torch  # an import of sdp.utils.torch sets the name "torch" of this module
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..accounting.quantities import format_bytes
from ..distributed.join import init_distributed
from .leaf_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)
from .namespace import attributes

__all__ = [
    "get_z3_leaf_modules", "init_distributed", "set_z3_leaf_module", "set_z3_leaf_modules", "unset_z3_leaf_modules",
    "z3_leaf_module", "z3_leaf_parameter",
]  # fmt: skip
__path__: list[str] = []

logger = _logging.getLogger("sdp")


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


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = _logging.INFO) -> None:
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
    _torch.manual_seed(seed)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory in use on rank 0, if ``force``."""
    if force and _torch.cuda.is_available():
        allocated, peak = _torch.cuda.memory_allocated(), _torch.cuda.max_memory_allocated()
        log_dist(f"{message}: {format_bytes(allocated, 'GiB')} in use, {format_bytes(peak, 'GiB')} at most", [0])


class OnDevice:
    """A context in which tensors are made on ``device``, such as "meta", with ``dtype`` where it is
    not "meta".
    """

    def __init__(self, dtype: _torch.dtype, device: str = "meta", enabled: bool = True):
        self._device = _torch.device(device) if enabled else None
        self._dtype, self._before = dtype, _torch.get_default_dtype()

    def __enter__(self) -> None:
        if self._device is not None:
            self._before = _torch.get_default_dtype()
            _torch.set_default_dtype(self._dtype)
            self._device.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._device is not None:
            self._device.__exit__(*error)
            _torch.set_default_dtype(self._before)


def safe_get_full_fp32_param(param: _torch.Tensor) -> _torch.Tensor:
    """The whole value of a parameter of ``engine.module``. Collective inside the group."""
    return param.full_tensor() if isinstance(param, DTensor) else param


def safe_get_full_grad(param: _torch.Tensor) -> _torch.Tensor | None:
    """The whole gradient of a parameter of ``engine.module``. Collective inside the group."""
    grad = param.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def move_to_device(item: Any, device: _torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return ``item`` with its tensors on ``device``.

    Args:
        item: A tensor, or lists, tuples and dictionaries of tensors.
        device: The device.
        criterion_func: Tensors for which it is true are moved in place.
    """
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    if isinstance(item, list | tuple):
        return type(item)(move_to_device(value, device, criterion_func) for value in item)
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    return item.to(device)


logging = sys.modules[__name__]  # deepspeed.utils.logging, which has the logger
_WHOLE = "shards of the optimizer are not handed out; use engine.full_state_dict() or engine.full_model()"
_OWN = "the engine does this itself"
__getattr__ = attributes(
    __name__,
    dict.fromkeys(
        "safe_get_full_optimizer_state safe_set_full_fp32_param safe_set_full_optimizer_state safe_set_full_grad "
        "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state safe_set_local_fp32_param "
        "safe_set_local_grad safe_set_local_optimizer_state tensor_fragment fragment_address get_full_hp_param "
        "get_full_hp_grad set_full_hp_param get_hp_fragment_mapping link_hp_params PartitionedTensor".split(),
        _WHOLE,
    )
    | dict.fromkeys("clip_grad_norm_ clip_gradients get_global_norm get_grad_norm CheckOverflow".split(), _OWN)
    | {
        "DeepSpeedDataLoader": "engine.deepspeed_io makes a loader, and so does training_data of sdp.initialize",
        "ensure_directory_exists": "use pathlib.Path.mkdir",
    },
)
