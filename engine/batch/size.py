"""Computes batch sizes by DeepSpeed's rule.

train_batch_size = micro-batch × accumulation steps × data ranks
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config.schema import Config
from ..distributed.mesh import Mesh
from ..errors import ConfigError


@dataclass(frozen=True)
class BatchSize:
    """The batch sizes of a run.

    Attributes:
        train: Samples per optimizer step.
        micro: Samples per forward pass of a rank.
        accumulation: Forward passes of a rank per optimizer step.
    """

    train: int
    micro: int
    accumulation: int

    @classmethod
    def resolve(cls, config: Config, mesh: Mesh) -> BatchSize:
        """Return the batch sizes of a run. Sizes that the configuration leaves out are computed.

        Raises ConfigError if the sizes in the configuration contradict each other.
        """
        train = config.train_batch_size
        if train is not None and mesh.alone is not None:  # each group has an equal share of the samples
            if train % mesh.sdp:
                raise ConfigError(
                    f"train_batch_size {train} is not divisible by sdp.groups {mesh.sdp}; change one of them"
                )
            train //= mesh.sdp
        micro = config.train_micro_batch_size_per_gpu
        accumulation = config.gradient_accumulation_steps
        given = (train, micro, accumulation)
        ranks = mesh.data_ranks
        if micro is None:
            accumulation = accumulation or 1
            micro = train // (accumulation * ranks) if train is not None else 1
        elif accumulation is None:
            accumulation = train // (micro * ranks) if train is not None else 1
        result = cls(train if train is not None else micro * accumulation * ranks, micro, accumulation)
        if result.micro < 1 or result.accumulation < 1 or result.train != result.micro * result.accumulation * ranks:
            raise ConfigError(result._mismatch(given, mesh))
        return result

    def _mismatch(self, given: tuple[int | None, ...], mesh: Mesh) -> str:
        def source(value: int | None) -> str:
            return "from the configuration" if value is not None else "derived"

        train, micro, accumulation = given
        product = self.micro * self.accumulation * mesh.data_ranks
        return (
            f"train_batch_size {self.train} ({source(train)}) is not train_micro_batch_size_per_gpu {self.micro} "
            f"({source(micro)}) × gradient_accumulation_steps {self.accumulation} ({source(accumulation)}) × data "
            f"ranks {mesh.data_ranks} (sdp.groups {mesh.sdp} × fsdp {mesh.fsdp}) = {product}; change one of them"
        )
