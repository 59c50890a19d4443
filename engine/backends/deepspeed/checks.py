"""Checks that DeepSpeed's partitions are those that the averages between groups expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ...config.schema import Config
from ...errors import ConfigError, ModelError
from ...placement.layout import Layout
from .held import HeldByDeepSpeed
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
                + ": DeepSpeed would cut them into parts that other groups and checkpoints do not know; raise it, or remove it"
            )


def check_partitions(backend: HeldByDeepSpeed, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ModelError unless DeepSpeed partitioned the expected parameters, in order, into the expected sizes."""
    if backend.zero is None:
        _check_copies(backend)
        return
    members = [[id(p) for p in group] for group in backend.zero.members]
    expected = [[id(parameters[name]) for name in bundle.names] for bundle in backend.bundles]
    sizes = [partition_numel(bundle, backend.stage, backend.ranks_inside) for bundle in backend.bundles]
    if members != expected or [master.numel() for master in backend.zero.masters] != sizes:
        raise ModelError(
            "DeepSpeed partitioned the parameters in an unexpected way, so the shards of different holders would not align; "
            'remove settings of zero_optimization that change partitions, or use sdp.engine "fsdp2"'
        )


def _check_copies(backend: HeldByDeepSpeed) -> None:
    """At stage 0 in half precision, DeepSpeed must have a float32 copy of exactly the trained parameters."""
    if backend.copies is not None and set(backend.copies.masters) != {
        name for bundle in backend.bundles for name in bundle.names
    }:
        raise ModelError(
            "DeepSpeed's float32 copies are not exactly those of the trained parameters; use zero_optimization.stage 1"
        )
