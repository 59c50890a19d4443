"""What a classifier's logits are measured by."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Measure = Literal["loss", "accuracy"]


def measured(logits: Tensor, labels: Tensor, measure: Measure) -> Tensor:
    """The mean cross-entropy, or the part of the samples whose largest logit is the label's; a float32 scalar.

    ``logits`` (B, N), ``labels`` (B). Accuracy is a mean over samples as the loss is, so the engine evaluates the full model for either.
    """
    if measure == "accuracy":
        return (logits.argmax(1) == labels).float().mean()
    return F.cross_entropy(logits.float(), labels)
