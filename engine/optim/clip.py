"""A rank's share of the global gradient norm, and clipping by that norm.

The global norm counts every parameter once, however many ranks hold or shard it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..distributed.tensors import local_tensor


def squared_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return Σ‖g‖² of the local shards, as a float64 scalar tensor on ``device``."""
    locals_ = [local_tensor(gradient) for gradient in gradients]
    if not locals_:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(locals_, 2, dtype=torch.float32))
    return norms.double().square().sum().to(device)  # the gradients may be on the host


def clip_(gradients: Sequence[torch.Tensor], norm: float, max_norm: float) -> None:
    """Scale the gradients in place by ``max_norm / norm`` if the norm is larger than ``max_norm``.

    The formula is that of torch's ``clip_grad_norm_``.
    """
    scale = max_norm / (norm + 1e-6)
    if scale < 1:
        torch._foreach_mul_([local_tensor(gradient) for gradient in gradients], scale)
