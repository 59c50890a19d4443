"""The FSDP2 store: a group's subnetwork under FSDP2, tensor parallelism and offload.

If nothing is sharded, offloaded or cast, the store uses plain parameters instead of FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.optim import Optimizer

from ...config.schema import Config
from ...distributed.collectives import TensorRanks, Traffic, all_gather_single, local_tensor, outside_inference_mode
from ...model_interface import get_sharding_groups
from ...placement.layout import Layout
from ...placement.tensor_info import Shard
from ...subnetwork.branch_scale import BranchScale
from ...subnetwork.carve import PassThrough, refuse_together, with_skeletons
from ...subnetwork.given_model import refuse_shapes
from ...subnetwork.materialise import restore_ties
from ..store import (
    Averages,
    DeviceMessages,
    Piece,
    RankContext,
    Stepped,
    make_communicators,
    optimizer_steps,
    parameters_of,
)
from .sharding import (
    ModuleUses,
    drop_unreduced_gradients,
    forget_root,
    gather_stream,
    nothing_left_out,
    refuse_hooks,
    refuse_inference_mode,
    refuse_whole_state,
    root_stays_gathered,
    shard,
    zero_missing_gradients,
)


class ShardHome:
    """The memory in which this rank keeps shards of parameters, gradients and optimizer state.

    With ``offload_optimizer`` or ``offload_param`` it is the host's memory, and the optimizer steps
    on the host. FSDP2 copies parameters to the device before it gathers them, and copies reduced
    gradients back to the host.

    Args:
        device: the rank's own device.
        sends: whether gradients are averaged with other ranks after FSDP2 has reduced them.

    Attributes:
        device: the device of the shards.
        offloads: whether the shards are in the host's memory.
        messages: sends shards to other groups.
    """

    def __init__(self, config: Config, device: torch.device, *, sends: bool):
        zero = config.zero_optimization
        self.offloads = zero.offloads
        self.device = torch.device("cpu") if self.offloads else device
        self.messages = DeviceMessages(device)
        self._own = device
        # FSDP2 copies to pinned memory while backward goes on. Tensors must be on the device to be
        # averaged.
        self._pins = device.type == "cuda" and not sends

    def policy(self) -> OffloadPolicy:
        """Return the ``offload_policy`` for FSDP2's ``fully_shard``."""
        return CPUOffloadPolicy(pin_memory=self._pins) if self.offloads else OffloadPolicy()

    def keep_buffers_on_device(self, model: nn.Module) -> None:
        """Move the buffers of ``model`` to the rank's own device, where forward reads them."""
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self._own))


class TensorSums:
    """Sums gradients of parameters that every tensor-parallel rank has whole, such as norms.

    Each tensor-parallel rank computes such a gradient from its part of the sequence only.

    Args:
        parameters: the parameters that tensor parallelism does not cut.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: TensorRanks, traffic: Traffic):
        self._parameters, self._ranks, self._traffic = parameters, ranks, traffic
        self._are_sums = False

    def before_backward(self) -> None:
        """Undo :meth:`make`, if a script calls backward a second time without a step in between."""
        for parameter in self._parameters if self._are_sums else ():
            if parameter.grad is not None:
                parameter.grad.div_(self._ranks.size)
        self._are_sums = False

    def make(self) -> None:
        """Sum the gradients over the tensor-parallel ranks. Collective. All gradients must exist.

        Ranks gather all gradients and add them in rank order. An all-reduce might add in another
        order in each group, and then holders would not stay bitwise equal.
        """
        gradients = [local_tensor(parameter.grad) for parameter in self._parameters]  # type: ignore[arg-type]
        mine = torch.cat([gradient.reshape(-1) for gradient in gradients])
        shares = mine.new_empty((self._ranks.size, mine.numel()))
        ranks = dist.get_process_group_ranks(self._ranks.group)
        self._traffic.record("inside groups", "all_gather", shares.nbytes, ranks)
        all_gather_single(shares.view(-1), mine, group=self._ranks.group)
        total = mine.copy_(shares[0])
        for share in shares[1:]:
            total += share
        for gradient, values in zip(gradients, total.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))
        self._are_sums = True


class Fsdp2Store:
    """A :class:`~sdp.engine.stores.store.GroupStore` whose state FSDP2 shards.

    Call :meth:`ready` when the parameters have values.

    Args:
        model: the model, already cut to this rank's part. It may be on the meta device.
        tensor_ranks: the tensor-parallel ranks, or None without tensor parallelism.
        scale: the branch scaling (``sdp.branch_scale``).
        rebuild: builds the cut model for the layout of another phase of a masking schedule. In its
            result, only buffers have values.
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
        rebuild: Callable[[Layout], nn.Module],
    ):
        mesh, stage, rank = layout.mesh, config.zero_optimization.stage, dist.get_rank()
        compute_dtype: torch.dtype = getattr(torch, config.precision)
        self.layout, self.module = layout, model
        self._scale, self._rebuild = scale, rebuild
        shards = mesh.shards(stage)
        self.home = ShardHome(config, device, sends=mesh.sdp > 1 or shards < mesh.fsdp)
        # Stages 1 and 2 keep parameters whole between forward and backward. With one shard,
        # resharding after forward frees the copy in compute precision, which would otherwise live
        # until the step.
        self._reshards = stage == 3 or shards == 1
        # One shard in float32 does not need FSDP2. Plain parameters avoid a second copy of the
        # weights.
        self._uses_fsdp = shards > 1 or compute_dtype != torch.float32 or self.home.offloads
        communicators = make_communicators(layout, config, alone=self._uses_fsdp and shards == 1)
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
            refuse_inference_mode(model)
            refuse_whole_state(model)
        # The model may name modules of the shared part that are sharded separately.
        self._shard([*layout.blocks, *get_sharding_groups(model), ""])

    def _shard(self, names: Iterable[str]) -> None:
        """Apply FSDP2 to the modules ``names``, except for skipped blocks."""
        if self._uses_fsdp:
            context = self.context
            self._uses += shard(
                self.module,
                [name for name in names if not isinstance(self.module.get_submodule(name), PassThrough)],
                context.communicators.fsdp_mesh(context.device.type),
                compute_dtype=context.compute_dtype,
                reshards=self._reshards,
                offload=self.home.policy(),
                traffic=context.traffic,
            )
        self._sharded = [module for module in self.module.modules() if isinstance(module, FSDPModule)]

    def _comes_last(self, name: str) -> bool:
        """Return whether FSDP2 reduces a parameter only at the end of backward.

        These are the parameters of the root, which are in no wrapped module.
        """
        wrapped = tuple(f"{path}." for path in (*get_sharding_groups(self.module), *self.layout.blocks))
        return self._uses_fsdp and not self.layout.parameters[name].path.startswith(wrapped)

    def ready(self) -> None:
        """Collect the held parameters. Call this once, when the parameters have values."""
        infos, sdp = self.layout.parameters, self.context.at.sdp
        everything = parameters_of(self.module, self.layout, sdp)
        self.parameters = {name: p for name, p in everything.items() if name in infos and sdp in infos[name].holders}
        whole = [p for name, p in self.parameters.items() if infos[name].trainable and infos[name].tp_dim is None]
        ranks = self.context.tensor_ranks
        self._tensor_sums = TensorSums(whole, ranks, self.context.traffic) if whole and ranks is not None else None

    @property
    def shard(self) -> Shard:
        """The shard that this rank stores of each parameter."""
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
        with optimizer_steps(self):
            self.optimizer.step()

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

    def local_weight(self, name: str) -> torch.Tensor:
        return local_tensor(self.parameters[name].detach())

    def pieces(self, key: str, tensor: torch.Tensor) -> Iterable[Piece]:
        info = self.layout.parameters[key]
        return [Piece(info, local_tensor(tensor), info.offset(self.shard))]

    def weights_changed(self) -> None:
        """Do nothing, because the optimizer steps on the model's own parameters."""

    def enter_phase(self, layout: Layout) -> None:
        self.reshard()
        self.layout, group = layout, self.context.at.sdp
        held = {unit.path for unit in layout.units if layout.placement.holds(group, unit.index)}
        names = [name for name in layout.blocks if name not in held]
        modes = {path: module.training for path, module in with_skeletons(self.module)}
        buffers, rebuilt = dict(self.module.named_buffers()), self._rebuild(layout)
        for name in names:
            self.module.set_submodule(name, rebuilt.get_submodule(name))
        self._uses = [uses for uses in self._uses if uses.name not in names]
        self._shard(names)
        for name in names:
            self._give_tensors(name, self.module.get_submodule(name), buffers)
        restore_ties(self.module, layout.aliases)
        for path, module in with_skeletons(self.module):
            module.training = modes.get(path, module.training)
        refuse_together(self.module, [module for module in self.module.modules() if isinstance(module, PassThrough)])
        if isinstance(self.module, FSDPModule):
            forget_root(self.module)

    def _give_tensors(self, name: str, block: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
        """Give a new block the parameters and ``buffers`` that exist, and memory for copies."""
        for path, parameter in list(block.named_parameters(prefix=name)):
            kept = self.parameters.get(path)
            if kept is None:
                kept = nn.Parameter(torch.empty_like(parameter, device=self.home.device), requires_grad=False)
            owner, _, key = path.rpartition(".")
            self.module.get_submodule(owner).register_parameter(key, kept)
        for path, _ in list(block.named_buffers(prefix=name)):
            if path in buffers:
                owner, _, key = path.rpartition(".")
                setattr(self.module.get_submodule(owner), key, buffers[path])
