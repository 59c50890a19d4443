"""The native store: FSDP2 inside a group, ZeRO stages 0 to 3, tensor parallelism and offload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from ...config.masking import Masking
from ...config.schema import Config
from ...distributed.process_groups import Communicators
from ...distributed.tensor_collectives import TensorRanks
from ...distributed.tensors import local_tensor, outside_inference_mode
from ...distributed.traffic import Traffic
from ...model_interface import get_sharding_groups
from ...placement.layout import Layout
from ...placement.tensor_info import Shard
from ...placement.units import SHARED
from ...subnetwork.branch_scale import BranchScale
from ...subnetwork.carve import PassThrough
from ...subnetwork.dormant import DormantCopies
from ...subnetwork.given_model import refuse_shapes
from ..store import Averages, Piece, RankContext, Stepped, step_optimizer
from .collectives import (
    HiddenParameters,
    drop_unreduced_gradients,
    gather_stream,
    root_stays_gathered,
    zero_missing_gradients,
)
from .offload import ShardHome
from .passes import ModuleUses, nothing_left_out, refuse_hooks
from .sharding import shard
from .tensor_sums import TensorSums


class Fsdp2Store:
    """One rank's subnetwork under FSDP2. See :class:`~sdp.engine.stores.store.GroupStore`.

    The model must already be cut to this rank's part. It may be on the meta device. Call
    :meth:`ready` after the parameters got their values.

    Args:
        model: the model.
        layout: the layout of the run.
        config: the configuration.
        device: the device of this rank.
        tensor_ranks: the tensor-parallel ranks, or None.
        traffic: counts the bytes sent.
        scale: the scales of branches.
        pass_throughs: with a schedule of maskings, the stand-ins of its forward phases.
    """

    optimizer: Optimizer = None  # type: ignore[assignment]  # until it is made

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        config: Config,
        device: torch.device,
        *,
        tensor_ranks: TensorRanks | None,
        traffic: Traffic,
        scale: BranchScale,
        pass_throughs: Mapping[str, PassThrough],
    ):
        mesh, stage, rank = layout.mesh, config.zero_optimization.stage, dist.get_rank()
        compute_dtype: torch.dtype = getattr(torch, config.precision)
        self.layout, self.module = layout, model
        self._maskings: Sequence[Masking] = config.sdp.maskings
        self._pass_throughs, self._scale = pass_throughs, scale
        shards = mesh.shards(stage)
        self.home = ShardHome(config, device, sends=mesh.sdp > 1 or shards < mesh.fsdp)
        # Stages 1 and 2 keep parameters whole between forward and backward. With one shard,
        # resharding after forward frees the copy in compute precision, which would otherwise live
        # until the step.
        self._reshards = stage == 3 or shards == 1
        # One shard in float32 does not need FSDP2. Plain parameters avoid a second copy of the
        # weights.
        self._uses_fsdp = shards > 1 or compute_dtype != torch.float32 or self.home.offloads
        communicators = Communicators.build(
            mesh,
            {info.holders for info in layout.parameters.values()},
            replicate_inside=stage == 0,
            alone=self._uses_fsdp and shards == 1,
            refreshes={(refresh.source, refresh.members) for refresh in layout.refreshes},
            local_steps=config.sdp.sync is not None,
        )
        self.context = RankContext(
            rank,
            mesh.coordinates(rank),
            mesh,
            device,
            stage,
            compute_dtype,
            communicators,
            traffic,
            tensor_ranks,
            shards,
            buckets=layout.buckets(self._comes_last),
            messages=self.home.messages,
            gather_stream=gather_stream,
        )
        self._stepped: dict[str, Stepped] | None = None
        self._accumulated = False  # whether an earlier micro-batch of this step left gradients
        self._uses: list[ModuleUses] = []
        if self._uses_fsdp:
            refuse_shapes(layout)
            skipped = {name for name, module in model.named_modules() if isinstance(module, PassThrough)}
            self._uses = shard(
                model,
                # Of the shared part, the model asks for some modules on their own.
                [*(name for name in layout.blocks if name not in skipped), *get_sharding_groups(model)],
                communicators.fsdp_mesh(device.type),
                compute_dtype=compute_dtype,
                reshards=self._reshards,
                offload=self.home.policy(),
                traffic=traffic,
            )
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def _comes_last(self, name: str) -> bool:
        """Return whether FSDP2 reduces a parameter only at the end of backward.

        These are the parameters of the root: those that no wrapped module has.
        """
        wrapped = tuple(f"{path}." for path in (*get_sharding_groups(self.module), *self.layout.blocks))
        return self._uses_fsdp and self.layout.parameters[name].unit == SHARED and not name.startswith(wrapped)

    def ready(self) -> None:
        """Find the parameters. Call this once, after they got values."""
        everything = dict(self.module.named_parameters())
        infos, sdp = self.layout.parameters, self.context.at.sdp
        self.parameters = {name: p for name, p in everything.items() if sdp in infos[name].holders}
        whole = [p for name, p in self.parameters.items() if infos[name].trainable and infos[name].tp_dim is None]
        ranks = self.context.tensor_ranks
        self._tensor_sums = TensorSums(whole, ranks, self.context.traffic) if whole and ranks is not None else None
        if len(self._maskings) > 1:
            frozen = {name: p for name, p in everything.items() if name not in self.parameters}
            self._hidden = HiddenParameters(self.module, frozen.values()) if self._uses_fsdp else None  # type: ignore[arg-type]
            self._dormant = DormantCopies(self.module, frozen, self._pass_throughs)

    @property
    def shard(self) -> Shard:
        """Which elements of its parameters this rank has."""
        at, shards = self.context.at, self.context.shards
        return Shard(shards, at.fsdp if shards > 1 else 0, at.tp)

    @property
    def stepped(self) -> Mapping[str, Stepped]:
        if self._stepped is not None:
            return self._stepped
        param_groups = self.optimizer.param_groups if self.optimizer is not None else ()
        groups = {id(p): index for index, group in enumerate(param_groups) for p in group["params"]}
        infos = self.layout.parameters
        self._stepped = {
            name: Stepped(p, info.unit, info.holders, (name,), groups.get(id(p)), info.tp_dim is not None)
            for name, p in self.parameters.items()
            for info in [infos[name]]
        }
        return self._stepped

    # -- steps -------------------------------------------------------------------------------------

    def forward(self, call: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        with outside_inference_mode(), nothing_left_out(self._uses):
            return call(self.module, batch)

    def backward(self, loss: torch.Tensor, averages: Averages | None) -> None:
        boundary = averages is not None
        if isinstance(self.module, FSDPModule):
            # Inside the group, stage 1 reduces gradients once, at the boundary. Stages 2 and 3
            # reduce them in every micro-batch. Stages 1 and 2 gather parameters once per step.
            stage = self.context.stage
            self.module.set_requires_gradient_sync(boundary or stage >= 2)
            self.module.set_reshard_after_backward(boundary or self._reshards)
            self.module.set_is_last_backward(boundary)
            refuse_hooks(self.parameters)
            if boundary and self._accumulated and stage < 2:
                zero_missing_gradients(self.module)
        self._accumulated = not boundary
        if self._tensor_sums is not None:
            self._tensor_sums.before_backward()
        if averages is None:
            self._differentiate(loss)
            return
        averages.arm()
        try:
            self._differentiate(loss)
        except BaseException:
            averages.abandon()
            raise
        averages.finish()
        if self._tensor_sums is not None:
            self._tensor_sums.make()

    def _differentiate(self, loss: torch.Tensor) -> None:
        for uses in self._uses:
            uses.begin_backward()
        loss.backward()
        for uses in self._uses:
            uses.end_backward()

    def step(self) -> None:
        # A forward pass after backward may have left gathered copies of the old weights.
        self.reshard()
        step_optimizer(self)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        self._accumulated = False
        for module in self._sharded:
            drop_unreduced_gradients(module)

    def reshard(self) -> None:
        for module in self._sharded:
            module.reshard()

    # -- the full model, and the state -------------------------------------------------------------

    @contextmanager
    def evaluating(self, *, full_model: bool) -> Iterator[Callable[[], None]]:
        # Batches take turns inside the root's forward, so its own parameters must stay gathered.
        # FSDP2 takes the end of one pass for the end of forward and shards them again.
        def gather_root() -> None:
            if isinstance(self.module, FSDPModule):
                self.module.unshard()

        gathered = root_stays_gathered(self.module, reshards=self._reshards, at_end=self.reshard)
        scales = self._scale.of_full_model() if full_model else nullcontext()
        with outside_inference_mode(), torch.no_grad(), gathered, scales:
            yield gather_root

    def part(self, name: str) -> torch.Tensor:
        return local_tensor(self.parameters[name].detach())

    def pieces(self, key: str, tensor: torch.Tensor) -> Iterable[Piece]:
        info = self.layout.parameters[key]
        return [Piece(info, local_tensor(tensor), info.offset(self.shard))]

    def weights_changed(self) -> None:
        """A no-op: the optimizer steps on the model's own parameters."""

    def enter_phase(self, layout: Layout) -> None:
        self._scale.use(layout)
        if layout.masking != self.layout.masking:
            self.reshard()
            if layout.keeps_frozen:
                self._dormant.wake()
                if self._hidden is not None:
                    self._hidden.show()
            else:
                if self._hidden is not None:
                    self._hidden.hide()
                self._dormant.sleep()
        self.layout = layout
