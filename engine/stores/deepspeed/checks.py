"""Checks that DeepSpeed does what SDP expects: its partitions, and the parameters that it
reduces.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from ...config.schema import Config
from ...errors import ConfigError, ModelError
from ...placement.layout import Layout
from .base import DeepSpeedBase
from .partitions import Bundle, partition_numel


def refuse_small_sub_groups(config: Config, bundles: Sequence[Bundle], layout: Layout) -> None:
    """Raise ConfigError if DeepSpeed would cut a rank's share of a unit into parts."""
    limit = config.deepspeed.get("zero_optimization", {}).get("sub_group_size")
    if config.zero_optimization.stage < 3 or limit is None:
        return
    for bundle in bundles:
        numel = max(partition_numel(bundle, 3, len(layout.mesh.ranks_of(group))) for group in bundle.holders)
        if numel > limit:
            raise ConfigError(
                f"zero_optimization.sub_group_size: {limit} is less than the {numel} elements that a rank steps at once"
                + (f" of {bundle.unit!r}" if layout.mesh.sdp > 1 else "")
                + ": DeepSpeed would cut them into parts that other groups and checkpoints do not know; raise it, or "
                "remove it"
            )


def check_partitions(backend: DeepSpeedBase, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ModelError unless DeepSpeed partitioned the expected parameters, in order, into the
    expected sizes.
    """
    if backend.zero is None:
        _check_copies(backend)
        return
    members = [[id(p) for p in group] for group in backend.zero.members]
    expected = [[id(parameters[name]) for name in bundle.names] for bundle in backend.bundles]
    sizes = [partition_numel(bundle, backend.stage, backend.ranks_inside) for bundle in backend.bundles]
    if members != expected or [master.numel() for master in backend.zero.masters] != sizes:
        raise ModelError(
            "DeepSpeed partitioned the parameters in an unexpected way, so the shards of different holders would not "
            "align; "
            'remove settings of zero_optimization that change partitions, or use sdp.engine "fsdp2"'
        )


def _check_copies(backend: DeepSpeedBase) -> None:
    """At stage 0 in half precision, DeepSpeed must have a float32 copy of exactly the trained
    parameters.
    """
    if backend.copies is not None and set(backend.copies.masters) != {
        name for bundle in backend.bundles for name in bundle.names
    }:
        raise ModelError(
            "DeepSpeed's float32 copies are not exactly those of the trained parameters; use zero_optimization.stage 1"
        )


class UsedParameters:
    """Which trained parameters each micro-batch of a step used on this rank.

    Under ZeRO, DeepSpeed computes wrong gradients without an error if not all of them are used, as
    with experts. It adds up the gradients of different parameters if the ranks of a group use
    different ones. With offload it keeps the gradient of an earlier step for a parameter that a
    micro-batch does not use.

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
        """Note what the backward pass that just ended used."""
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
        """Two numbers whose sums over all ranks are zero if DeepSpeed's gradients are right.

        They are integers, and 24 bits of the checksum are used, so that float64 sums are exact.
        """
        return [float(self._weight * (self._checksum >> 8)), float(self._must_stay_equal and self._changed)]

    def check(self, sums: Sequence[float]) -> None:
        """Raise ModelError, on all ranks that summed, unless the sums of :meth:`differences` are
        zero.
        """
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
    """Return a hook that marks a parameter as used. It must not keep a backend alive."""

    def mark(_: torch.Tensor) -> None:
        used[index] = 1

    return mark
