"""Evaluates the full model: holders send their units to the other groups, one after the other.

The batches run in lockstep. Each forward pass stops before a unit. Once all passes have stopped,
the unit is broadcast, and all passes continue. So memory holds the hidden states of a few
batches (a chunk) and one received unit, or the missing slices of one block. This works for any
model, however its forward is written. Each pass has a thread of its own, but only one thread runs
at a time, so results do not depend on scheduling.

This file also measures batch norm's running statistics of the full model. Under forward masking, a
rank tracks the statistics of its own subnetwork. The activations lack what the blocks of other
groups add, so these statistics are wrong for the full model. They are measured again by a pass of
the full model over some training batches (Wu and Johnson, arXiv 2105.07576, section 3). The result
is the mean and variance of each channel over all of these batches and all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from ..batch.call import call_model, cast_floats, count_targets, loss_of, map_leaves, tensors_in, to_device
from ..distributed.agreement import gather_bytes, gather_json
from ..distributed.mesh import passes_on
from ..errors import ConfigError, DataError, ModelError
from ..placement.layout import Layout
from ..placement.units import Unit
from ..stores.store import GroupStore
from ..subnetwork.carve import PassThrough, pass_throughs
from ..subnetwork.copies import Copies, replace_copies
from ..subnetwork.neurons import SlicedBatchNorm, Slices
from .gather import assemble, gather_inside, padded_shard

T = TypeVar("T")


class _Aborted(BaseException):
    """Raised in waiting passes after another pass has failed."""


class _Pass(Generic[T]):
    def __init__(self) -> None:
        self.go, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.at: str | None = None
        self.result: T | None = None
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None


class Lockstep(Generic[T]):
    """Runs forward passes in step: no pass runs a unit before all passes have reached the unit."""

    def __init__(self, device: torch.device, before_turn: Callable[[], None]):
        """``before_turn`` is called in the main thread, each time before a pass continues."""
        self._device, self._before_turn = device, before_turn
        self._current: _Pass[T] | None = None
        self._aborted = False

    def stop(self, unit: str) -> None:
        """Wait until all passes have reached ``unit``. Each pass calls this before it runs a unit.

        Outside of :meth:`run`, this does nothing.
        """
        current = self._current
        if current is None:
            return
        current.at = unit
        current.stopped.release()
        current.go.acquire()
        if self._aborted:
            raise _Aborted

    def run(self, passes: Sequence[Callable[[], T]], at_unit: Callable[[str], None]) -> list[T]:
        """Run the passes and return their results, in order.

        Each time all passes have stopped before a unit, ``at_unit`` is called with the unit's name,
        in the thread of the caller.
        """
        states = [self._start(work) for work in passes]
        try:
            while True:
                for state in states:
                    self._resume(state)
                stops = {state.at for state in states}
                if stops == {None}:
                    return [state.result for state in states]  # type: ignore[misc]
                if len(stops) > 1:
                    where = ", ".join(sorted(at or "the end" for at in stops))
                    raise RuntimeError(f"batches ran the units in different orders: they stopped before {where}")
                at_unit(stops.pop())  # type: ignore[arg-type]
        finally:
            self._end(states)

    def _start(self, work: Callable[[], T]) -> _Pass[T]:
        state: _Pass[T] = _Pass()
        # Each thread has its own grad mode, device and stream.
        grad_enabled, on_cuda = torch.is_grad_enabled(), self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device) if on_cuda else None

        def body() -> None:
            state.go.acquire()
            try:
                if not self._aborted:
                    # torch.cuda.stream(None) is a no-op.
                    with torch.set_grad_enabled(grad_enabled), torch.cuda.stream(stream):
                        state.result = work()
            except BaseException as error:
                state.error = error
            state.at = None
            state.stopped.release()

        state.thread = threading.Thread(target=body, name="sdp-evaluation", daemon=True)
        state.thread.start()
        return state

    def _resume(self, state: _Pass[T]) -> None:
        self._before_turn()
        self._current = state
        state.go.release()
        state.stopped.acquire()
        self._current = None
        if state.error is not None:
            raise state.error

    def _end(self, states: Sequence[_Pass[T]]) -> None:
        self._aborted = True
        for state in states:
            state.go.release()
            assert state.thread is not None
            state.thread.join()
        self._aborted = False


CHUNK = 8  # batches that share one broadcast of each unit


def _common_count(store: GroupStore, batches: Sequence[Any]) -> int:
    """Return the largest number of batches on any rank: all ranks must run equally many passes."""
    counts = torch.tensor([len(batches), -len(batches)], device=store.context.device)
    store.context.all_reduce_control(counts, dist.ReduceOp.MAX)
    most, fewest = int(counts[0]), -int(counts[1])
    if fewest == 0:
        raise DataError("evaluate: a rank has no batch; give every rank at least one")
    return most


def _loss(store: GroupStore, batch: Any) -> float:
    return loss_of(call_model(store.module, to_device(batch, store.context.device))).item()


def _mean_over_ranks(store: GroupStore, pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Return Σ loss·weight / Σ weight from pairs of shape (n, 2), summed over all ranks."""
    sums = torch.tensor(pairs, dtype=torch.float64, device=store.context.device)
    store.context.all_reduce_control(sums)
    return (sums[:, 0] / sums[:, 1]).tolist()


class StreamedEvaluation:
    """One evaluation of the full model, in which holders send units to all groups. Collective."""

    def __init__(self, store: GroupStore, before_turn: Callable[[], None]):
        """``before_turn`` is called each time before one of the passes goes on."""
        self._store = store
        self._lockstep: Lockstep[float] = Lockstep(store.context.device, before_turn)
        self._units = _streamed_units(store.layout)
        self._guest: dict[str, torch.Tensor] = {}
        self._hosts: list[Slices] = []  # slices that now have received tensors
        self._exact: dict[str, list[Copies]] = {}

    def run(self, batches: Sequence[Any], weights: Sequence[float]) -> float:
        """Return the mean loss over the batches of all ranks, weighted by ``weights``."""
        steps = _common_count(self._store, batches)
        # A rank with fewer batches repeats its last batch with weight 0.
        padded = [*zip(batches, weights, strict=True), *[(batches[-1], 0)] * (steps - len(batches))]
        total, targets, undo, chunk = 0.0, 0.0, self._install(), self._store.context.passes_together or CHUNK
        try:
            with self._uncompiled_slices():
                for start in range(0, steps, chunk):
                    parts = padded[start : start + chunk]
                    losses = self._lockstep.run(
                        [partial(_loss, self._store, batch) for batch, _ in parts], self._stream
                    )
                    for loss, (_, count) in zip(losses, parts, strict=True):
                        if count:  # the mean over no targets is NaN
                            total, targets = total + loss * count, targets + count
                    self._dismiss()
        finally:
            self._dismiss()
            undo()
        return _mean_over_ranks(self._store, [(total, targets)])[0]

    def _uncompiled_slices(self) -> AbstractContextManager[Any]:
        """A context that runs sliced blocks uncompiled, because their set of slices changes."""
        sliced = any(not unit.is_block for units in self._units.values() for unit in units)
        return torch.compiler.set_stance("force_eager") if sliced else nullcontext()

    def _install(self) -> Callable[[], None]:
        """Let passes stop before units and run received units. Returns a function to undo this."""
        handles = []
        for name in self._units:
            module = self._store.module.get_submodule(name)
            if isinstance(module, PassThrough):
                module.forward = self._run_guest(module)  # type: ignore[method-assign]
            else:
                # This hook must run before FSDP2's own hook, which gathers the parameters and must
                # see one pass at a time.
                hook = lambda *_, name=name: self._lockstep.stop(name)  # noqa: E731
                handles.append(module.register_forward_pre_hook(hook, prepend=True))

        def undo() -> None:
            for handle in handles:
                handle.remove()
            for block in pass_throughs(self._store.module):
                block.__dict__.pop("forward", None)

        return undo

    def _run_guest(self, block: PassThrough) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._lockstep.stop(block.name)
            cast = self._store.context.compute_dtype
            if cast != torch.float32:
                args, kwargs = cast_floats((args, kwargs), cast)
            return functional_call(block.skeleton, self._guest, args, kwargs)

        return forward

    def _stream(self, name: str) -> None:
        """Broadcast the units of the block ``name`` from their first holders.

        Shards are broadcast between groups. Then each group without the unit gathers the shards.
        """
        store = self._store
        self._dismiss(everything=False)  # earlier guests are no longer needed
        for unit in self._units[name]:
            holders = store.layout.placement.holders[unit.index]
            if store.context.service is not None:
                if store.context.at.sdp not in holders:
                    self._fetch(unit, name)
                continue
            shard = self._broadcast(self._unit_shard(unit, holders[0]), holders[0])
            is_skipped = unit.is_block and not store.layout.keeps_frozen
            buffers = self._broadcast_buffers(name, holders[0]) if is_skipped else {}
            if store.context.at.sdp in holders:
                continue
            tensors = self.assemble_guest(unit, gather_inside(store, shard))
            if store.layout.keeps_frozen:
                self._exact.setdefault(name, []).extend(replace_copies(store.module, store.layout, tensors))
            elif unit.is_block:
                self._guest = {path.removeprefix(f"{name}."): tensor for path, tensor in tensors.items()} | buffers
            else:
                self._lend(tensors)

    def _fetch(self, unit: Unit, block: str) -> None:
        """Fetch a unit that this group lacks from the service. The unit has no buffers."""
        context = self._store.context
        tensors = context.service.whole_units(self._store.layout.members.get(unit.name, []), context)
        if unit.is_block:
            self._guest = {path.removeprefix(f"{block}."): tensor for path, tensor in tensors.items()}
        else:
            self._lend(tensors)

    def _lend(self, slices: dict[str, torch.Tensor]) -> None:
        for name, tensor in slices.items():
            parameter, _, index = name.rpartition(":")
            path, _, key = parameter.rpartition(".")
            layer: Any = self._store.module.get_submodule(path)
            layer.slices[key].guests[int(index)] = tensor
            self._hosts.append(layer.slices[key])

    def _dismiss(self, *, everything: bool = True) -> None:
        self._guest = {}
        for block in [block for block in self._exact if block or everything]:
            for copies in self._exact.pop(block):
                copies.exact.clear()
        while self._hosts:
            self._hosts.pop().guests.clear()

    def _unit_shard(self, unit: Unit, source: int) -> torch.Tensor:
        """Return a unit's joined padded shards in compute precision. Only ``source`` has values."""
        store = self._store
        infos = store.layout.members.get(unit.name, [])
        if store.context.at.sdp == source:
            return torch.cat([padded_shard(store, info).to(store.context.compute_dtype) for info in infos])
        size = sum(info.padded_shard_numel(store.context.shards) for info in infos)
        return torch.empty(size, dtype=store.context.compute_dtype, device=store.context.device)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        store = self._store
        everyone = store.context.communicators.holders[store.layout.everyone]
        at, context = store.context.at, store.context
        fsdp = 0 if context.communicators.replicate_inside else at.fsdp  # the ranks at one position, or all
        from_rank = context.mesh.rank(source, fsdp, at.tp)
        ranks, sender = dist.get_world_size(everyone), dist.get_group_rank(everyone, from_rank)
        if passes_on(everyone.rank(), sender, ranks):
            all_ranks = dist.get_process_group_ranks(everyone)
            store.context.traffic.record("between groups", "broadcast", tensor.nbytes, all_ranks)
        dist.broadcast(tensor, group_src=sender, group=everyone)
        return tensor

    def _broadcast_buffers(self, name: str, source: int) -> dict[str, torch.Tensor]:
        module = self._store.module.get_submodule(name)
        if isinstance(module, PassThrough):
            module = module.skeleton
        held = self._store.context.at.sdp == source
        return {
            name: self._broadcast(
                buffer.detach().clone() if held else torch.empty_like(buffer, device=self._store.context.device), source
            )
            for name, buffer in module.named_buffers()
        }

    def assemble_guest(self, unit: Unit, shards: torch.Tensor) -> dict[str, torch.Tensor]:
        """Cut the joined ``shards`` of a received unit into parameters (or slices), by name."""
        infos = self._store.layout.members.get(unit.name, [])
        pieces = shards.split([info.padded_shard_numel(self._store.context.shards) for info in infos], dim=1)
        return {info.name: assemble(piece, info) for info, piece in zip(infos, pieces, strict=True)}


def _streamed_units(layout: Layout) -> dict[str, list[Unit]]:
    streamed: dict[str, list[Unit]] = {}
    for unit in layout.units:
        if len(layout.placement.holders[unit.index]) < layout.mesh.sdp:
            streamed.setdefault(layout.block_of(unit), []).append(unit)
    return streamed


def subnetwork_losses(store: GroupStore, batches: Sequence[Any]) -> list[float]:
    """Return each group's mean loss per token, of its subnetwork on its batches. Collective."""
    weights = [int(count_targets(store.module, batch)) for batch in batches]
    own, mesh = _own_sums(store, batches, weights), store.layout.mesh
    pairs = [own if group == store.context.at.sdp else (0.0, 0.0) for group in range(mesh.sdp)]
    losses = _mean_over_ranks(store, pairs)
    return [losses[group] for group in mesh.groups]


def mean_loss(store: GroupStore, batches: Sequence[Any], weights: Sequence[float]) -> float:
    """Return the weighted mean loss over the batches of all ranks. Collective.

    Each rank runs its own module, so every rank must have the full model.
    """
    return _mean_over_ranks(store, [_own_sums(store, batches, weights)])[0]


def routed_loss(store: GroupStore, batches: Sequence[Any], weights: Sequence[float], paths: Sequence[int]) -> float:
    """Return the weighted mean loss over the batches of all ranks, with several paths. Collective.

    The groups of a path run the batches of this path. For this, ranks exchange their batches, and
    each data rank of the path gets some of them. With a service, each group runs all paths, one
    after the other.
    """
    context, mesh, count = store.context, store.layout.mesh, store.layout.paths
    service, share, shares = context.service, context.at.sdp // count * mesh.fsdp + context.at.fsdp, mesh.data_ranks
    share, shares = (share, shares // count) if service is None else (context.at.fsdp, shares)
    total = targets = 0.0
    for start in range(0, _common_count(store, batches), CHUNK):
        chunk = slice(start, start + CHUNK) if context.at.tp == 0 else slice(0)  # tensor ranks have equal batches
        facts = list(zip(paths[chunk], weights[chunk], strict=True))
        everything = exchange_batches(batches[chunk], facts, like=batches[0])
        for path in range(count) if service is not None else [store.layout.path_of(context.at.sdp)]:
            of_path = [(batch, weight) for batch, (of_batch, weight) in everything if of_batch == path]
            turns = of_path[share::shares]
            with service.lent(store, path) if service is not None else nullcontext():
                for step in range(-(-len(of_path) // shares)):  # the ranks of a group take equally many steps
                    batch, weight = turns[step] if step < len(turns) else (of_path[0][0], 0.0)
                    loss = _loss(store, batch)
                    if weight:
                        total, targets = total + loss * weight, targets + weight
    return _mean_over_ranks(store, [(total, targets)])[0]


def exchange_batches(batches: Sequence[Any], facts: Sequence[Any], like: Any) -> list[tuple[Any, Any]]:
    """Send every rank's batches to all ranks. Collective.

    Args:
        batches: This rank's batches.
        facts: A JSON value for each batch, which is sent with the batch.
        like: A batch with the structure of all batches.

    Returns:
        Pairs of a batch and its value of ``facts``, in rank order.

    Raises:
        DataError: A batch has a value that JSON cannot hold.
    """
    tensors, others = dict[str, torch.Tensor](), []
    for batch in batches:
        leaves = list[Any]()
        map_leaves(leaves.append, batch)
        batch_tensors = {
            f"{len(others)}.{index}": leaf for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)
        }
        tensors |= {
            key: leaf.detach().cpu().clone(memory_format=torch.contiguous_format) for key, leaf in batch_tensors.items()
        }
        others.append([None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
    try:
        plain = gather_json([list(facts), others])
    except TypeError as error:
        raise DataError(
            f"evaluate: a batch has a value that cannot be sent to the ranks of its path ({error})"
        ) from None
    found = []
    for (their_facts, their_others), data in zip(plain, gather_bytes(save(tensors)), strict=True):
        theirs = load(data)
        for number, (fact, leaves) in enumerate(zip(their_facts, their_others, strict=True)):
            whole = iter([theirs.get(f"{number}.{index}", leaf) for index, leaf in enumerate(leaves)])
            found.append((map_leaves(lambda _, whole=whole: next(whole), like), fact))
    return found


def split_by_path(
    batches: Sequence[Any], paths: Iterable[Any], count: int, *, weighted: bool
) -> tuple[list[Any], list[int]]:
    """Split batches whose rows belong to several paths, so that each new batch has one path.

    Args:
        batches: The batches.
        paths: The path of each batch, or of each of its rows.
        count: The number of paths.
        weighted: Whether batches have weights. Then it is an error if a batch has several paths.

    Returns:
        The new batches, and the path of each.

    Raises:
        ConfigError: The paths do not fit the batches.
    """
    given = [path.tolist() if isinstance(path, torch.Tensor) else path for path in paths]
    if len(given) != len(batches):
        raise ConfigError(f"evaluate: {len(given)} paths for {len(batches)} batches; give one for each batch")
    parts, found = [], []
    for batch, ids in zip(batches, given, strict=True):
        of_rows = [ids] if isinstance(ids, int) else list(ids)
        wrong = next((path for path in of_rows if path not in range(count)), None)
        if wrong is not None:
            raise ConfigError(f"evaluate: path {wrong!r} does not exist; there are paths 0 to {count - 1}")
        several = len(set(of_rows)) > 1
        if several and (weighted or len(tensors_in(batch)[0]) != len(of_rows)):
            raise ConfigError(
                "evaluate: if the rows of a batch take several paths, give a path for each row, and no weights; or "
                "give one path for the whole batch"
            )
        for path in sorted(set(of_rows)):
            rows = [row for row, of_row in enumerate(of_rows) if of_row == path]
            parts.append(map_leaves(partial(_rows, rows=rows, count=len(of_rows)), batch) if several else batch)
            found.append(path)
    return parts, found


def _rows(leaf: Any, rows: list[int], count: int) -> Any:
    has_rows = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == count
    return leaf[rows] if has_rows else leaf


def _own_sums(store: GroupStore, batches: Sequence[Any], weights: Sequence[float]) -> tuple[float, float]:
    total = 0.0
    for step in range(_common_count(store, batches)):  # collectives inside the group: all ranks take equally many steps
        loss = _loss(store, batches[min(step, len(batches) - 1)])
        if step < len(batches) and weights[step]:
            total += loss * weights[step]
    return total, sum(weights)


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """A context with ``module`` in evaluation mode. Its end restores the mode of each submodule."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        module.train(modes[0][1])
        for part, training in modes:  # the user may have put single modules into evaluation mode
            part.training = training


Statistics = dict[str, torch.Tensor]  # canonical name of a buffer → its value


def tracks_statistics(buffers: Iterable[str]) -> bool:
    """Return whether the names ``buffers`` include running statistics of a batch norm."""
    return any(name.endswith("running_mean") for name in buffers)


def batch_statistics(
    modules: Iterable[tuple[str, nn.Module]],
    run: Callable[[], object],
    reduce: Callable[[torch.Tensor], None],
    device: torch.device,
) -> Statistics:
    """Measure means and variances of the inputs of all batch norms. Collective.

    Every rank must run every batch norm equally often.

    Args:
        modules: Pairs of canonical name and module. Only batch norms are measured.
        run: A function that runs the forward passes in which inputs are measured.
        reduce: A function that sums float64 values over all ranks in place.
        device: The device of the sums.

    Raises:
        ModelError: A batch norm did not run.
    """
    norms = {name: module for name, module in modules if isinstance(module, _BatchNorm) and module.track_running_stats}
    moments = {
        name: torch.zeros(3, module.num_features, dtype=torch.float64, device=device) for name, module in norms.items()
    }
    with _recording(norms, moments), torch.no_grad():
        run()
    statistics: Statistics = {}
    for name in sorted(moments):
        reduce(moments[name])
        count, mean, square = moments[name]
        if not count.all():
            raise ModelError(f"{name}: did not run in a pass of the full model, so its statistics cannot be measured")
        mean, square = mean / count, square / count
        statistics[f"{name}.running_mean"] = mean
        statistics[f"{name}.running_var"] = (square - mean**2).clamp(min=0)
    return statistics


def _record_into(total: torch.Tensor) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    def record(norm: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        inputs = args[0].detach().float()
        dims = [dim for dim in range(inputs.dim()) if dim != 1]
        mean = inputs.mean(dims).double()
        found = torch.stack([torch.ones_like(mean), mean, inputs.var(dims, correction=0).double() + mean**2])
        if isinstance(norm, SlicedBatchNorm):
            total.index_add_(1, norm.where(total.device), found)
        else:
            total.add_(found)

    return record


@contextmanager
def _recording(norms: Mapping[str, _BatchNorm], moments: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """A context in which batch norms use the statistics of each batch and add them to ``moments``.

    The running statistics of the norms do not change.
    """
    handles = [norm.register_forward_pre_hook(_record_into(moments[name])) for name, norm in norms.items()]
    before = {name: norm.training for name, norm in norms.items()}
    for norm in norms.values():
        norm.training, norm.track_running_stats = True, False
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name, norm in norms.items():
            norm.training, norm.track_running_stats = before[name], True


@contextmanager
def with_statistics(buffers: Mapping[str, torch.Tensor], values: Statistics) -> Iterator[None]:
    """A context in which ``buffers`` have these ``values``. At its end, the old values return."""
    kept = {name: buffer.detach().clone() for name, buffer in buffers.items() if name in values}
    try:
        for name in kept:
            buffers[name].data.copy_(values[name])
        yield
    finally:
        for name, value in kept.items():
            buffers[name].data.copy_(value)  # ``data`` hides this from autograd: a backward pass may still follow
