"""Local steps (``sdp.sync``): groups step alone, and average their weights every few steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from .config.method import SyncSection
from .distributed.collectives import local_tensor
from .full_model.evaluation import with_statistics
from .full_model.gather import agree_on_buffers, persistent_buffers
from .optim.clip import clip_
from .sync.between import BetweenGroups
from .sync.outer import OuterFacts, OuterSteps, Rounds, fragments_of


class LocalUpdate(NamedTuple):
    """Loss and gradient norm of a local step, over all groups.

    Attributes:
        loss: the mean loss of all ranks.
        norm: the mean of the groups' gradient norms before clipping. Groups that skipped the step
            do not count.
        skipped: the number of groups that skipped the step, because their gradient is NaN or
            infinite.
    """

    loss: float
    norm: float
    skipped: int


class PendingUpdate:
    """A :class:`LocalUpdate` that may not have arrived from other groups yet.

    Args:
        receive: waits for the other groups, and returns the update. It is called once.
    """

    def __init__(self, receive: Callable[[], LocalUpdate]):
        self._receive = receive
        self._received: LocalUpdate | None = None

    def wait(self) -> LocalUpdate:
        """Wait for the other groups, and return the update."""
        if self._received is None:
            self._received = self._receive()
        return self._received


class LocalSteps:
    """Takes one rank's local steps, and averages the weights of groups.

    The *anchors* are the weights after the last average, equal at all holders. Running statistics
    of batch norm have anchors too, and are averaged together with the weights of the same unit.
    """

    def __init__(self, groups: BetweenGroups, sync: SyncSection):
        self.sync, self._groups, self._store, self._context = sync, groups, groups.store, groups.context
        store, context = groups.store, groups.context
        self._fragments = fragments_of(store.layout, sync.fragments)
        infos = store.layout.parameters
        make: Callable[..., OuterSteps] = OuterSteps
        if context.service is not None:
            from .service.steps import ServedSteps  # most runs do not need it

            make = partial(ServedSteps, store)
        self.outer = make(
            sync,
            store.layout.buckets(lambda _: False),
            self._weight,
            [name for name in store.stepped if infos[name].trainable],
            self._fragments,
            context.communicators.holders,
            counts=lambda name: context.counts(store.stepped[name]),
            counts_once=lambda name: context.counts_once(store.stepped[name]),
            device=context.device,
            traffic=context.traffic,
            sum_over_ranks=context.all_reduce_control,
            clock=context.clock,
            is_slice=lambda name: infos[name].cut is not None,
        )
        self.averages: Any = self.outer  # starts averages, and applies them
        agree_on_buffers(store)
        self._buffers = {name: buffer.clone() for name, buffer in self._module_buffers().items()}

    def _weight(self, name: str) -> torch.Tensor:
        """Return this rank's shard of a parameter. FSDP2 may move the shard in memory later."""
        return local_tensor(self._store.stepped[name].tensor.detach())

    def _module_weights(self) -> dict[str, torch.Tensor]:
        return {name: self._weight(name) for name in self.outer.anchors}

    def _module_buffers(self) -> dict[str, torch.Tensor]:
        return persistent_buffers(self._store)

    # -- steps -------------------------------------------------------------------------------------

    def step(self, loss: torch.Tensor, scheduler: Any, max_norm: float, count: float | None = None) -> PendingUpdate:
        """Clip and step with this group's own gradient. Collective.

        If the norm of the group's gradient is NaN or infinite, the group skips the step, and its
        weights and optimizer state stay.

        Args:
            loss: this rank's mean loss, or the sum of its losses if ``count`` is given.
            scheduler: the learning-rate schedule, or None.
            max_norm: the norm to which the gradient is clipped, or 0 for no clipping.
            count: the number by which the sum of losses must be divided, or None.

        Returns:
            The mean loss and norm of all groups. The caller can wait for them in a later step.
        """
        groups, norm = self._groups, self._groups.norm_in_group()
        if math.isfinite(norm):
            if max_norm > 0:
                clip_(groups.gradients(), norm, max_norm)
            groups.prepare_step()
            groups.store.step()
        groups.forget_gradients()
        if scheduler is not None:
            scheduler.step()
        context = self._context
        totals = torch.tensor(self._summary(loss.item(), norm, count), dtype=torch.float64, device=context.device)
        wait = context.start_control(totals)

        def receive() -> LocalUpdate:
            wait()
            mean_loss, norms, stepped, everyone, *counts = totals.tolist()
            if counts:  # the losses are sums
                mean_loss = mean_loss / counts[0] if counts[0] else math.nan
            skipped = round(len(context.mesh.groups) * (everyone - stepped))
            return LocalUpdate(mean_loss, norms / stepped if stepped else math.nan, skipped)

        return PendingUpdate(receive)

    def _summary(self, loss: float, norm: float, count: float | None) -> list[float]:
        """Return this rank's terms of the sums from which a step's loss and norm are computed."""
        mesh, at = self._context.mesh, self._context.at
        share = 1 / len(mesh.groups) if at.fsdp == 0 and at.tp == 0 else 0.0  # the sum over all ranks is 1
        return [
            loss / mesh.world_size,
            *((share * norm, share) if math.isfinite(norm) else (0.0, 0.0)),
            share,
            *([count / mesh.world_size] if count is not None else []),
        ]

    def arrive(self) -> OuterFacts:
        """Wait for the average that was started, and apply it. Collective."""
        fragment = self.averages.fragment_under_way
        names = [name for name in self._store.layout.buffers if self._fragments[name] == fragment]
        buffers = {name: buffer for name, buffer in self._module_buffers().items() if name in names}
        if names:
            agree_on_buffers(self._store, names)
        facts = self.averages.arrive()
        for name, buffer in buffers.items():
            self._buffers[name].copy_(buffer)
        changed = [name for name, fragment in self._fragments.items() if fragment == facts.fragment]
        self._groups.refresh(changed, self.outer.anchors)
        return facts

    # -- state -------------------------------------------------------------------------------------

    @property
    def anchors(self) -> Mapping[str, torch.Tensor]:
        """The weights after the last average, by name. Holders of a unit have equal anchors."""
        return self._module_weights() if self.outer.is_swapped else self.outer.anchors

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """This group's present weights, by name."""
        return self.outer.anchors if self.outer.is_swapped else self._module_weights()

    @property
    def anchor_buffers(self) -> Mapping[str, torch.Tensor]:
        """The running statistics after the last average, by name."""
        return self._module_buffers() if self.outer.is_swapped else self._buffers

    @property
    def own_buffers(self) -> Mapping[str, torch.Tensor]:
        """This rank's present running statistics, by name."""
        return self._buffers if self.outer.is_swapped else self._module_buffers()

    def reset(self) -> None:
        """Copy weights and running statistics to the anchors. The outer optimizer's state stays."""
        self.outer.reset()
        for name, buffer in self._module_buffers().items():
            self._buffers[name].copy_(buffer)

    # -- the full model ----------------------------------------------------------------------------

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """A context in which the module has the weights and statistics of the last average.

        Collective.
        """
        if self.outer.is_swapped:
            yield
            return
        self._groups.reshard()
        with self.outer.swapped():
            self._swap_buffers()
            try:
                yield
            finally:
                self._groups.reshard()
                self._swap_buffers()

    @contextmanager
    def group_statistics(self) -> Iterator[None]:
        """A context in which running statistics are the mean of the group's ranks.

        Collective in the group.
        """
        buffers = {n: b for n, b in self._module_buffers().items() if b.is_floating_point()}
        group = self._context.communicators.group
        means = dict[str, torch.Tensor]()
        if group is not None and buffers:
            flat = torch.cat([buffer.reshape(-1).double() for buffer in buffers.values()])
            self._context.sum_in_group(flat)
            parts = (flat / group.size()).split([buffer.numel() for buffer in buffers.values()])
            means = {name: mean.view(buffers[name].shape) for name, mean in zip(buffers, parts, strict=True)}
        with with_statistics(buffers, means):
            yield

    @torch.no_grad()
    def _swap_buffers(self) -> None:
        for name, buffer in self._module_buffers().items():
            kept = buffer.clone()
            buffer.copy_(self._buffers[name])
            self._buffers[name].copy_(kept)


class LocalTraining:
    """Decides after each step of a run whether weights are averaged, and keeps metrics of averages.

    Without a section ``sdp.sync``, the methods do nothing.

    Attributes:
        outer_steps: the number of averages since the start of the run. In ``sdp.sync.every`` steps,
            each fragment of the model is averaged once.
        last: metrics of the average after the last step. None if there was no average.
    """

    def __init__(self, groups: BetweenGroups, sync: SyncSection | None):
        self._groups, self._sync, self.service = groups, sync, groups.context.service
        self._rounds = Rounds(sync) if sync is not None else None
        self.outer_steps = 0
        self._averaged_at = -1  # the last step after which finish, or a load, left all groups with the anchors
        self.last: OuterFacts | None = None
        self._pending: deque[tuple[int, PendingUpdate]] = deque()

    @property
    def lag(self) -> int:
        """How many steps later the loss and norm of a step are read: ``sdp.sync.overlap`` + 1.

        The message with loss and norm may queue behind an average, which may take ``overlap``
        steps. Because of the lag, no step waits for this message. The lag is 0 with a service, and
        without local steps.
        """
        return 0 if self._sync is None or self.service is not None else self._sync.overlap + 1

    def add(self, step: int, update: PendingUpdate) -> None:
        """Keep loss and norm of ``step`` until they have arrived from other groups."""
        self._pending.append((step, update))

    def arrived(self) -> Iterator[tuple[int, LocalUpdate]]:
        """Yield number, loss and norm of the steps that :meth:`add` kept, and forget them.

        The newest :attr:`lag` steps are kept, as they may not have arrived. All ranks must call
        this after the same step, so that all make the same decisions.
        """
        while len(self._pending) > self.lag:
            step, update = self._pending.popleft()
            yield step, update.wait()

    @property
    def pending(self) -> PendingUpdate | None:
        """Loss and norm of the last local step, or None if :meth:`arrived` has returned them."""
        return self._pending[-1][1] if self._pending else None

    def newest(self) -> LocalUpdate | None:
        """Wait for loss and norm of the last local step. None if :meth:`arrived` returned them."""
        return self.pending.wait() if self.pending is not None else None

    def skipped_steps(self, until: int | None = None) -> int:
        """Count the skipped steps up to ``until`` that :meth:`arrived` has not returned yet.

        This waits until the results of these steps have arrived from other groups.
        """
        return sum(update.wait().skipped > 0 for step, update in self._pending if until is None or step <= until)

    @property
    def local(self) -> LocalSteps | None:
        """The object that takes local steps. None while gradients are averaged in every step."""
        return self._groups.local

    def follow(self, steps: int) -> None:
        """Prepare for the step after ``steps``. Collective.

        If local steps begin now, the anchors are made from the weights. Then the weights of all
        holders must be equal.
        """
        local = self._rounds is not None and self._rounds.is_local(steps + 1)
        if local and self.local is None:
            assert self._sync is not None
            self._groups.local = LocalSteps(self._groups, self._sync)
        elif not local:
            self._groups.local = None

    def after_step(self, step: int, schedule: Any = None) -> int:
        """Start and apply the averages that are due after ``step``. Collective.

        Returns the number of the step at which the group now is. This is ``step``, unless a service
        keeps the anchors: then a late group skips steps, also in the learning-rate ``schedule``.
        """
        self.last = None
        if self.service is not None:
            reached = self._after_served_step(step)
            if reached != step and schedule is not None:
                schedule.step(reached - 1)
            return reached
        if self.local is not None and self._rounds is not None:
            starting, arriving = self._rounds.starting(step), self._rounds.arriving(step)
            overlap = self._sync.overlap if self._sync is not None else 0
            if arriving is not None and self.local.outer.fragment_under_way is not None:
                self._arrive()
            if starting is not None:
                self.local.averages.start(starting)
                if not overlap:
                    self._arrive()
        self.follow(step)
        return step

    # -- with a service ----------------------------------------------------------------------------

    def enter(self) -> int:
        """Enter a run whose anchors a service keeps, and continue from the anchors.

        Collective in the group. A group that the service had dropped becomes a member again.
        Returns the number of steps that the run has taken.
        """
        assert self.local is not None
        self.local.averages.enter()
        self.outer_steps = self.service.closed
        return self._reached(0)

    def _after_served_step(self, step: int) -> int:
        assert self.local is not None and self._sync is not None
        service, averages = self.service, self.local.averages
        newest = self.newest()
        service.note_step(newest.loss if newest is not None else math.nan)
        averages.steps_since_start += 1
        status = service.agree(service.client.status)  # the newest one that rank 0 knows
        if service.lost:
            return self.enter()
        if averages.fragment_under_way is not None and averages.steps_since_start >= self._sync.overlap:
            session = service.client.session
            step = self._take_average()
            if service.client.session != session:  # the group has joined again, and has taken no step since
                return step
        is_behind = status["closed"] > service.closed or (status["grace"] and status["closed"] == service.closed)
        is_due = is_behind or step >= service.schedule.due(service.closed + 1)
        if averages.fragment_under_way is None and service.closed < service.schedule.last and is_due:
            averages.start(service.schedule.fragment(service.closed + 1))
            if not self._sync.overlap:
                step = self._take_average()
        return step

    def _take_average(self) -> int:
        """Wait for the average that was started. Returns the step that the group has reached."""
        assert self.local is not None
        averages = self.local.averages
        self.last = self.local.arrive()
        if self.service.lost:
            return self.enter()
        self.outer_steps = self.service.closed
        return self._reached(averages.steps_since_start if averages.was_accepted else 0)

    def _reached(self, steps: int) -> int:
        """Return the number of the step that is ``steps`` after the newest average."""
        schedule = self.service.schedule
        return min(schedule.steps, schedule.due(self.service.closed) + steps)

    def finish(self, step: int) -> bool:
        """Average all weights that have changed since their last average. Collective.

        Call this after the last step of a run, so that the anchors contain all steps.

        Returns:
            Whether anything was averaged.
        """
        local = self.local
        if local is None or self._rounds is None or step == self._averaged_at:
            return False
        before = self.outer_steps
        while self.service is not None and self.service.closed < self.service.schedule.last:
            if local.averages.fragment_under_way is None:
                local.averages.start(self.service.schedule.fragment(self.service.closed + 1))
            self._take_average()
        if self.service is not None:
            self._averaged_at = step
            return self.outer_steps > before
        if local.outer.fragment_under_way is not None:
            self._arrive()
        for fragment in self._rounds.fragments:
            if self._rounds.steps_alone(step, fragment):
                local.averages.start(fragment)
                self._arrive()
        if self.outer_steps > before:
            self._averaged_at = step
        return self.outer_steps > before

    def has_finished(self, step: int) -> bool:
        """Return whether :meth:`finish`, and not the schedule, averaged weights after ``step``."""
        return self._averaged_at == step

    def _steps_alone(self, step: int) -> int:
        """Return how many of the steps up to ``step`` a load from the anchors would drop."""
        if self._rounds is None or step == self._averaged_at:
            return 0
        return max(self._rounds.steps_alone(step, fragment) for fragment in self._rounds.fragments)

    def metrics(self) -> dict[str, Any]:
        """Return metrics of the average after the last step. Empty if nothing was averaged."""
        if self.last is None:
            return {}
        return {
            "outer_step": self.outer_steps,
            "fragment": self.last.fragment,
            "drift": self.last.drift,
            "outer_grad_norm": self.last.gradient_norm,
        }

    def tensors_on_device(self) -> list[torch.Tensor]:
        """Return anchors, outer optimizer state and rounding errors, if they are on the device."""
        local = self.local
        if local is None or local.sync.offload == "cpu":
            return []
        outer = local.outer
        state = [value for values in outer.optimizer.state.values() for value in values.values()]
        tensors = [*local.anchors.values(), *outer.errors.values(), *state]
        return [value for value in tensors if isinstance(value, torch.Tensor)]

    def describe(self) -> str:
        """Return one line for the log that says how often weights are averaged."""
        sync = self._sync
        if sync is None:
            return "gradients are averaged in every step"
        start = f"after the first {sync.start_after} steps, " if sync.start_after else ""
        parts = f", one of {sync.fragments} fragments every {sync.every // sync.fragments}" * (sync.fragments > 1)
        late = f", applied {sync.overlap} step{'s' * (sync.overlap > 1)} later" if sync.overlap else ""
        small = f", sent as {sync.compression}" if sync.compression != "none" else ""
        return f"{start}groups step on their own and average their weights every {sync.every} steps{parts}{late}{small}"

    def state_dict(self, steps: int) -> dict[str, Any] | None:
        """Return the position between two averages, for a checkpoint. None without local steps."""
        if self.local is None:
            return None
        return {
            "outer_steps": self.outer_steps,
            "steps_alone": self._steps_alone(steps),
            "under_way": self.local.outer.fragment_under_way,
            "fragments": len(self._rounds.fragments) if self._rounds is not None else 1,
        }

    def load_state_dict(self, state: dict[str, Any] | None, steps: int, *, in_round: bool) -> None:
        """Continue local steps from a checkpoint, whose weights are already loaded.

        Args:
            state: the result of :meth:`state_dict`.
            steps: the number of steps that the run had taken.
            in_round: whether each group has loaded its own weights, and continues between two
                averages. If False, all groups have loaded the anchors.
        """
        self.outer_steps = (state or {}).get("outer_steps", 0)
        self._averaged_at, self.last = -1 if in_round else steps, None
        self._pending.clear()
        local = self.local
        under_way = local.outer.fragment_under_way if in_round and local is not None else None
        if under_way is not None and self._rounds is not None and under_way != self._rounds.under_way(steps):
            self._arrive()  # with these settings no later step would apply it

    def anchored(self) -> AbstractContextManager[None]:
        """A context in which the module has the full model's weights: those of the last average."""
        local = self.local
        return nullcontext() if local is None else local.anchored()

    def _arrive(self) -> None:
        assert self.local is not None
        self.last = self.local.arrive()
        self.outer_steps += 1
