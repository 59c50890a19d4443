"""Bind a rank to the cores of its GPU's NUMA node, which are near its host memory and its network card.

MPI's own binding knows cores, not GPUs. ``--bind-to numa`` assigns ranks to NUMA nodes in turns, but many
hosts have GPUs 0–3 on one NUMA node and 4–7 on the other.
"""

from __future__ import annotations

import os
from pathlib import Path


def bind_near_device(local_rank: int, devices: str, root: Path = Path("/")) -> set[int]:
    """Bind this process to the usable cores near device number ``local_rank`` in ``devices`` (``0,2``), and return them.

    Does nothing and returns an empty set without NVIDIA's driver, on a host with one NUMA node, or if this process
    may not use the cores near the device.
    """
    cores = near_cores(int(devices.split(",")[local_rank]), root)
    if not hasattr(os, "sched_setaffinity"):
        return set()
    usable = os.sched_getaffinity(0) & cores
    if usable:
        os.sched_setaffinity(0, usable)
    return usable


def near_cores(device: int, root: Path = Path("/")) -> set[int]:
    """The cores of the NUMA node of an NVIDIA device. Devices count by PCI address. Empty if the node is unknown."""
    try:
        address = sorted(path.name for path in (root / "proc/driver/nvidia/gpus").iterdir())[device].lower()
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
        return _parse_cores((root / f"sys/devices/system/node/node{node}/cpulist").read_text()) if node >= 0 else set()
    except (OSError, IndexError, ValueError):
        return set()


def _parse_cores(text: str) -> set[int]:
    """Parse a list of the kernel, such as ``0-3,8``."""
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}
