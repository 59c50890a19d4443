"""The operators that a step is traced with: those that torch runs on the kind of device that a plan is for.

Fake tensors lie on the CPU wherever a plan is made, because a torch that was built without CUDA cannot differentiate tensors of another device. Of
what models here are made of, one operator is another there and keeps other tensors for backward: RMSNorm.
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

    On CUDA ``torch.rms_norm`` is one kernel, ``aten::_fused_rms_norm``, which keeps its input and a float32 number a row; on a CPU torch
    composes it of operators that keep float32 copies of the input (aten/src/ATen/native/layer_norm.cpp). Whether an operator is composed or
    differentiated as one depends on whether the device has a kernel of it. So one is registered while this lasts: with torch's own formula for
    its derivative (tools/autograd/derivatives.yaml) and torch's own shapes. It never runs; real tensors raise RuntimeError.
    """
    if device == "cpu":
        yield
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_fused_rms_norm", _shapes_alone, "CPU")
        yield


def _shapes_alone(*_: Any) -> Any:
    raise RuntimeError("RMSNorm of real tensors amid a trace, which has the shapes of a CUDA kernel and no kernel")
