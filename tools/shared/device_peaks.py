"""The peak rates of devices, from the data sheets of their makers."""

from __future__ import annotations

import torch

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
