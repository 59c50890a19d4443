"""The samples of a step, which decide what is learned, and their cut into micro-batches for any number of data ranks."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.batch.size import BatchSize
from ..engine.config.schema import Config
from ..engine.distributed.mesh import mesh_of
from ..engine.errors import ConfigError


@dataclass(frozen=True)
class Step:
    """``samples`` of all ranks together; ``micro``: of one in a forward pass, as it is stated. ``accumulation``: what is stated instead."""

    samples: int
    micro: int
    accumulation: int | None = None


def stated_step(config: Config, world: int) -> Step:
    """What ``config`` says of ``world`` ranks; those that do not fill the grid are left out, and where it says nothing of micro-batches,
    those that cannot share its samples equally. Raises :class:`ConfigError`.
    """
    if config.train_batch_size is not None and config.train_micro_batch_size_per_gpu is not None:
        return Step(config.train_batch_size, config.train_micro_batch_size_per_gpu)  # of any number of ranks
    of_grid = config.sdp.groups * config.tensor_parallel.autotp_size
    most = max(1, world // of_grid)
    if config.train_batch_size is not None:
        shared = config.sdp.groups * (config.gradient_accumulation_steps or 1)
        # Where no number of ranks does, one a group says what is wrong.
        most = next((count for count in range(most, 0, -1) if config.train_batch_size % (shared * count) == 0), 1)
    size = BatchSize.resolve(config, mesh_of(config, most * of_grid))
    instead = config.train_micro_batch_size_per_gpu is None
    return Step(size.train, size.micro, config.gradient_accumulation_steps if instead else None)


def own_share(step: Step, data_ranks: int) -> tuple[int, int]:
    """Micro-batch and accumulation of each of ``data_ranks``: the stated accumulation, if that divides its samples, else the stated
    micro-batch, or the next smaller one that divides them.

    Raises :class:`ConfigError` where the samples cannot be shared equally.
    """
    each, rest = divmod(step.samples, data_ranks)
    if rest or each < 1:
        raise ConfigError(f"the {step.samples:,} samples of a step cannot be shared equally among {data_ranks} data ranks")
    if step.accumulation is not None and each % step.accumulation == 0:
        return each // step.accumulation, step.accumulation
    micro = next(size for size in range(min(step.micro, each), 0, -1) if each % size == 0)
    return micro, each // micro
