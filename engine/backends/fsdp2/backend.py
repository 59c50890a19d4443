"""The native backend: FSDP2 inside a group, and ``engine/sync`` between groups."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...config.masking import Masking
from ...config.sync import SyncSection
from ...distributed.mesh import Holders
from ...distributed.process_groups import Communicators
from ...distributed.tensor_collectives import TensorRanks
from ...distributed.tensors import local_tensor, outside_inference_mode
from ...distributed.traffic import Traffic
from ...full_model.evaluation import StreamedEvaluation, mean_loss
from ...model_interface import get_sharding_groups
from ...optim.clip import squared_norm
from ...placement.layout import Layout
from ...placement.tensor_info import Shard
from ...subnetwork.branch_scale import BranchScale
from ...subnetwork.carve import PassThrough
from ...subnetwork.dormant import DormantCopies
from ...subnetwork.given_model import refuse_shapes
from ...sync.changed_gradients import CHANGED, FinalGradients, compare_gradients
from ...sync.gradients import GradientSync
from ...sync.weights import WeightRefresh
from ..local_steps import ShardedLocalSteps
from ..sharded import ShardedBackend
from .collectives import (
    HiddenParameters,
    drop_unreduced_gradients,
    gather_stream,
    root_stays_gathered,
    zero_missing_gradients,
)
from .connection import await_weights, ends_in_root, make_inner_sync, make_sync, make_tensor_sums
from .offload import ShardHome
from .passes import refuse_hooks
from .sharding import shard
from .uses import ModuleUses, nothing_left_out


class FSDP2Backend(ShardedBackend):
    """One rank's subnetwork.

    The model must already be cut to this rank's part. It may be on the meta device. Call
    :meth:`ready` after the parameters got their values; frozen copies get theirs in that call.

    ``maskings`` are those of the run's phases, the first one first. With a schedule,
    ``pass_throughs`` are the stand-ins of its forward phases.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        stand_ins: dict[str, PassThrough],
        device: torch.device,
        *,
        stage: int,
        compute_dtype: torch.dtype,
        traffic: Traffic,
        tensor_ranks: TensorRanks | None,
        scale: BranchScale,
        home: ShardHome,
        sync: SyncSection | None = None,
        maskings: Sequence[Masking] = (),
        pass_throughs: Mapping[str, PassThrough] | None = None,
    ):
        self.phases = {masking: layout.in_phase(masking) for masking in maskings or (layout.masking,)}
        self._pass_throughs = pass_throughs or {}
        self.layout, self.module, self.device, self.stand_ins = layout, model, device, stand_ins
        self.rank = dist.get_rank()
        self.at = layout.mesh.coordinates(self.rank)
        self.stage, self.compute_dtype = stage, compute_dtype
        self.traffic, self.tensor_ranks, self._scale, self.home = traffic, tensor_ranks, scale, home
        self.clock: Callable[[], float] = time.perf_counter
        self._local: ShardedLocalSteps | None = None
        self._hidden: HiddenParameters | None = None
        self._local_settings = sync
        self._final = FinalGradients()
        self._factors: dict[Holders, float] = {}  # by which gradients were multiplied, if losses have weights
        self._accumulated = False  # whether an earlier micro-batch of this step left gradients
        # One shard in float32 does not need FSDP2. Plain parameters avoid a second copy of the
        # weights.
        self.shards = layout.mesh.shards(stage)
        # Stages 1 and 2 keep parameters whole between forward and backward. With one shard,
        # resharding after forward frees the copy in compute precision, which would otherwise live
        # until the step.
        self._reshards = stage == 3 or self.shards == 1
        self.uses_fsdp = self.shards > 1 or compute_dtype != torch.float32 or home.offloads
        self.communicators = Communicators.build(
            layout.mesh,
            {info.holders for info in layout.parameters.values()},
            replicate_inside=stage == 0,
            alone=self.uses_fsdp and self.shards == 1,
            refreshes={(refresh.source, refresh.members) for refresh in layout.refreshes},
            local_steps=sync is not None,
        )
        self._uses: list[ModuleUses] = []
        if self.uses_fsdp:
            refuse_shapes(layout)
            blocks = [name for name in layout.blocks if name not in stand_ins]
            self._uses = shard(
                model,
                [*blocks, *get_sharding_groups(model)],  # of the shared part, the model asks for some on their own
                self.communicators.fsdp_mesh(device.type),
                compute_dtype=compute_dtype,
                reshards=self._reshards,
                offload=home.policy(),
                traffic=traffic,
            )

    @property
    def shard(self) -> Shard:
        return Shard(self.shards, self.at.fsdp if self.shards > 1 else 0, self.at.tp)

    @property
    def exposed_seconds(self) -> float:
        waited = self._sync.exposed_seconds
        if self._inner_sync is not None:
            waited += self._inner_sync.exposed_seconds
        return waited + (self.local.outer.exposed_seconds if self.local is not None else 0.0)

    def ready(self) -> None:
        """Connect the layer between groups to the parameters and fill frozen copies.

        Call this once, after the parameters got their values.
        """
        everything = dict(self.module.named_parameters())
        self.parameters = {
            name: p for name, p in everything.items() if self.at.sdp in self.layout.parameters[name].holders
        }
        self._frozen = {name: p for name, p in everything.items() if name not in self.parameters}
        self._trained = [p for name, p in self.parameters.items() if self.layout.parameters[name].trainable]
        layout = self.layout
        comes_last = ends_in_root(layout, self.module, uses_fsdp=self.uses_fsdp)
        self._sync = make_sync(self, comes_last, self.home.messages.all_reduce)
        self._inner_sync = make_inner_sync(self, comes_last) if self._local_settings is not None else None
        self._tensor_sums = make_tensor_sums(self)
        self._counted = [
            self.parameters[name]
            for name, info in layout.parameters.items()
            if info.trainable and layout.counts_norm(info, self.at, sharded=self.shards > 1)
        ]
        self._refresh = WeightRefresh(
            layout.refreshes,
            {**self.parameters, **self._frozen},
            self.communicators.refresh,
            self.traffic,
            self.compute_dtype,
            self.home.messages.broadcast,
        )
        blocks = dict.fromkeys(refresh.block for refresh in layout.refreshes)
        await_weights(self.module, blocks, lambda *block: self._refresh.wait(*block), gather_stream)
        if len(self.phases) > 1:
            if isinstance(self.module, FSDPModule):
                self._hidden = HiddenParameters(self.module, self._frozen.values())
            self._dormant = DormantCopies(self.module, self._frozen, self._pass_throughs)
        self.enter_phase(next(iter(self.phases.values())))

    def enter_phase(self, layout: Layout) -> None:
        self._scale.use(layout)
        super().enter_phase(layout)

    def put_aside(self, *, asleep: bool) -> None:
        if self._hidden is not None and asleep:
            self._hidden.hide()
        super().put_aside(asleep=asleep)
        if self._hidden is not None and not asleep:
            self._hidden.show()

    # -- local steps -------------------------------------------------------------------------------

    @property
    def _reducer(self) -> GradientSync:
        """The object that averages the gradients of the present step."""
        if self.local is None:
            return self._sync
        assert self._inner_sync is not None
        return self._inner_sync

    @property
    def local(self) -> ShardedLocalSteps | None:
        return self._local

    def begin_local_steps(self) -> None:
        assert self._local_settings is not None
        self._local = ShardedLocalSteps(self, self._local_settings)

    def end_local_steps(self) -> None:
        self._local = None

    def local_weight(self, name: str) -> torch.Tensor:
        """This rank's part of a parameter. Its memory may change when FSDP2 shards again."""
        return local_tensor(self.parameters[name].detach())

    def refresh_from(self, anchors: Mapping[str, torch.Tensor], names: Collection[str]) -> None:
        self._refresh.start(names, anchors)

    def refresh(self, *, after_step: bool) -> None:
        if not self.layout.keeps_frozen:
            return
        names = {name for name, info in self.layout.parameters.items() if info.trainable or not after_step}
        self._refresh.start(names, self.local.outer.anchors if self.local is not None else None)
        if not after_step:
            self._refresh.finish()

    def forward(self, call: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        with outside_inference_mode(), nothing_left_out(self._uses):
            return call(self.module, batch)

    def backward(self, loss: torch.Tensor, *, boundary: bool, weights: torch.Tensor | None = None) -> None:
        self._multiply({holders: 1 / factor for holders, factor in self._factors.items() if factor})
        self._factors = {}
        if weights is not None:
            loss = loss * weights[0].to(loss.dtype)
        if isinstance(self.module, FSDPModule):
            # Inside the group, stage 1 reduces gradients once, at the boundary. Stages 2 and 3
            # reduce them in every micro-batch. Stages 1 and 2 gather parameters once per step.
            self.module.set_requires_gradient_sync(boundary or self.stage >= 2)
            self.module.set_reshard_after_backward(boundary or self._reshards)
            self.module.set_is_last_backward(boundary)
            refuse_hooks(self.parameters)
            if boundary and self._accumulated and self.stage < 2:
                zero_missing_gradients(self.module)
        self._accumulated = not boundary
        loss = self.scaled(loss)
        reducer = self._reducer
        if self._tensor_sums is not None:
            self._tensor_sums.before_backward()
        if not boundary:
            self._differentiate(loss)
            return
        reducer.arm()
        try:
            self._differentiate(loss)
        except BaseException:
            reducer.abandon()
            raise
        reducer.finish()
        if self._tensor_sums is not None:
            self._tensor_sums.make()
        if self.layout.mesh.world_size > 1 and self.local is None:
            self._final.note(self._trained)

    def weigh_gradients(self, weights: torch.Tensor, unit: float) -> tuple[float, int]:
        mesh, at = self.layout.mesh, self.at
        counts = weights.new_zeros(mesh.data_ranks)  # by data rank
        if at.tp == 0:  # tensor-parallel ranks read the same data
            counts[mesh.data_rank(self.rank)] = weights[0]
        group = self.communicators.group
        if self.local is None:
            self.all_reduce_control(counts)
        elif group is not None:
            self.traffic.record("control", "all_reduce", counts.nbytes, group.size())
            dist.all_reduce(counts, group=group)
        of_group = counts.view(mesh.sdp, mesh.fsdp).sum(1).tolist()
        self._factors = {}
        for holders in {info.holders for info in self.layout.parameters.values()}:
            averaging = holders if self.local is None else (at.sdp,)
            total = sum(of_group[holder] for holder in averaging)
            self._factors[holders] = mesh.data_ranks_of(averaging) * unit / total if total else 0.0
        self._multiply(self._factors)
        self._final.note(self._trained if self.local is None and mesh.world_size > 1 else ())
        return sum(of_group), mesh.data_ranks if self.local is None else mesh.fsdp

    def _multiply(self, factors: Mapping[Holders, float]) -> None:
        """Multiply the gradients of the parameters of each holder set by a factor."""
        infos = self.layout.parameters
        for holders, factor in factors.items():
            named = ((name, p.grad) for name, p in self.parameters.items() if infos[name].holders == holders)
            if gradients := [local_tensor(gradient) for _, gradient in named if gradient is not None]:
                torch._foreach_mul_(gradients, factor)

    def _differentiate(self, loss: torch.Tensor) -> None:
        for uses in self._uses:
            uses.begin_backward()
        loss.backward()
        for uses in self._uses:
            uses.end_backward()

    def zero_grad(self) -> None:
        self._final.forget()
        self._factors = {}
        for parameter in self.parameters.values():
            parameter.grad = None
        self._accumulated = False
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                drop_unreduced_gradients(module)

    def squared_grad_norm_and_loss(self, loss: torch.Tensor) -> tuple[float, float]:
        gradients = [parameter.grad for parameter in self._counted]
        norm = squared_norm([gradient for gradient in gradients if gradient is not None], self.device)
        totals = torch.stack([self.unscaled(norm), loss / self.layout.mesh.world_size])
        if self._final.are_changed():
            totals[0] += CHANGED
        self.all_reduce_control(totals)
        squared, mean_loss = totals.tolist()
        if not CHANGED <= squared < math.inf:
            return squared, mean_loss
        compare_gradients(self.layout, self.parameters, sharded=self.shards > 1)
        self._final.forget()
        return self.squared_grad_norm_and_loss(loss)

    def evaluate(self, batches: Sequence[Any], weights: Sequence[float]) -> float:
        self.agree_on_buffers()
        with self._evaluating(), self._scale.of_full_model():
            if self.layout.keeps_frozen:
                return mean_loss(self, batches, weights)
            return StreamedEvaluation(self).run(batches, weights)

    def gather_root(self) -> None:
        """Make the root module's own parameters whole; a no-op if they are whole.

        FSDP2 takes the end of one pass for the end of forward and shards these parameters again,
        while other passes still need them.
        """
        if isinstance(self.module, FSDPModule):
            self.module.unshard()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """A context without gradients in which the root's own parameters stay gathered.

        They must stay, because batches take turns inside the root's forward.
        """
        gathered = root_stays_gathered(self.module, reshards=self._reshards, at_end=self.shard_parameters)
        with outside_inference_mode(), torch.no_grad(), gathered:
            yield

    def shard_parameters(self) -> None:
        """Bring every parameter into its sharded form and free gathered copies.

        Waits for refreshes that are under way.
        """
        self._refresh.finish()
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _view(self) -> FSDP2Backend:
        return self
