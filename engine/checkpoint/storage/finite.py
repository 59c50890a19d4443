"""Refuses to save weights that are NaN or infinite, so that no save prunes a good checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from ...distributed.agreement import Ranks
from ...distributed.collectives import local_tensor
from ...errors import NonFiniteError
from .dcp import Chunks
from .remote import describe_newest


def check_finite(directory: str | Path, tensors: Mapping[str, Any], parameters: Collection[str], ranks: Ranks) -> None:
    """Check that all weights that a save would write are finite. Collective.

    A finite gradient can still destroy the weights. Buffers are not checked, because a mask may
    hold infinite values. The check costs one reduction per tensor and one wait for the device.

    Args:
        directory: The directory of the checkpoints; the newest one in it is good.
        tensors: What this rank saves, by key.
        parameters: The canonical names of the model's parameters.
        ranks: The processes that save together.

    Raises:
        NonFiniteError: On every rank, if a weight is NaN or infinite. The message names the first
            such parameter and the newest checkpoint.
    """
    found = next((name for name in ranks.gather(_first_damaged(tensors, parameters)) if name is not None), None)
    if found is None:
        return
    newest = ranks.gather(describe_newest(directory) if ranks.rank == 0 else None)[0]
    raise NonFiniteError(
        f"the weight {found} has values that are NaN or infinite, so no checkpoint is written; "
        f"the newest good checkpoint: {newest}; resume from it with a lower learning rate"
    )


def _first_damaged(tensors: Mapping[str, Any], parameters: Collection[str]) -> str | None:
    names, peaks = [], []
    for name in parameters:
        value = tensors.get(f"model/{name}")
        if value is None:
            continue
        for part in value.locals if isinstance(value, Chunks) else [local_tensor(value)]:
            if part.numel() and (part.is_floating_point() or part.is_complex()):
                names.append(name)
                # A NaN stays a NaN in a maximum, so one reduction finds both.
                peaks.append(torch.linalg.vector_norm(part.detach(), ord=float("inf")).double())
    if not peaks:
        return None
    finite = torch.isfinite(torch.stack(peaks)).tolist()
    return next((name for name, good in zip(names, finite, strict=True) if not good), None)
