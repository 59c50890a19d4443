"""Bind a rank to the cores of its GPU's NUMA node.

These cores are near the rank's host memory and its network card.

MPI's own binding knows cores, not GPUs. ``--bind-to numa`` assigns ranks to NUMA nodes in turns,
but many hosts have GPUs 0–3 on one NUMA node and 4–7 on the other.
"""

from __future__ import annotations

import os
from pathlib import Path


def bind_near_device(local_rank: int, devices: str, root: Path = Path("/")) -> set[int]:
    """Bind this process to the usable cores near its device, and return these cores.

    The device is number ``local_rank`` in ``devices``, a text such as ``0,2``. The function does
    nothing and returns an empty set in three cases: there is no NVIDIA driver, the host has one
    NUMA node, or this process may not use the cores near the device.
    """
    cores = near_cores(int(devices.split(",")[local_rank]), root)
    if not hasattr(os, "sched_setaffinity"):
        return set()
    usable = os.sched_getaffinity(0) & cores
    if usable:
        os.sched_setaffinity(0, usable)
    return usable


def near_cores(device: int, root: Path = Path("/")) -> set[int]:
    """Find the cores of the NUMA node of an NVIDIA device. Empty if the node is unknown.

    Devices are numbered by PCI address.
    """
    try:
        address = sorted(path.name for path in (root / "proc/driver/nvidia/gpus").iterdir())[device].lower()
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
        return _parse_cores((root / f"sys/devices/system/node/node{node}/cpulist").read_text()) if node >= 0 else set()
    except (OSError, IndexError, ValueError):
        return set()


def _parse_cores(text: str) -> set[int]:
    """Parse a list of cores in the kernel's format, such as ``0-3,8``."""
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}
