"""Stochastic depth: in training, samples skip residual branches (Huang et al., arXiv
1603.09382).
"""

from __future__ import annotations

import torch
from torch import Tensor


def drop_rows(added: Tensor, survival: float) -> Tensor:
    """Return what a residual branch adds, ``added`` (B, …), with zeros in random rows.

    Rows that survive are multiplied by 1 / survival. The expected value is then ``added``, so
    evaluation needs no scaling. The paper scales in evaluation instead.

    Every row is computed. If a rank skipped a layer, other ranks would wait for it in a gather.

    Args:
        added: the output of the branch. The result has its shape and dtype.
        survival: the probability with which a row keeps the branch. Nothing is drawn if it is 1.
    """
    if survival >= 1:
        return added
    survives = torch.rand(len(added), *[1] * (added.dim() - 1), device=added.device) < survival
    return added * (survives / survival).to(added.dtype)
