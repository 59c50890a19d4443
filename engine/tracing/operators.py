"""Selects the operators that a step is traced with.

They are those that torch runs on the kind of device that a plan is for. Fake tensors are always on
the CPU, because a torch built without CUDA cannot differentiate tensors of another device. Among
the operators of the models here, two differ between the devices: RMSNorm keeps other tensors for
backward, and only a GPU has attention of documents without a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

Device = Literal["cpu", "cuda"]
DEVICES: tuple[Device, ...] = ("cpu", "cuda")


def device_here() -> Device:
    """Return the kind of device that the engine would use on this machine."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def operators_of(device: Device) -> Iterator[None]:
    """Make fake tensors on the CPU use the operators of ``device`` inside this context.

    On CUDA, ``torch.rms_norm`` is one kernel, ``aten::_fused_rms_norm``. It keeps its input and one
    float32 number per row. On a CPU, torch composes the function from operators that keep float32
    copies of the input (aten/src/ATen/native/layer_norm.cpp).

    torch uses the kernel if the device has one. So this context registers a kernel for the CPU. The
    formula for its derivative (tools/autograd/derivatives.yaml) and its shapes are torch's own. The
    kernel never runs. Real tensors raise RuntimeError. Models look in the same way for flash
    attention, which has documents of different lengths (sdp.models.layers).
    """
    if device == "cpu":
        yield
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        for operator in ("_fused_rms_norm", "_flash_attention_forward"):
            library.impl(operator, _shapes_alone, "CPU")
        yield


def _shapes_alone(*_: Any) -> Any:
    raise RuntimeError("an operator of real tensors amid a trace, which has the shapes of a CUDA kernel and no kernel")
