"""Compares bytes that four ranks count with the kernel's. Prints a line of JSON."""

import ctypes
import fcntl
import itertools
import json
import multiprocessing
import os
import socket
import struct
from pathlib import Path

TRIES = 2  # on a loaded machine TCP sends some segments twice, so the lower count is used
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
CLONE_NEWNET = 0x40000000
FORBIDDEN = 77  # the exit code if this process may not make a network namespace


def enter_network() -> None:
    """Enter a new network namespace, in which nobody else sends, and raise its loopback."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNET):
        os._exit(FORBIDDEN)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        flags = struct.unpack("16sh", fcntl.ioctl(control, SIOCGIFFLAGS, struct.pack("16sh", b"lo", 0)))[1]
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags | IFF_UP))


def sent_on_loopback() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def settled() -> int:
    """All ranks idle: the counter stands still."""
    import time

    import torch.distributed as dist

    dist.barrier()
    time.sleep(0.1)
    count = sent_on_loopback()
    time.sleep(0.1)
    dist.barrier()
    return count


def train(groups: int, stage: int, masking: str, steps: int) -> tuple[int, dict[str, int], int]:
    """Return bytes of all ranks on the wire, bytes that this rank counted, and of a quiet wire."""
    import sdp
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(512, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.001}},
        "sdp": {"groups": groups, "masking": masking, "profile": [groups, groups, 1, 1] if groups > 1 else "uniform"},
    }
    engine = sdp.initialize(model=Model(), config=config)[0]

    def step() -> None:
        engine.backward(engine(torch.randn(1, 512)))
        engine.step()

    step()  # connections are made here
    counts = [settled(), settled()]
    for _ in range(TRIES):
        engine.traffic.reset()
        for _ in range(steps):
            step()
        counts.append(settled())
    quiet, *tries = (after - before for before, after in itertools.pairwise(counts))
    return min(tries), engine.traffic.by_kind(), quiet


def collectives() -> dict[str, float]:
    """Return bytes on the wire, by those of the formula, for each kind of collective."""
    import torch
    import torch.distributed as dist
    from sdp.engine.distributed.collectives import sent_bytes
    from sdp.engine.distributed.mesh import passes_on

    world, whole = dist.get_world_size(), torch.zeros(1 << 20)
    part = torch.zeros(whole.numel() // world)
    kinds = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
    }
    ratios = {}
    for kind, collective in kinds.items():
        counts = [settled()]
        for _ in range(TRIES):
            collective()
            counts.append(settled())
        tries = [after - before for before, after in itertools.pairwise(counts)]
        senders = sum(passes_on(rank, 0, world) for rank in range(world)) if kind == "broadcast" else world
        ratios[kind] = min(tries) / (senders * sent_bytes(kind, whole.nbytes, world))  # type: ignore[arg-type]
    return ratios


def main() -> None:
    enter_network()
    from sdp.tests.support import wire  # the ranks know this module by its own name, not as __main__
    from sdp.tests.support.ranks import RankPool

    pool = RankPool(multiprocessing.get_context("fork"))  # the server of forks is in another network
    try:
        rows = {}
        for groups, stage, masking in ((4, 0, "forward"), (2, 0, "forward"), (2, 3, "forward"), (4, 0, "backward")):
            answers = pool.run(wire.train, groups, stage, masking, 4, world=4)
            counted = {
                kind: sum(sent.get(kind, 0) for _, sent, _ in answers)
                for kind in {k for _, sent, _ in answers for k in sent}
            }
            rows[f"{groups}x{4 // groups} zero{stage} {masking}"] = (answers[0][0], counted, answers[0][2])
        print(json.dumps({"runs": rows, "collectives": pool.run(wire.collectives, world=4)[0]}))
    finally:
        pool.close()


if __name__ == "__main__":
    main()
