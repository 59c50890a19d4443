"""The loss and the accuracy of a classifier."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Measure = Literal["loss", "accuracy"]


def measure_logits(logits: Tensor, labels: Tensor, measure: Measure) -> Tensor:
    """Compute the mean cross-entropy or the accuracy of ``logits`` (B, N) for ``labels`` (B).

    The result is a float32 scalar. The accuracy is the fraction of samples whose largest logit is
    the label's. Both are means over samples, so the engine can evaluate the full model for either.
    """
    if measure == "accuracy":
        return (logits.argmax(1) == labels).float().mean()
    return F.cross_entropy(logits.float(), labels)
