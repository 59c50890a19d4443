"""The operators that a step is traced with: those that torch runs on the kind of device that a plan is for.

Fake tensors are on the CPU wherever a plan is made, because a torch that was built without CUDA cannot differentiate tensors of another
device. Among the operators of the models here, one differs between the devices and keeps other tensors for backward: RMSNorm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

Device = Literal["cpu", "cuda"]
DEVICES: tuple[Device, ...] = ("cpu", "cuda")


def device_here() -> Device:
    """Of this machine, as the engine would take it."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def operators_of(device: Device) -> Iterator[None]:
    """Inside, fake tensors on the CPU go through the operators of ``device``.

    On CUDA ``torch.rms_norm`` is one kernel, ``aten::_fused_rms_norm``, which keeps its input and one float32 number per row. On a CPU
    torch composes it from operators that keep float32 copies of the input (aten/src/ATen/native/layer_norm.cpp). torch decides by whether
    the device has a kernel, so this registers one for the CPU while the context lasts, with torch's own formula for the derivative
    (tools/autograd/derivatives.yaml) and torch's own shapes. The kernel never runs; real tensors raise RuntimeError.
    """
    if device == "cpu":
        yield
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_fused_rms_norm", _shapes_alone, "CPU")
        yield


def _shapes_alone(*_: Any) -> Any:
    raise RuntimeError("RMSNorm of real tensors amid a trace, which has the shapes of a CUDA kernel and no kernel")
