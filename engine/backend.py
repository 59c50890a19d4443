"""What the engine needs of a backend. ``reference.py`` is the specification; every other backend must match it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from .distributed.traffic import Traffic
from .full_model.recalibration import Statistics
from .placement.layout import Layout
from .placement.tensor_info import Shard


class Backend(Protocol):
    """Holds this process's part of the model and brings its gradients to g_u = Σ_{w∈H_u} Σ_f ∂ℓ_{w,f}/∂θ_u / (k_u·F)."""

    layout: Layout
    module: nn.Module
    device: torch.device
    traffic: Traffic
    parameters: dict[str, nn.Parameter]  # canonical name → this rank's parameter (a DTensor where it is sharded)

    @property
    def frozen(self) -> dict[str, nn.Parameter]:
        """Frozen copies, up to date, of the parameters that this process does not train (backward masking), by canonical name."""
        ...

    @property
    def data_ranks_here(self) -> int:
        """Data ranks that this process stands for: 1, or all of them in the reference."""
        ...

    @property
    def shard(self) -> Shard:
        """Which elements of its parameters this process holds."""
        ...

    @property
    def exposed_seconds(self) -> float:
        """Seconds since the start that backward passes waited for reductions between groups, their own computation being over."""
        ...

    def forward(self, call: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        """What the model returns for this process's micro-batch."""
        ...

    def backward(self, loss: torch.Tensor, *, boundary: bool) -> None:
        """Accumulate gradients of ``loss``; at the ``boundary`` leave g_u in ``.grad`` of every parameter."""
        ...

    def refresh(self, *, after_step: bool) -> None:
        """Weights have changed: bring all frozen copies up to date. Collective.

        ``after_step``: by an update, so only those that are trained, and what is sent is awaited when it is needed; else all, at once.
        """
        ...

    def zero_grad(self) -> None:
        """Drop all gradients, accumulated ones of earlier micro-batches too."""
        ...

    def squared_grad_norm_and_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Σ_u ‖g_u‖² + ‖g_S‖² over the full model and the mean of the ranks' ``loss``, a float64 scalar; collective.

        Float64 (2,), the same on every rank: one message, and one wait of the host, for both.
        """
        ...

    def evaluate(self, batches: Sequence[Any]) -> float:
        """Token-weighted mean loss of the full model over the batches of all ranks; collective."""
        ...

    def batch_statistics(self, batches: Sequence[Any]) -> Statistics:
        """Running statistics of the full model's batch norms over the batches of all ranks, by buffer; collective."""
        ...

    def evaluate_subnetworks(self, batches: Sequence[Any]) -> list[float]:
        """Token-weighted mean loss of every group's own subnetwork, each over the batches of its ranks; collective."""
        ...

    def stream_state(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Every tensor of the full model by canonical name, whole, on rank 0 (None elsewhere); collective."""
        ...

    def all_reduce_control(self, values: torch.Tensor) -> None:
        """Sum a few numbers over all ranks, in place; collective."""
        ...

    def agree_on_buffers(self) -> None:
        """Make persistent buffers those of the full model: means over the ranks of the holders; collective."""
        ...

    def shard_parameters(self) -> None:
        """Bring every parameter into its sharded form, with the values of the last update."""
        ...
