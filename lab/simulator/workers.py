"""Computes SDP's gradient in one process.

Each group computes its own subnetwork on its own rows of the batch. The gradient of a unit is the
mean over its holders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sdp.engine.batch.call import call_model, count_targets, loss_of, map_leaves, tensors_in
from sdp.engine.config.method import Masking
from sdp.engine.errors import ModelError
from sdp.engine.placement.layout import Layout
from torch import Tensor, nn

from .rows import Rows, mask, per_unit

# How far a gradient in one pass may be from that of the groups in turn, relative to its norm. If
# rows were mixed up, it would be about as far as it is long.
_RELATIVE = 1e-3


class Workers:
    """Computes the gradients of all groups with one copy of the full model.

    Each group is one worker. They compute in one pass, or one after the other. One pass needs a
    model whose rows never interact, which :meth:`check` tests.

    Args:
        model: The full model with its values. Its units are changed by :func:`mask`.
        layout: The units and their holders.

    Attributes:
        rows: To which groups the rows of the current batch belong.
    """

    def __init__(self, model: nn.Module, layout: Layout):
        self.model, self._groups, self.rows = model, layout.mesh.sdp, Rows()
        self._shares = per_unit(model, layout, lambda _, holders: 1 / len(holders), 1 / self._groups)
        mask(model, layout, self.rows)

    def gradients(self, batches: Sequence[Any], masking: Masking, *, in_turn: bool = False) -> float:
        """Set each parameter's gradient to the mean over its holders, and return the mean loss.

        Args:
            batches: The micro-batches of a step. Each has the rows of all groups, in order.
            masking: "forward" or "backward".
            in_turn: Whether groups compute one after the other, and not in one pass.

        Raises:
            ModelError: The groups' rows have different numbers of targets.
        """
        self.rows.keeps_frozen = masking == "backward"
        self.model.zero_grad()
        try:
            losses = [loss for batch in batches for loss in self._backward(batch, len(batches), in_turn=in_turn)]
        finally:
            self.rows.groups = None
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad *= self._shares[name]
        return sum(losses) / len(losses)

    def _backward(self, batch: Any, batches: int, *, in_turn: bool) -> list[float]:
        parts, device = split_rows(batch, self._groups), next(self.model.parameters()).device
        rows, losses = len(tensors_in(parts[0])[0]), []
        # The mean over the groups is the mean over all targets.
        if not in_turn and len({int(count_targets(self.model, part)) for part in parts}) > 1:
            raise ModelError("the groups' rows have different numbers of targets, so they cannot run in one pass")
        for group, part in enumerate(parts) if in_turn else [(None, batch)]:
            which = torch.arange(self._groups, device=device) if group is None else torch.tensor([group], device=device)
            self.rows.groups = which.repeat_interleave(rows)
            loss = loss_of(call_model(self.model, part))
            (loss * len(which) / batches).backward()
            losses.append(loss.item())
        return losses

    def check(self, batches: Sequence[Any], masking: Masking) -> None:
        """Raise ModelError if one pass computes something else than the groups one after the other.

        During the check, the weights have noise. Some, such as biases, may be zero at first, and
        would hide a difference.
        """
        kept = [(parameter, parameter.detach().clone()) for parameter in self.model.parameters()]
        found: list[tuple[float, dict[str, Tensor]]] = []
        self.model.eval()  # dropout would draw different numbers
        try:
            with torch.no_grad():
                generator = torch.Generator().manual_seed(0)
                for parameter, value in kept:
                    parameter += 0.02 * torch.randn(value.shape, generator=generator).to(value)
            for in_turn in (True, False):
                loss = self.gradients(batches, masking, in_turn=in_turn)
                grads = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
                found.append((loss, grads))
        finally:
            with torch.no_grad():
                for parameter, value in kept:
                    parameter.copy_(value)
            self.model.zero_grad()
            self.model.train()
        (loss, theirs), (our_loss, ours) = found
        largest = max(gradient.norm() for gradient in theirs.values())
        wrong = [
            name
            for name, gradient in theirs.items()
            if (ours[name] - gradient).norm() > _RELATIVE * gradient.norm() + 1e-6 * largest
        ]
        if abs(our_loss - loss) > 1e-4 * abs(loss) or wrong:
            what = f"the gradient of {wrong[0]}" if wrong else "the loss"
            raise ModelError(
                f"{what} in one pass is not that of the groups in turn, so rows of different groups interact; train "
                "without the simulator"
            )


@torch.no_grad()
def mean_loss(model: nn.Module, batches: Sequence[Any]) -> float:
    """Return the mean loss of the full model over all targets of ``batches``."""
    model.eval()
    counts = [int(count_targets(model, batch)) for batch in batches]
    losses = [loss_of(call_model(model, batch)).item() for batch in batches]  # a batch without targets would have NaN
    model.train()
    return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


def split_rows(batch: Any, parts: int) -> list[Any]:
    """Cut every tensor of a batch into ``parts`` equal pieces along the first dimension."""
    return [map_leaves(lambda leaf, index=index: leaf.chunk(parts)[index], batch) for index in range(parts)]
