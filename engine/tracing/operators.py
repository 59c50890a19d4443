"""Lets a trace on the CPU use the operators of the device that a plan is for.

Fake tensors are always on the CPU, because a torch built without CUDA cannot differentiate tensors
of another device. Two operators of this project's models differ between the devices: RMSNorm keeps
other tensors for backward, and only a GPU has attention of documents without a mask.
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
    """A context in which fake tensors on the CPU use the operators of ``device``.

    On CUDA, ``torch.rms_norm`` is one kernel, ``aten::_fused_rms_norm``. It keeps its input and one
    float32 number per row. On a CPU, torch composes the function from operators that keep float32
    copies of the input (aten/src/ATen/native/layer_norm.cpp).

    torch uses the kernel if the device has one. So this context registers a kernel for the CPU. The
    kernel never runs on fake tensors: shapes and the formula of the derivative are torch's own
    (tools/autograd/derivatives.yaml). On real tensors, the kernel raises RuntimeError. The context
    also registers flash attention, which models use for documents (sdp.models.layers).
    """
    if device == "cpu":
        yield
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        for operator in ("_fused_rms_norm", "_flash_attention_forward"):
            library.impl(operator, _shapes_alone, "CPU")
        yield


def _shapes_alone(*_: Any) -> Any:
    raise RuntimeError("an operator with real tensors ran in a trace, where operators of CUDA only compute shapes")
