"""The local part of a tensor that may be a DTensor, and tensors that training can use later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or ``tensor`` itself if it is a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stored_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this rank has in memory of a parameter: under ZeRO 3 its partition, else
    ``parameter`` itself.
    """
    return getattr(parameter, "ds_tensor", parameter)


def cut_like(local: torch.Tensor, tensor: DTensor) -> DTensor:
    """Return ``local`` as this rank's shard of a DTensor that is cut like ``tensor``.

    The shard stays on its device. ``DTensor.from_local`` would move it to the device of the mesh,
    but shards of offloaded parameters are in the host's memory.
    """
    return DTensor(local, tensor._spec, requires_grad=False)


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """A context without gradients inside ``torch.inference_mode()``, and a no-op elsewhere.

    Sharded engines gather parameters into memory that they keep. A later pass of training could not
    use tensors that were made in inference mode.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
