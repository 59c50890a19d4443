"""``sdp.accelerator``: DeepSpeed's interface to the device."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

__path__: list[str] = []


class Accelerator:
    """The device of this machine: CUDA, or the CPU.

    Other names are those of ``torch.cuda`` or ``torch.cpu``.
    """

    def __init__(self) -> None:
        self._on_cuda = torch.cuda.is_available()
        self._torch: Any = torch.cuda if self._on_cuda else torch.cpu
        self._name = "cuda" if self._on_cuda else "cpu"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def device_name(self, device_index: int | None = None) -> str:
        """The device's name for torch, such as "cuda:1". The CPU has no index."""
        return self._name if device_index is None or not self._on_cuda else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A context in which this device is the current one."""
        return torch.device(self.device_name(device_index))

    def current_device(self) -> int:
        return torch.cuda.current_device() if self._on_cuda else 0

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        return torch.cuda.device_count() if self._on_cuda else 1

    def set_device(self, device_index: int) -> None:
        if self._on_cuda:
            torch.cuda.set_device(device_index)

    def is_available(self) -> bool:
        return True

    def communication_backend_name(self) -> str:
        return "nccl" if self._on_cuda else "gloo"

    def is_synchronized_device(self) -> bool:
        return not self._on_cuda

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self._on_cuda else True

    def is_fp16_supported(self) -> bool:
        return True

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory() if self._on_cuda else tensor

    def empty_cache(self) -> None:
        if self._on_cuda:
            torch.cuda.empty_cache()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def random(self) -> Any:
        return torch.random

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.cuda.get_rng_state() if self._on_cuda else torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        (torch.cuda if self._on_cuda else torch).set_rng_state(new_state)

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_allocated(device_index) if self._on_cuda else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(device_index) if self._on_cuda else 0

    def memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index) if self._on_cuda else 0

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.get_device_properties(device_index or 0).total_memory if self._on_cuda else 0

    def range_push(self, message: str) -> None:
        if self._on_cuda:
            torch.cuda.nvtx.range_push(message)

    def range_pop(self) -> None:
        if self._on_cuda:
            torch.cuda.nvtx.range_pop()


@cache
def get_accelerator() -> Accelerator:
    """The device of this machine."""
    return Accelerator()
