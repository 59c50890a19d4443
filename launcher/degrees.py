"""Finds and checks the number of processes of a run, before any of them starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..engine.batch.size import BatchSize
from ..engine.config.schema import Config
from ..engine.distributed.mesh import mesh_of
from ..engine.errors import LaunchError
from ..engine.placement.profiles import capacities

_MOST_RANKS = 2**20  # also the bound of sdp.groups; a list of more ranks would fill the memory
# One of these exists where a driver is loaded: NVIDIA, NVIDIA under WSL, AMD.
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


@dataclass(frozen=True)
class Degrees:
    """The numbers of groups, shards and tensor-parallel ranks of a run.

    A launcher uses this object to find and check the number of processes.

    Attributes:
        config: the configuration, with the groups and the tensor-parallel degree.
        fsdp: the value of ``--fsdp``. If None, the number of processes / (groups * tp).
        alone: whether the processes are only one group of the run (``--service``).
    """

    config: Config
    fsdp: int | None = None
    alone: bool = False

    @property
    def groups(self) -> int:
        return 1 if self.alone else self.config.sdp.groups

    @property
    def tp(self) -> int:
        return self.config.tensor_parallel.autotp_size

    @property
    def fewest(self) -> int:
        """The smallest possible number of processes: groups * tp, times ``fsdp`` if it is given."""
        return self.groups * (self.fsdp or 1) * self.tp

    def check(self, processes: int, source: str) -> None:
        """Raise an error if the run cannot have this number of processes.

        Launchers check the number before the start, because ranks may wait for hours in a queue.
        ``source`` says where the number comes from, for the message.

        Raises:
            LaunchError: the number is not groups * fsdp * tp. The message has every factor.
            ConfigError: the samples of a step do not divide equally, or ``sdp.capacity`` is
                impossible.
        """
        if processes > _MOST_RANKS:
            raise LaunchError(f"{processes} processes ({source}): a run has at most {_MOST_RANKS:,}")
        factors = f"groups {self.groups} (sdp.groups) * tp {self.tp} (tensor_parallel.autotp_size)"
        if self.fsdp is not None and processes != self.groups * self.fsdp * self.tp:
            raise LaunchError(
                f"{processes} processes ({source}) are not {factors} * fsdp {self.fsdp} (--fsdp)"
                f" = {self.groups * self.fsdp * self.tp}; change one of them"
            )
        if processes % (self.groups * self.tp):
            raise LaunchError(
                f"{processes} processes ({source}) are not a multiple of {factors} = {self.groups * self.tp}; change "
                "one of them"
            )
        if self.groups > 1 and not isinstance(self.config.sdp.placement, dict):
            capacities(self.config.sdp)
        BatchSize.resolve(self.config, mesh_of(self.config, processes, 0 if self.alone else None))

    def processes(self, nproc: int | None, devices: int) -> int:
        """Return the number of processes to start on this host.

        The number is ``nproc`` if given. Otherwise it is one per device, or the smallest possible
        number if there are no devices or if ``--fsdp`` is given.

        ``devices`` is the number of visible accelerators, 0 on a CPU. Raises the errors of
        :meth:`check`, and :class:`LaunchError` if there are fewer devices than processes.
        """
        if nproc is not None:
            count, source = nproc, "--nproc"
        elif devices and self.fsdp is None:
            count, source = devices, "visible devices"
        else:
            count, source = self.fewest, "groups * fsdp * tp"
        self.check(count, source)
        if 0 < devices < count:
            raise LaunchError(
                f"{count} processes ({source}) need {count} devices, but {devices} are visible; use fewer, or "
                "CUDA_VISIBLE_DEVICES= for the CPU"
            )
        return count


def visible_devices() -> int:
    """Count the accelerators that this process sees. Without a driver, torch is not imported."""
    if not any(Path(file).exists() for file in _DEVICE_FILES):
        return 0
    import torch

    return torch.cuda.device_count()
