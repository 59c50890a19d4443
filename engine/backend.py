"""What the engine needs of a backend.

``backends/reference/`` is the specification; every other backend must match it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from .accounting.memory import StateBytes
from .config.masking import Masking
from .config.schema import Config
from .distributed.traffic import Traffic
from .full_model.recalibration import Statistics
from .local_steps import CommonPart as CommonPart
from .local_steps import FlatState as FlatState
from .local_steps import GroupPart as GroupPart
from .local_steps import LocalSteps as LocalSteps
from .local_steps import LocalUpdate as LocalUpdate
from .local_steps import PendingUpdate as PendingUpdate
from .local_steps import Spot as Spot
from .optim.rate_scale import HolderScale
from .placement.layout import Layout
from .placement.tensor_info import Shard


class Update(NamedTuple):
    """The outcome of a step: the gradient's norm before clipping, and whether it was skipped."""

    norm: float
    skipped: bool


class StateToSave(Protocol):
    """A rank's share of a checkpoint."""

    def mesh_shape(self) -> list[int]:
        """The sizes of the mesh. Random numbers continue only on the same mesh."""
        ...

    def tensors(self, *, to_load: bool = False) -> dict[str, Any]:
        """Weights, buffers and optimizer state by key. With ``to_load`` they are filled in
        place.
        """
        ...

    def finish_load(self) -> None:
        """Finish a load, after the tensors were filled."""
        ...

    def finish_load_of_weights(self) -> None:
        """Finish a load of weights alone, after the tensors were filled."""
        ...

    def random_state(self) -> dict[str, torch.Tensor]:
        """The states of this rank's random number generators by key."""
        ...


class Backend(Protocol):
    """Holds this process's part of the model and averages its gradients.

    They become g_u = Σ_{w∈H_u} Σ_f ∂ℓ_{w,f}/∂θ_u / (k_u·F).
    """

    layout: Layout
    module: nn.Module
    device: torch.device
    traffic: Traffic
    rank: int  # in the world; 0 in the reference
    parameters: dict[str, nn.Parameter]  # canonical name → this rank's parameter (a DTensor where it is sharded)

    @property
    def frozen(self) -> dict[str, nn.Parameter]:
        """Current copies of the parameters that this process does not train, by canonical name."""
        ...

    @property
    def stand_ins(self) -> Mapping[str, nn.Module]:
        """The stand-ins of the blocks that this process skips, by name; none in the reference."""
        ...

    @property
    def library_engine(self) -> Any:
        """The engine of the library that this backend wraps, or None."""
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
        """Seconds since the start that reductions between groups lasted longer than backward."""
        ...

    def forward(self, call: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        """The model's result for this process's micro-batch."""
        ...

    def backward(self, loss: torch.Tensor, *, boundary: bool, weights: torch.Tensor | None = None) -> None:
        """Accumulate gradients of ``loss``. At the ``boundary`` every ``.grad`` becomes g_u.

        ``weights`` (data_ranks_here,): how much the loss of each data rank counts. After the last
        micro-batch, :meth:`weigh_gradients` then divides by the sum of all weights.
        """
        ...

    def losses_here(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean loss of each data rank of this process, from the ``loss`` of a micro-batch."""
        ...

    def weigh_gradients(self, weights: torch.Tensor, unit: float) -> tuple[float, int]:
        """Divide gradients by the sum of their weights. Collective.

        Args:
            weights: Σ n of this step by data rank of this process, float64 (data_ranks_here,).
            unit: What the weights of :meth:`backward` were divided by.

        Returns:
            Σ n over the ranks that average, and how many data ranks these are.
        """
        ...

    def refresh(self, *, after_step: bool) -> None:
        """Weights have changed: bring all frozen copies up to date. Collective.

        ``after_step``: an update changed them. Then only copies of trained weights are sent, and
        each is awaited when it is needed. Otherwise all are sent and awaited at once.
        """
        ...

    def use_masking(self, masking: Masking) -> None:
        """Skip the units that a group does not hold, or run frozen copies of them. Collective.

        A no-op if it is the present masking. Weights and optimizer state stay.
        """
        ...

    def zero_grad(self) -> None:
        """Drop all gradients, accumulated ones of earlier micro-batches too."""
        ...

    def squared_grad_norm_and_loss(self, loss: torch.Tensor) -> tuple[float, float]:
        """Σ_u ‖g_u‖² + ‖g_S‖² over the full model, and the mean of the ranks' ``loss``. Collective.

        The same on every rank: one message, and one wait of the host, for both.
        """
        ...

    def check_gradients(self) -> None:
        """Raise ModelError, on all ranks, if the gradients of the present step are wrong on any."""
        ...

    def evaluate(self, batches: Sequence[Any], weights: Sequence[float]) -> float:
        """Mean loss of the full model over the batches of all ranks, weighted. Collective."""
        ...

    def batch_statistics(self, batches: Sequence[Any]) -> Statistics:
        """The full model's batch-norm statistics over all ranks' batches, by buffer. Collective."""
        ...

    def evaluate_subnetworks(self, batches: Sequence[Any]) -> list[float]:
        """Mean loss per token of each group's subnetwork, over its ranks' batches. Collective."""
        ...

    def stream_state(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Every whole tensor of the full model by name, on rank 0 (None elsewhere). Collective."""
        ...

    def all_reduce_control(self, values: torch.Tensor) -> None:
        """Sum a few numbers over all ranks, in place; collective."""
        ...

    def agree_on_buffers(self) -> None:
        """Make persistent buffers the means over the ranks of their holders. Collective."""
        ...

    def shard_parameters(self) -> None:
        """Bring every parameter into its sharded form, with the values of the last update."""
        ...

    # -- local steps -------------------------------------------------------------------------------

    @property
    def local(self) -> LocalSteps | None:
        """The local steps. None while gradients are averaged in every step."""
        ...

    def spot_of(self, name: str) -> Spot:
        """Where a weight's part is that :class:`GroupPart` and :class:`CommonPart` call
        ``name``.
        """
        ...

    def only_part(self) -> GroupPart:
        """This process's weights and optimizer state, where groups take no steps on their own."""
        ...

    def begin_local_steps(self) -> None:
        """Let groups take steps of their own. Their weights become the anchors. Collective."""
        ...

    def end_local_steps(self) -> None:
        """Average gradients in every step again. Weights must be equal at all holders."""
        ...

    # -- the optimizer, from the moment when it is attached ----------------------------------------

    optimizer: Optimizer
    needs_whole_matrices: bool  # whether the optimizer's step depends on them
    rate_scale: HolderScale | None  # multiplies the rates of units, with sdp.lr_scale

    def attach(self, optimizer: Optimizer, config: Config) -> None:
        """Take the optimizer of this process's parameters. Called once, before training."""
        ...

    @property
    def basic_optimizer(self) -> Optimizer:
        """The user's or the configuration's optimizer, without what a library wraps around it."""
        ...

    @property
    def stepped(self) -> Mapping[str, torch.Tensor]:
        """The tensors that the optimizer steps on, by canonical name."""
        ...

    def gradients(self) -> list[torch.Tensor]:
        """The averaged gradients that the next update uses."""
        ...

    def update(self, gradients: list[torch.Tensor], norm: float, scheduler: Any) -> Update:
        """Clip, step, drop gradients, refresh frozen copies, advance the schedule. Collective.

        Args:
            gradients: The result of :meth:`gradients`. The list is emptied to free memory early.
            norm: The finite norm of the full model's gradient.
            scheduler: The learning-rate schedule, or None. DeepSpeed advances its own.
        """
        ...

    def skip_update(self, norm: float) -> Update:
        """Skip a step with a NaN or infinite gradient. Weights and optimizer state stay."""
        ...

    def count_micro_batch(self) -> None:
        """A micro-batch ended without an update."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward reduces no gradients. RuntimeError if that is impossible."""
        ...

    @property
    def loss_scale(self) -> float | None:
        """The factor of the losses of the next step (float16), or None without loss scaling."""
        ...

    @property
    def may_lower_loss_scale(self) -> bool:
        """Whether an overflow may only mean that the loss scale is too high."""
        ...

    def loss_scale_state(self) -> dict[str, float] | None:
        """A dynamic loss scale and its counts, for a checkpoint."""
        ...

    def load_loss_scale(self, state: Mapping[str, float] | None) -> None:
        """Continue from a checkpoint's loss scale, if both have one. Collective."""
        ...

    def learning_rates(self) -> list[float]:
        """The learning rate of each of the user's parameter groups, for the next step."""
        ...

    def names_of_param_groups(self) -> list[list[str]]:
        """The canonical names of the parameters in each parameter group of the optimizer."""
        ...

    def shared_schedule(self, state: dict[str, Any]) -> dict[str, Any]:
        """The part of a schedule's state that is the same on every rank."""
        ...

    def check_holders(self) -> None:
        """Compare state between holders. Collective. Raises HolderMismatchError."""
        ...

    def materialise_optimizer_state(self) -> None:
        """Create the state that the optimizer's first step would create. Weights do not change."""
        ...

    def state_to_save(self) -> StateToSave:
        """This rank's share of a checkpoint."""
        ...

    def continue_at(self, *, steps: int, micro_steps: int, skipped: int) -> None:
        """Set the backend's own counters, if it has some."""
        ...

    # -- bytes -------------------------------------------------------------------------------------

    def predicted_state_bytes(self) -> StateBytes:
        """Bytes of parameters, gradients, optimizer state and frozen copies, by the placement."""
        ...

    def measured_state_bytes(self, gradient_bytes: int) -> StateBytes:
        """Bytes of the tensors that exist. ``gradient_bytes``: of gradients at the last step."""
        ...

    def planned_traffic(self, accumulation: int, step: int | None = None) -> Traffic:
        """Bytes that this rank sends in a step of ``accumulation`` micro-batches, by the placement.

        With local steps these are the bytes of step number ``step``. None: of a whole round.
        """
        ...

    def traffic_formula(self) -> str:
        """The bytes that this rank sends between groups in a step, as a formula with numbers."""
        ...
