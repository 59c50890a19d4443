"""Model FLOPs utilisation (MFU): the share of the devices' dense peak that the model's operations
take.

The definition is PaLM's (arXiv 2204.02311, appendix B). Recomputation does not count. A group
counts only the operations of its own subnetwork.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

import torch

from ....engine.config.method import Masking
from ....engine.engine import SDPEngine
from ....engine.model_interface import get_flops_per_token
from ....engine.placement.placement import Placement

# TFLOP/s of dense bfloat16 matrix products in NVIDIA's data sheets, by device name.
NOMINAL_TFLOPS = {
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H200": 989.4,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
}


def nominal_flops(device: torch.device, precision: str) -> float | None:
    """Return the dense peak of ``device`` in its data sheet, in operations a second.

    None on a CPU, for a device that is not in the table, and in float32.
    """
    if device.type != "cuda" or precision == "float32":
        return None
    peak = NOMINAL_TFLOPS.get(torch.cuda.get_device_name(device))
    return None if peak is None else peak * 1e12


class Utilisation:
    """Computes the MFU of a run from its tokens per second.

    ``of`` returns nothing where the MFU is unknown: on a CPU, on a device whose peak is not in the
    table, in float32, and for a model without ``flops_per_token``.
    """

    def __init__(self, engine: SDPEngine, sequence_length: int):
        flops = get_flops_per_token(engine.module)
        self._peak = nominal_flops(engine.device, engine.config.precision)
        self._flops: dict[Masking, float] = {}  # of a device, for each token of the run
        if flops is not None and self._peak is not None:
            placement, costs = engine.layout.placement, flops(sequence_length)
            for masking in engine.config.sdp.maskings:
                of_group = mean_flops_per_token(costs, placement, keeps_frozen=masking == "backward")
                self._flops[masking] = of_group / engine.world_size

    def of(self, tokens_per_second: float, masking: Masking) -> dict[str, float]:
        """Return the figures at ``tokens_per_second`` of the whole run, in steps with ``masking``:
        ``flops_per_second``, the sustained rate of a device, and ``mfu``, its share of the peak.
        """
        if masking not in self._flops or self._peak is None:
            return {}
        rate = self._flops[masking] * tokens_per_second
        return {"mfu": rate / self._peak, "flops_per_second": rate}


def mean_flops_per_token(flops: Mapping[str, float], placement: Placement, *, keeps_frozen: bool) -> float:
    """Return :func:`flops_per_token`, averaged over the groups."""
    return fmean(
        flops_per_token(flops, placement, group, keeps_frozen=keeps_frozen) for group in range(placement.groups)
    )


def flops_per_token(flops: Mapping[str, float], placement: Placement, group: int, *, keeps_frozen: bool) -> float:
    """Return the operations of forward and backward per token in a group.

    Args:
        flops: The operations of the full model by block, and those of the rest as "shared".
        placement: Which group holds which unit.
        group: The group.
        keeps_frozen: Whether a group runs frozen copies of the units that it does not hold. Of
            these it computes all but the gradients of weights, which are a third.
    """
    total = flops.get("shared", 0.0)
    for block, cost in flops.items():
        if block == "shared":
            continue
        # A block is a unit, or its neurons are several units.
        units = [index for index, name in enumerate(placement.units) if name == block or name.startswith(f"{block}.")]
        held = 1.0  # of a block that every group has
        if units:
            mine = sum(placement.costs[unit] for unit in units if group in placement.holders[unit])
            held = mine / sum(placement.costs[unit] for unit in units)
        total += cost * ((2 + held) / 3 if keeps_frozen else held)
    return total
