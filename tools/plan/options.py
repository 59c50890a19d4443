"""The options of ``sdp plan``, as they were given and checked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

from ...engine.config.schema import Config
from ...engine.errors import ConfigError
from ...engine.tracing.operators import DEVICES, Device, device_here
from ...launcher.cluster.hosts import read_hostfile
from ..shared.arguments import add_config_arguments, require_between_1_and
from ..shared.quantities import quantity
from .machine import ACHIEVED, BETWEEN, INSIDE, PEAK_FLOPS, Machine, default_world, fill_nodes, split_evenly

PER_NODE = 8
MOST_RANKS = 2**20


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of ``sdp plan``.

    Quantities stay text, so that suggested commands repeat them. ``None`` means that an option was
    not given.
    """

    config: Path
    settings: tuple[str, ...] = ()
    fit: bool = False
    alone: bool = False
    compare: bool = False
    html: Path | None = None
    json: bool = False
    world: int | None = None
    hostfile: Path | None = None
    gpus_per_node: int | None = None
    device: Device | None = None
    device_memory: str | None = None
    peak_flops: str | None = None
    achieved: float | None = None
    intra_node: str | None = None
    inter_node: str | None = None

    def check(self) -> None:
        """Raise :class:`ConfigError` for values that mean nothing."""
        for option, value in (("--world", self.world), ("--gpus-per-node", self.gpus_per_node)):
            if value is not None:
                require_between_1_and(MOST_RANKS, option, value)
        if self.achieved is not None and not 0 < self.achieved <= 1:
            raise ConfigError(f"--achieved {self.achieved}: expected a fraction above 0, up to 1")
        if self.hostfile is not None and self.gpus_per_node is not None:
            raise ConfigError("--gpus-per-node: --hostfile says how many slots a node has; give one of them")

    @property
    def memory(self) -> float | None:
        """Bytes of a device.

        Raises :class:`ConfigError` where ``--device-memory`` is not a size.
        """
        return None if self.device_memory is None else quantity(self.device_memory, "B", "--device-memory")

    def ranks(self, config: Config) -> tuple[int, str]:
        """The number of ranks, and where it comes from.

        Raises :class:`ConfigError` where there are too many.
        """
        if self.world is not None:
            return self.world, "--world"
        if self.hostfile is not None:
            world, source = sum(len(host.slots) for host in read_hostfile(self.hostfile)), str(self.hostfile)
        else:
            world, source = default_world(config)
        if world > MOST_RANKS:
            raise ConfigError(f"{world:,} ranks ({source}): too many; the planner takes up to {MOST_RANKS:,}")
        return world, source

    def machine(self, world: int) -> Machine:
        """The nodes, devices and links that ``world`` ranks run on.

        Raises :class:`ConfigError` where the hostfile has too few slots, or a rate cannot be read.
        """
        if self.hostfile is None:
            slots = split_evenly(world, self.gpus_per_node or PER_NODE)
        else:
            given = tuple(len(host.slots) for host in read_hostfile(self.hostfile))
            if sum(given) < world:
                raise ConfigError(f"--world {world}: {self.hostfile} has {sum(given)} slots")
            slots = fill_nodes(given, world)
        return Machine(
            slots,
            quantity(_or_default(self.peak_flops, PEAK_FLOPS), "FLOP/s", "--peak-flops"),
            ACHIEVED if self.achieved is None else self.achieved,
            quantity(_or_default(self.intra_node, INSIDE), "B/s", "--intra-node"),
            quantity(_or_default(self.inter_node, BETWEEN), "B/s", "--inter-node"),
            self.device or device_here(),
        )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> PlanOptions:
        """Take the parsed arguments. Raises :class:`ConfigError` for values that mean nothing."""
        if args.html == "":
            raise ConfigError('--html "": expected the name of a file, such as plan.html')
        given = {field.name: getattr(args, field.name) for field in fields(cls) if hasattr(args, field.name)}
        options = cls(**given | {"settings": tuple(args.set), "html": None if args.html is None else Path(args.html)})
        options.check()
        if options.fit and options.memory is None:
            raise ConfigError("--fit: needs --device-memory, for example 80GB")
        for option, given in (("--fit", options.fit), ("--alone", options.alone), ("--html", options.html is not None)):
            if options.compare and given:
                raise ConfigError(f"{option}: is of the plan of one way, and --compare plans many; give one of them")
        return options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(parser, "the JSON file of the run")
    parser.add_argument(
        "--world",
        type=int,
        metavar="N",
        help="ranks (default: the slots of the hostfile, else the fewest that CONFIG allows)",
    )
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="nodes and their slots, in DeepSpeed's format")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help=f"ranks of a node (default: {PER_NODE})")
    parser.add_argument(
        "--device",
        choices=DEVICES,
        help="trace the operators of this device (default: cuda if torch finds a GPU, else cpu)",
    )
    parser.add_argument(
        "--device-memory",
        metavar="BYTES",
        help="memory of a device, such as 80GB or 80GiB: say whether the run fits (exit code 2 if not)",
    )
    parser.add_argument(
        "--peak-flops", metavar="RATE", help=f"peak rate of a device (default: {PEAK_FLOPS}, an H100 in bfloat16)"
    )
    parser.add_argument(
        "--achieved", type=float, metavar="FRACTION", help=f"part of the peak rate that the model reaches ({ACHIEVED})"
    )
    parser.add_argument(
        "--intra-node",
        metavar="RATE",
        help=f"what a rank sends inside a node, in bytes or bits a second: 50GB/s, 400Gbit (default: {INSIDE})",
    )
    parser.add_argument(
        "--inter-node", metavar="RATE", help=f"what a rank sends between nodes, likewise (default: {BETWEEN})"
    )
    parser.add_argument(
        "--fit", action="store_true", help="with --device-memory: find the smallest layout that fits, and plan it"
    )
    parser.add_argument("--alone", action="store_true", help="leave out DDP, FSDP and HSDP of the dense model")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="plan DDP, FSDP, HSDP, ZeRO-2, a smaller dense model, DiLoCo and SDP, a row each",
    )
    parser.add_argument("--html", metavar="FILE", help="also write a page with a map of the units and bars of memory")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON instead")


def _or_default(given: str | None, default: str) -> str:
    return default if given is None else given
