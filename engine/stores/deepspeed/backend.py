"""The DeepSpeed backend: one DeepSpeed engine per group, ZeRO 0 to 3, averages between groups.

DeepSpeed does the reductions inside a group, the optimizer step and its gathers. Between reductions
and step, at the accumulation boundary, this backend averages among holders, computes the global
norm and clips. With one group nothing is installed: DeepSpeed runs unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...config.masking import Masking
from ...config.sync import SyncSection
from ...distributed.mesh import Coordinates
from ...distributed.tensors import outside_inference_mode
from ...distributed.traffic import Traffic
from ...full_model.evaluation import StreamedEvaluation, mean_loss
from ...optim.clip import squared_norm
from ...placement.layout import Layout
from ...subnetwork.carve import PassThrough
from ...subnetwork.dormant import DormantCopies
from ...sync.gradients import GradientSync
from .base import CalledEngine, Gathered
from .checks import UsedParameters
from .optimizer import LossScale, MasterCopies, ZeroState
from .partitions import Bundle
from .process_groups import Averages, ProcessGroups
from .shard_sync import EarlyLaunch, ShardSync
from .stepping import DeepSpeedSteps


class DeepSpeedBackend(DeepSpeedSteps):
    """One rank's subnetwork inside a DeepSpeed ``engine``.

    ``bundles`` are those of the full model. DeepSpeed has the ones that this rank's group holds.
    ``maskings`` are those of the run's phases, the first one first. With a schedule,
    ``pass_throughs`` are the stand-ins of its forward phases.
    """

    def __init__(
        self,
        engine: Any,
        layout: Layout,
        bundles: Sequence[Bundle],
        process_groups: ProcessGroups,
        stand_ins: dict[str, PassThrough],
        device: torch.device,
        *,
        stage: int,
        compute_dtype: torch.dtype,
        traffic: Traffic,
        maskings: Sequence[Masking],
        pass_throughs: Mapping[str, PassThrough],
        sync: SyncSection | None = None,
    ):
        self.deepspeed, self.layout, self.stand_ins, self.device = engine, layout, stand_ins, device
        self.module: nn.Module = engine.module
        self.rank = dist.get_rank()
        self.at: Coordinates = layout.mesh.coordinates(self.rank)
        self.stage, self.compute_dtype, self.traffic = stage, compute_dtype, traffic
        self.communicators, self._process_groups = process_groups.communicators, process_groups
        self.installed = layout.mesh.sdp > 1  # whether anything is added to DeepSpeed
        self.clock: Callable[[], float] = time.perf_counter
        everything = dict(self.module.named_parameters())
        self.parameters = {name: p for name, p in everything.items() if self.at.sdp in layout.parameters[name].holders}
        self._frozen = {name: p for name, p in everything.items() if name not in self.parameters}
        self.zero = ZeroState(engine, stage) if stage else None
        self.copies = MasterCopies(engine, self.parameters) if not stage and compute_dtype != torch.float32 else None
        self.scale = LossScale(engine.optimizer)
        self.bundles = [bundle for bundle in bundles if self.at.sdp in bundle.holders]
        self._exposed = 0.0
        self._local, self.local_settings = None, sync
        self.usage = self._watch_use() if self.zero is not None else None
        self._averages = self._average(bundles) if self.installed else Averages()
        self._differences = None
        self._refresh = process_groups.make_refresh(
            layout, {**self.parameters, **self._frozen}, stage=stage, traffic=traffic, dtype=compute_dtype
        )
        self._early = self._launch_early()
        self.options = [bundle.options for bundle in self.bundles]
        self.options_count = 1 + max(bundle.options for bundle in bundles)
        for name in dict.fromkeys(refresh.block for refresh in layout.refreshes) if stage < 3 else ():
            self.module.get_submodule(name).register_forward_pre_hook(self._wait_for_weights(name), prepend=True)
        self.phases = {masking: layout.in_phase(masking) for masking in maskings}
        if len(maskings) > 1:
            # DeepSpeed knows the partitions of ZeRO 3, so they stay allocated.
            self._dormant = DormantCopies(self.module, self._frozen, pass_throughs, keeps_memory=stage == 3)
        self.enter_phase(self.phases[maskings[0]])
        self.note_weights()

    def put_aside(self, *, asleep: bool) -> None:
        super().put_aside(asleep=asleep)
        if self.zero is not None:
            self.zero.note_other_modules(self._frozen.values(), absent=asleep)

    def _average(self, bundles: Sequence[Bundle]) -> Averages:
        layout = self.layout
        if self.zero is not None:
            return self._process_groups.average_shards(layout.mesh, bundles, self.stage, self.traffic)
        # Gradients are whole. They are reduced as they become ready, inside and between groups.
        self.deepspeed.enable_backward_allreduce = False
        return self._process_groups.average_whole(
            layout, self.parameters, self.traffic, self.clock, local_steps=self.local_settings is not None
        )

    def _launch_early(self) -> EarlyLaunch | None:
        """Let averages begin as soon as DeepSpeed has reduced a partition, which is then final.

        Returns None below ZeRO 3, and with offload, because partitions are then final only at the
        end of backward.
        """
        if self._sync is None or self.stage < 3 or self.zero is None or self.zero.offloaded:
            return None
        early = EarlyLaunch(
            self._sync, self.zero.members, [master.numel() for master in self.zero.masters], self.device
        )
        self.zero.on_reduced(early.ready)
        return early

    def _watch_use(self) -> UsedParameters:
        return UsedParameters(
            {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad},
            group=self.at.sdp,
            rank_inside=self.rank_inside,
            ranks_inside=self.ranks_inside,
            must_stay_equal=self.zero is not None and self.zero.offloaded,
        )

    @property
    def exposed_seconds(self) -> float:
        waited = self._exposed + self._averages.exposed_seconds
        return waited + (self.local.outer.exposed_seconds if self.local is not None else 0.0)

    def _wait_for_weights(self, block: str) -> Callable[..., None]:
        return lambda *_: self._refresh.wait(block)

    def refresh(self, *, after_step: bool) -> None:
        names = {name for name, info in self.layout.parameters.items() if info.trainable or not after_step}
        if self.local is not None:  # it also writes the weights to the model, as a load needs under any masking
            self.local.send_all_anchors(names)
        elif self.layout.keeps_frozen:
            self.send_copies(names, at_once=not after_step)

    def send_copies(self, names: Collection[str], *, at_once: bool) -> None:
        """Send the model's weights of ``names`` to the frozen copies of other groups. Collective.

        Unless ``at_once``, the copies are awaited when they are needed.
        """
        self._refresh.start(names)
        if at_once or self.stage == 3:  # ZeRO 3 gathers a unit's weights before its forward begins
            self._refresh.finish()
        if self.stage == 3 and self.zero is not None and self.layout.keeps_frozen:
            self.zero.gather_persistent()

    def forward(self, call: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        if self.local is not None:
            self.local.freshen()
        with outside_inference_mode():
            return call(CalledEngine(self.deepspeed), batch)

    def backward(self, loss: torch.Tensor, *, boundary: bool, weights: torch.Tensor | None = None) -> None:
        self.refuse_changed_weights()
        reducer = self._reducer
        if reducer is not None and boundary:
            reducer.arm()
        if self._early is not None and boundary and self.local is None:
            self._early.arm()
        try:
            self.deepspeed.backward(self._scaled(loss), scale_wrt_gas=False)
        except BaseException:
            self._abandon()
            raise
        if self.usage is not None:
            self.usage.end_micro_batch()
        if reducer is not None and boundary:
            reducer.finish()

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, multiplied by the loss scale where DeepSpeed does not do it.

        DeepSpeed's step divides by the scale at every stage, but its backward multiplies only under
        ZeRO.
        """
        if self.compute_dtype != torch.float16:
            return loss
        loss = loss.float()  # a scaled loss may exceed the range of float16
        return loss if self.zero is not None else loss * self.scale.value

    @property
    def _reducer(self) -> GradientSync | None:
        """The object that averages whole gradients in the present step (stage 0)."""
        return self._averages.whole if self.local is None else self._averages.inner

    @property
    def _sync(self) -> ShardSync | None:
        return self._averages.shards

    def _abandon(self) -> None:
        if self._reducer is not None:
            self._reducer.abandon()
        if self._early is not None and self._sync is not None:
            self._early.drop()
            self._sync.abandon()

    def gradients(self) -> list[torch.Tensor]:
        """The gradients with which DeepSpeed will step: g_u times the loss scale."""
        if self.zero is None:
            self.averaged = [p.grad for p in self.parameters.values() if p.grad is not None]
            return self.averaged
        if self._sync is None:  # one group: gradients stay as DeepSpeed keeps them
            self.averaged = self.zero.gradients()
            return self.averaged
        if self.local is not None:  # ZeRO has averaged inside the group
            self.averaged = [self.zero.take_gradient(index) for index in range(len(self.bundles))]
            return self.averaged
        found = self._early.take() if self._early is not None else {}
        for index, gradient in found.items():
            self.zero.put_gradient(index, gradient)
        for index in self._sync.order[len(found) :]:
            found[index] = self.zero.take_gradient(index)
            self._sync.launch(index, found[index])
        started = self.clock()
        self._sync.finish()
        self._exposed += self.clock() - started
        self.averaged = [found[index] for index in range(len(found))]
        return self.averaged

    def squared_grad_norm_and_loss(self, loss: torch.Tensor) -> tuple[float, float]:
        if self._sync is not None:
            counted = self._sync.counted(self.averaged)
        elif self.zero is not None:
            counted = self.averaged
        else:  # whole gradients
            infos = self.layout.parameters
            first = self.at.fsdp == 0
            counted = [
                p.grad
                for n, p in self.parameters.items()
                if p.grad is not None and first and infos[n].holders[0] == self.at.sdp
            ]
        squared = squared_norm(counted, self.device) / self.scale.value**2
        totals = torch.stack([squared, (loss / self.layout.mesh.world_size).to(self.device)])
        if self.usage is not None:
            totals = torch.cat([totals, totals.new_tensor(self.usage.differences())])
        self.all_reduce_control(totals)
        norm, mean_loss, *differences = totals.tolist()
        self._differences = differences or None
        return norm, mean_loss

    def zero_grad(self) -> None:
        if self.zero is not None:
            self.zero.drop_gradients()
        else:
            self.deepspeed.optimizer.zero_grad()
        if self._early is not None:
            self._early.drop()
        if self.usage is not None:
            self.usage.start_step()

    # -- the full model ----------------------------------------------------------------------------

    def _view(self) -> Any:
        return Gathered(self)

    def evaluate(self, batches: Sequence[Any], weights: Sequence[float]) -> float:
        self.agree_on_buffers()
        with self._evaluating():
            if self.layout.keeps_frozen or not self.installed:
                return mean_loss(self._view(), batches, weights)
            # ZeRO 3 tracks the order of modules of one pass at a time, so batches cannot take
            # turns.
            return StreamedEvaluation(self._view(), chunk=1 if self.stage == 3 else None).run(batches, weights)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._refresh.finish()
        if self.local is not None:
            self.local.freshen()
        with torch.no_grad():
            yield

    def shard_parameters(self) -> None:
        self._refresh.finish()
