"""Checks that DeepSpeed's ZeRO partitions and reduces gradients as SDP needs it."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...distributed.collectives import stored_tensor
from ...errors import ModelError
from .partitions import Bundle, partition_numel
from .private import offsets_in_partition


def check_partitions(
    bundles: Sequence[Bundle],
    masters: Sequence[torch.Tensor],
    parameters: Mapping[str, nn.Parameter],
    *,
    stage: int,
    ranks: int,
) -> None:
    """Raise ModelError unless DeepSpeed's partitions have the expected order and sizes.

    With another order or size, holders would average partitions that have different elements.
    """
    sizes = [partition_numel(bundle, stage, ranks) for bundle in bundles]
    is_right = [master.numel() for master in masters] == sizes
    for bundle in bundles:
        members = [parameters[name] for name in bundle.names]
        numels = [stored_tensor(parameter).numel() for parameter in members]
        is_right = is_right and offsets_in_partition(members) == [0, *itertools.accumulate(numels)][:-1]
    if not is_right:
        raise ModelError(
            "DeepSpeed partitioned the parameters in an unexpected way, so the shards of different holders would not "
            'align; remove settings of zero_optimization that change partitions, or use sdp.engine "fsdp2"'
        )


class PendingGradients:
    """Makes ``module.parameters()`` an error between ``engine.backward`` and ``engine.step``.

    During this time, ZeRO has the gradients in its own partitions. A function such as
    ``clip_grad_norm_`` would find no gradients in the parameters, and would silently do nothing.

    Attributes:
        exist: whether gradients wait for the next step, so that the call is an error.
    """

    def __init__(self, module: nn.Module):
        self.exist, parameters = False, module.parameters

        def checked(*args: Any, **kwargs: Any) -> Any:
            if self.exist:
                raise ModelError(
                    "parameters(): between engine.backward and engine.step, parameters have no gradients, because "
                    "DeepSpeed's ZeRO has them; to clip, set gradient_clipping in the configuration; "
                    'to change gradients in the script, use sdp.engine "fsdp2" at stage 0'
                )
            return parameters(*args, **kwargs)

        module.parameters = checked  # type: ignore[method-assign]


class UsedParameters:
    """Records which trained parameters each micro-batch used, to detect wrong gradients of ZeRO.

    ZeRO computes wrong gradients without an error if some parameters are not used, for example
    experts. If the ranks of a group use different parameters, ZeRO adds up gradients of different
    parameters. With offload, an unused parameter keeps the gradient of an earlier step.

    Args:
        parameters: the trained parameters by canonical name.
        group: the index of this rank's SDP group.
        rank_inside: this rank's index in its group.
        ranks_inside: the number of ranks in the group.
        must_stay_equal: whether all micro-batches of a run must use the same parameters.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        group: int,
        rank_inside: int,
        ranks_inside: int,
        must_stay_equal: bool,
    ):
        self._names = list(parameters)
        self._used = bytearray(len(self._names))  # by parameter: whether this micro-batch used it
        for index, parameter in enumerate(parameters.values()):
            parameter.register_post_accumulate_grad_hook(_mark(self._used, index))
        # The sum of these weights over a group is zero, so equal checksums cancel out. Groups have
        # different factors, so that the differences of two groups do not cancel each other.
        self._weight = (2 * rank_inside - (ranks_inside - 1)) * (group + 1)
        self._must_stay_equal = must_stay_equal
        self._first: bytes | None = None
        self._changed = False
        self._unused: str | None = None  # a parameter that some micro-batch of this step did not use
        self._checksum = 0

    def end_micro_batch(self) -> None:
        """Record which parameters the last backward pass used."""
        used = bytes(self._used)
        self._used[:] = bytes(len(used))
        self._checksum = zlib.crc32(used, self._checksum)
        if 0 in used and self._unused is None:
            self._unused = self._names[used.index(0)]
        self._first = used if self._first is None else self._first
        self._changed = self._changed or used != self._first

    def start_step(self) -> None:
        """Forget the micro-batches so far, because their gradients were used or dropped."""
        self._used[:] = bytes(len(self._used))
        self._checksum, self._unused = 0, None

    def differences(self) -> list[float]:
        """Return two numbers to sum over all ranks. If ZeRO's gradients are right, both sums are 0.

        The numbers are small integers, so that their sums in float64 are exact.
        """
        return [float(self._weight * (self._checksum >> 8)), float(self._must_stay_equal and self._changed)]

    def check(self, sums: Sequence[float]) -> None:
        """Raise ModelError on all ranks, if the sums of :meth:`differences` are not zero."""
        between_ranks, between_micro_batches = sums
        unused = f" (for example {self._unused!r})" if self._unused is not None else ""
        if between_ranks:
            raise ModelError(
                f'sdp.engine "deepspeed": the ranks of a group use different parameters in one step{unused}, and ZeRO '
                'would add up gradients of different parameters; use sdp.engine "fsdp2"'
            )
        if between_micro_batches:
            raise ModelError(
                f'sdp.engine "deepspeed": only some micro-batches use all parameters{unused}, and with '
                "offload_optimizer DeepSpeed would step with gradients of earlier micro-batches; remove "
                'offload_optimizer, or use sdp.engine "fsdp2"'
            )


def _mark(used: bytearray, index: int) -> Callable[[torch.Tensor], None]:
    """Return a hook that marks a parameter as used. It must not keep a store alive."""

    def mark(_: torch.Tensor) -> None:
        used[index] = 1

    return mark
