"""What groups exchange in a step: gradients, the gradient norm, and new weights of frozen copies.

Also compares the holders of each unit, which must stay bitwise equal.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..config.method import Masking
from ..config.schema import Config
from ..distributed.agreement import find_differences
from ..distributed.collectives import local_tensor, stored_tensor
from ..distributed.mesh import Holders
from ..errors import HolderMismatchError, NonFiniteError, PlacementError
from ..optim.clip import squared_norm
from ..placement.placement import Placement
from ..stores.store import GroupStore, Stepped, parameters_of
from ..subnetwork.copies import quantise
from .gradients import CHANGED, FinalGradients, GradientSync, WeightRefresh, compare_gradients, unequal_holders

CHUNK = 1 << 20


@torch.no_grad()
def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Return a 63-bit checksum of the tensors' bits. It changes if any single value changes."""
    total = 0
    for tensor in tensors:
        flat = local_tensor(tensor).contiguous().view(-1)
        words = flat.view(torch.int32 if flat.element_size() % 4 == 0 else torch.uint8)
        for start in range(0, words.numel(), CHUNK):
            chunk = words[start : start + CHUNK].long()
            positions = torch.arange(start + 1, start + 1 + chunk.numel(), device=chunk.device)
            total = (total * 1_000_003 + int((chunk * (2 * positions + 1)).sum())) & ((1 << 63) - 1)
    return total


def check_holders(
    store: GroupStore, optimizer: Optimizer, weights: Mapping[str, torch.Tensor], owners: Mapping[str, torch.Tensor]
) -> None:
    """Check that holders have bitwise equal weights and optimizer state. Collective.

    Args:
        optimizer: The optimizer whose state is compared.
        weights: Weights to compare instead of the store's tensors, by key of ``store.stepped``.
        owners: Tensors whose optimizer state is compared, if not the store's tensors, by key.

    Raises:
        HolderMismatchError: Two holders differ. It is raised on every rank, and names the unit and
            two ranks that differ.
    """

    def bits(members: Sequence[tuple[str, Stepped]]) -> int:
        return checksum(
            tensor
            for key, one in members
            for tensor in (weights.get(key, one.tensor), *_state_of(optimizer, owners.get(key, one.tensor)))
        )

    found = unequal_holders(store, bits, torch.int64, operator.eq)
    if found is not None:
        what, one, other = found
        raise HolderMismatchError(
            f"{what}: weights or optimizer state of {other} differ from those of {one}, and holders must stay bitwise "
            "equal; check whether the script changes weights, gradients, learning rates or optimizer state on only "
            "some ranks, or calls optimizer.step(); if not, check the hardware; then resume from the last checkpoint"
        )


def check_placement(placement: Placement, device: torch.device) -> None:
    """Check that all ranks have computed the same placement. Collective.

    Each placement needs other process groups, so ranks with different placements would wait for
    each other forever.

    Raises:
        PlacementError: Two ranks have different placements. All ranks raise this error.
    """
    if any(find_differences([repr((placement.units, placement.holders))], device)):
        raise PlacementError(
            "sdp.placement: ranks have computed different placements; start all ranks with the same configuration, "
            "model and versions of sdp and NumPy, or name the holders of every unit in sdp.placement"
        )


def _state_of(optimizer: Optimizer, parameter: torch.Tensor) -> list[torch.Tensor]:
    state = optimizer.state.get(parameter, {})
    return [value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor) and value.dim()]


class BetweenGroups:
    """One rank's communication with other groups. Works with any kind of store.

    The engine uses it to average gradients, to compute the norm of the full model's gradient, to
    send weights to frozen copies, and to compare holders.

    Attributes:
        local: :class:`~sdp.engine.local_steps.LocalSteps` while groups step on their own
            (``sdp.sync``), otherwise None.
    """

    def __init__(self, store: GroupStore, config: Config):
        self.store, self.context = store, store.context
        context = self.context
        self.local: Any = None
        self._tensors = {key: one.tensor for key, one in store.stepped.items()}
        holders = context.communicators.holders
        self._sync = GradientSync(
            context.buckets, self._tensors, holders, context.traffic,
            clock=context.clock, messages=context.messages,
        )  # fmt: skip
        self._inner = self._make_inner_sync() if config.sdp.sync is not None else None
        trained = [one for one in store.stepped.values() if one.tensor.requires_grad]
        self._trained = [one.tensor for one in trained]
        self._counted = [one.tensor for one in trained if context.counts_once(one)]
        self._counted_in_group = [one.tensor for one in trained if context.counts(one)]
        self._final = FinalGradients()
        self._factors: dict[Holders, float] = {}  # the factor of the gradients, if losses have weights
        self._hooks: list[RemovableHandle] = []
        self._finite: dict[str, torch.Tensor] = {}  # whether the scales are finite that this rank sent last
        self._prepare_refresh()

    def _make_inner_sync(self) -> GradientSync:
        """Prepare averages of gradients in local steps, which cover only this group's replicas."""
        context = self.context
        replicas, holder_sets = context.communicators.replicas, {bucket.holders for bucket in context.buckets}
        groups = dict.fromkeys(holder_sets, replicas) if replicas is not None else {}
        return GradientSync(
            context.buckets, self._tensors, groups, context.traffic, clock=context.clock, scope="inside groups"
        )

    def _prepare_refresh(self) -> None:
        """Prepare refreshes of this phase's frozen copies. Blocks wait for their copies."""
        module, layout, context = self.store.module, self.store.layout, self.context
        everything = parameters_of(module, layout, context.at.sdp)
        weights = {name: stored_tensor(parameter) for name, parameter in everything.items()}
        refresh = self._refresh = WeightRefresh(
            layout.refreshes, weights, context.communicators.refresh, context.traffic, context.compute_dtype,
            context.messages, self._quantise,
            {name for name, info in layout.parameters.items() if info.is_quantised(layout.copies.dtype)},
        )  # fmt: skip
        while self._hooks:
            self._hooks.pop().remove()
        for name in dict.fromkeys(one.block for one in layout.refreshes):
            # This hook must run before FSDP2's own hook, which gathers the shards.
            wait = lambda block, _, name=name: refresh.wait(name, context.gather_stream(block))  # noqa: E731
            self._hooks.append(module.get_submodule(name).register_forward_pre_hook(wait, prepend=True))

    def _quantise(self, name: str, weight: torch.Tensor | None) -> Sequence[torch.Tensor]:
        """Quantise this rank's shard of a held parameter, or ``weight`` in its place."""
        layout, context = self.store.layout, self.context
        weight = self.store.local_weight(name) if weight is None else weight.detach().to(context.device)
        q, s = quantise(weight, layout.copies.dtype)
        self._finite[name] = s.view(torch.float16).isfinite().all()
        return context.shard_of_copy(q), context.shard_of_copy(s)

    @property
    def is_local(self) -> bool:
        """Whether each group takes the next step without other groups (``sdp.sync``)."""
        return self.local is not None

    @property
    def exposed_seconds(self) -> float:
        """Seconds that this rank has waited for other groups after backward passes had ended."""
        others = [self._inner, self.local and self.local.outer]
        return self._sync.exposed_seconds + sum(other.exposed_seconds for other in others if other is not None)

    # -- gradients ---------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, loss_scale: float | None, *, boundary: bool) -> None:
        """Accumulate the gradients of ``loss``. At a boundary, average the accumulated gradients.

        Args:
            loss: the loss of a micro-batch on this rank.
            loss_scale: a factor by which the loss is multiplied, or None.
            boundary: whether this is the last micro-batch before a step. Then every gradient
                becomes the mean over the ranks of its unit's holders, or in local steps the mean
                over this group's ranks.
        """
        self._multiply({holders: 1 / factor for holders, factor in self._factors.items() if factor})
        self._factors = {}
        averages = (self._inner if self.is_local else self._sync) if boundary else None
        self.store.backward(loss if loss_scale is None else loss.float() * loss_scale, averages)
        if boundary and not self.is_local and self.context.world_size > 1:
            self._final.note(self._trained)

    def weigh_gradients(self, weight: torch.Tensor, unit: float) -> tuple[float, int]:
        """Divide each averaged gradient by the sum of weights of the averaged losses. Collective.

        Args:
            weight: the sum of the weights of this rank's losses in the step, a float64 scalar.
            unit: before backward, each loss was multiplied by its weight divided by ``unit``.

        Returns:
            The sum of weights over all data ranks, and the number of data ranks. In local steps,
            only data ranks of this group count.
        """
        mesh, at = self.context.mesh, self.context.at
        counts = torch.zeros(mesh.data_ranks, dtype=torch.float64, device=self.context.device)
        if at.tp == 0:  # tensor-parallel ranks read the same data
            counts[mesh.data_rank(self.context.rank)] = weight
        if self.is_local:
            self.context.sum_in_group(counts)
        else:
            self.context.all_reduce_control(counts)
        of_group = dict(zip(mesh.groups, counts.view(-1, mesh.fsdp).sum(1).tolist(), strict=True))
        self._factors = {}
        for holders in {one.holders for one in self.store.stepped.values()}:
            averaging = (at.sdp,) if self.is_local else holders
            total = sum(of_group[holder] for holder in averaging)
            self._factors[holders] = len(averaging) * mesh.fsdp * unit / total if total else 0.0
        self._multiply(self._factors)
        self._final.note(() if self.is_local or mesh.world_size == 1 else self._trained)
        return sum(of_group.values()), mesh.fsdp if self.is_local else mesh.data_ranks

    def _multiply(self, factors: Mapping[Holders, float]) -> None:
        """Multiply the gradients of the tensors of each holder set by a factor."""
        for holders, factor in factors.items():
            members = (one.tensor.grad for one in self.store.stepped.values() if one.holders == holders)
            if gradients := [local_tensor(gradient) for gradient in members if gradient is not None]:
                torch._foreach_mul_(gradients, factor)

    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's gradients for the next update."""
        return [tensor.grad for tensor in self._tensors.values() if tensor.grad is not None]

    def forget_gradients(self) -> None:
        """Drop all gradients of this rank."""
        self._final.forget()
        self._factors = {}
        self.store.zero_grad()

    def norm_and_loss(self, loss: torch.Tensor, loss_scale: float = 1.0) -> tuple[float, float]:
        """Return the norm of the full model's gradient, and the mean loss of all ranks. Collective.

        Norm and loss are equal on all ranks. One message has both, so the host waits only once.

        Args:
            loss: this rank's loss, a float64 scalar.
            loss_scale: the loss scale by which the gradients are still multiplied.

        Raises:
            HolderMismatchError: The script has changed gradients differently at two holders.
            NonFiniteError: A weight has become too large for a quantised copy.
        """
        norm = squared_norm([t.grad for t in self._counted if t.grad is not None], self.context.device)
        totals = torch.stack([norm / loss_scale**2, loss / self.context.world_size])
        if self._final.are_changed():
            totals[0] += CHANGED
        self.context.all_reduce_control(totals)
        squared, mean_loss = totals.tolist()
        if not math.isfinite(squared):
            self.check_copies()
        if CHANGED <= squared < math.inf:
            compare_gradients(self.store)
            self._final.forget()
            return self.norm_and_loss(loss, loss_scale)
        return math.sqrt(squared), mean_loss

    def prepare_step(self) -> None:
        """Wait until the old weights are sent to frozen copies. Call this before a step."""
        self._final.forget()  # DeepSpeed frees gradients while it steps
        self.finish_refresh()

    def reshard(self) -> None:
        """Free gathered parameters, after new weights of frozen copies have arrived."""
        self._refresh.finish()
        self.store.reshard()

    def norm_in_group(self) -> float:
        """Return the norm of this group's gradient, for local steps. Collective in the group."""
        squared = squared_norm([t.grad for t in self._counted_in_group if t.grad is not None], self.context.device)
        self.context.sum_in_group(squared)
        return math.sqrt(squared.item())

    # -- frozen copies -----------------------------------------------------------------------------

    def refresh(self, names: Collection[str], weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Start to send weights from holders to the frozen copies of other groups. Collective.

        The next forward pass of a block waits until the block's copies have arrived.

        Args:
            names: the parameters whose weights are sent.
            weights: by name, weights to send instead of the holder's parameters.
        """
        if self.store.layout.keeps_frozen:
            self._refresh.start(names, weights)
            if not self.context.awaits_blocks:
                self._refresh.finish()

    def refresh_trained(self) -> None:
        """Start to send all trained weights to frozen copies, after an update. Collective."""
        self.refresh([name for name, info in self.store.layout.parameters.items() if info.trainable])

    def refresh_all(self, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Send all weights to frozen copies, and wait for them. Collective.

        ``weights`` are sent instead of the parameters of the same names.
        """
        self.refresh(self.store.layout.parameters, weights)
        self._refresh.finish()
        self.check_copies()

    def check_copies(self) -> None:
        """Raise NonFiniteError if weights are NaN, or too large to be quantised. Collective."""
        layout = self.store.layout
        if not layout.keeps_frozen or layout.copies.dtype == "compute" or dist.get_backend() == "fake":
            return
        names = list(layout.parameters)
        found = torch.tensor(
            [max((1 + names.index(name) for name, fine in self._finite.items() if not fine), default=0)],
            device=self.context.device,
        )
        self.context.all_reduce_control(found, dist.ReduceOp.MAX)
        if found.item():
            raise NonFiniteError(
                f"{names[int(found) - 1]}: a copy in {layout.copies.dtype} has a scale that is not finite, because the "
                'weights are NaN, infinite or too large; lower the learning rate, or set sdp.copies.dtype to "compute"'
            )

    def finish_refresh(self) -> None:
        """Wait until the weights that are being sent to frozen copies have arrived."""
        if self.store.layout.keeps_frozen:
            self._refresh.finish()

    def enter_phase(self, masking: Masking) -> None:
        """Change to another masking of a schedule, and refresh all frozen copies. Collective.

        Weights and optimizer state stay.
        """
        if masking != self.store.layout.masking:
            self._refresh.finish()
            self.store.enter_phase(self.store.layout.in_phase(masking))
            self._prepare_refresh()
        self.refresh_all()

    # -- agreement ---------------------------------------------------------------------------------

    def check_holders(
        self,
        optimizer: Optimizer,
        weights: Mapping[str, torch.Tensor] | None = None,
        owners: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Check that holders have bitwise equal weights and optimizer state. Collective.

        The function ``check_holders`` of this module describes the arguments. Raises
        HolderMismatchError if two holders differ.
        """
        if self.context.world_size > 1 and self.context.mesh.alone is None:
            check_holders(self.store, optimizer, weights or {}, owners or {})

    def names_of_param_groups(self) -> list[list[str]]:
        """Return the canonical parameter names of each of the optimizer's parameter groups."""
        infos = self.store.layout.parameters
        found: list[list[str]] = [[] for _ in self.store.optimizer.param_groups]
        for one in self.store.stepped.values():
            if one.group is not None:
                found[one.group] += [infos[name].canonical for name in one.names]
        return found

    def learning_rates(self) -> list[float]:
        """Return the learning rate of each of the user's parameter groups, for the next step.

        For a user's group without parameters on this rank, the rate is that of the optimizer's
        first group.
        """
        rates = [group["lr"] for group in self.store.optimizer.param_groups]
        groups, count = self.context.user_groups, self.context.user_group_count
        if groups is None:
            return rates
        return [rates[groups.index(index) if index in groups else 0] for index in range(count)]
