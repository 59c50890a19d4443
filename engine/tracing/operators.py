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

    torch uses the kernel on every device that has one, so this context registers a kernel for the
    CPU. With fake tensors it is never called, because torch itself knows its shapes and its
    derivative (tools/autograd/derivatives.yaml). With real tensors, the kernel raises RuntimeError.
    The context also registers flash attention, with which models of sdp.models separate documents.
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
