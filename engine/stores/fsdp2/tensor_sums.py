"""Sums gradients over the tensor-parallel ranks of a group.

A parameter that tensor parallelism does not cut is whole on all of these ranks. Each of them has
the gradient of its part of the sequence or of the features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...distributed.tensor_collectives import TensorRanks, all_gather_single
from ...distributed.tensors import local_tensor
from ...distributed.traffic import Traffic


class TensorSums:
    """Makes the gradients of parameters the sums over the tensor-parallel ranks.

    Args:
        parameters: the parameters that are not cut.
        ranks: the tensor-parallel ranks.
        traffic: counts the bytes sent.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: TensorRanks, traffic: Traffic):
        self._parameters, self._ranks, self._traffic = parameters, ranks, traffic
        self._are_sums = False

    def before_backward(self) -> None:
        """Make the gradients shares again.

        Another backward pass before the same step adds this rank's shares to them.
        """
        for parameter in self._parameters if self._are_sums else ():
            if parameter.grad is not None:
                parameter.grad.div_(self._ranks.size)
        self._are_sums = False

    def make(self) -> None:
        """Sum the gradients, which all exist, in the order of the ranks. Collective.

        A collective may sum in another order on another group. A fixed order keeps the copies
        bitwise equal on all holders.
        """
        gradients = [local_tensor(parameter.grad) for parameter in self._parameters]  # type: ignore[arg-type]
        mine = torch.cat([gradient.reshape(-1) for gradient in gradients])
        shares = mine.new_empty((self._ranks.size, mine.numel()))
        self._traffic.record("inside groups", "all_gather", shares.nbytes, self._ranks.size)
        all_gather_single(shares.view(-1), mine, group=self._ranks.group)
        total = mine.copy_(shares[0])
        for share in shares[1:]:
            total += share
        for gradient, values in zip(gradients, total.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))
        self._are_sums = True
