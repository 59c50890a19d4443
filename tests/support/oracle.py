"""The specification of SDP as a program: all groups in one process, one after the other.

It is written from the layout (who holds what), torch, and docs/specification.md, and shares no code
with the engine. It is slow on purpose: every group runs the whole model with its own values.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from sdp.engine.placement.layout import Layout
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

Tensors = dict[str, Tensor]
SYNC: dict[str, Any] = {
    "start_after": 0,
    "fragments": 1,
    "overlap": 0,
    "single_holder": "outer",
    "outer_optimizer": {"type": "SGD", "params": {"lr": 0.7, "momentum": 0.9, "nesterov": True}},
}


@dataclass(frozen=True)
class Piece:
    """A tensor of the full model, or a slice of one, that has holders of its own.

    Attributes:
        name: its name in the layout.
        canonical: the tensor of the full model.
        place: the path of the tensor in a group's module. Groups may have different canonical
            tensors at one place.
        unit: the name of the unit, or "shared".
        holders: the groups that hold it.
        dim: the dimension that is sliced. None: it is the whole tensor.
        first: the first index of the slice.
        last: the index after the slice.
        trains: whether it is trained.
        parts: into how many parts tensor parallelism cuts it along its columns.
    """

    name: str
    canonical: str
    place: str
    unit: str
    holders: tuple[int, ...]
    dim: int | None = None
    first: int = 0
    last: int = 0
    trains: bool = True
    parts: int = 1

    def of(self, tensor: Tensor) -> Tensor:
        return tensor if self.dim is None else tensor.narrow(self.dim, self.first, self.last - self.first)


class Group:
    """What a group has: float32 weights of the pieces that it holds, their optimizer, and copies of
    all other pieces in compute precision.
    """

    def __init__(self, index: int, weights: Tensors, make_optimizer: Any, factors: Mapping[str, float]):
        self.index, self.copies = index, Tensors()
        self.weights = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
        settings = [
            {"params": [weight], "name": name, "factor": factors[name]} for name, weight in self.weights.items()
        ]
        self.optimizer: Optimizer = make_optimizer(settings)
        if isinstance(self.optimizer, torch.optim.AdamW):  # its decay is not scaled with the rate
            for each in self.optimizer.param_groups:
                each["weight_decay"] /= each["factor"]

    def step(self, gradients: Tensors, norm: float, limit: float, rate: float) -> None:
        """Clip the gradients by ``norm``, and let the optimizer step."""
        scale = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        for name, weight in self.weights.items():
            weight.grad = gradients[name] * scale
        for each in self.optimizer.param_groups:
            each["lr"] = rate * each["factor"]
        self.optimizer.step()


@dataclass
class Pass:
    """One micro-batch of a data rank. It counts ``weight`` times."""

    group: int
    weight: float
    loss: float
    gradients: Tensors


@dataclass
class Step:
    """The mean loss, the gradients g_u and their norm, and how many groups skipped the step.

    In local steps the norm is the mean over the groups that took the step.
    """

    loss: float
    norm: float
    skipped: int = 0
    gradients: Tensors = field(default_factory=dict)


class Oracle:
    """Trains all groups of a layout.

    Args:
        model: the full model with its initial values. It is not changed.
        layout: who holds what.
        make_optimizer: makes an optimizer from parameter groups: each a piece with its "name".
        clip: the largest norm of a gradient. 0: no limit.
        dtype: the precision in which models run.
        loss_scale: by what losses are multiplied before the backward pass.
        sync: the section ``sdp.sync``. None: gradients are averaged in every step.
        rate_factor: by what the learning rate of a piece is multiplied.
        copies: the section ``sdp.copies``.
        place_of: returns the path in a group's module of a canonical name.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        make_optimizer: Callable[[list[dict[str, Any]]], Optimizer],
        *,
        clip: float = 0.0,
        dtype: torch.dtype = torch.float32,
        loss_scale: float = 1.0,
        sync: Mapping[str, Any] | None = None,
        rate_factor: Callable[[Piece], float] = lambda _: 1.0,
        copies: Mapping[str, Any] | None = None,
        place_of: Callable[[str], str] = lambda name: name,
    ):
        self.model, self.layout, self.clip, self.dtype, self.place_of = model, layout, clip, dtype, place_of
        self.loss_scale, self.copies = loss_scale, {"dtype": "compute", "refresh_every": 1} | dict(copies or {})
        self.size = layout.mesh.fsdp  # the data ranks of a group
        self.pieces = {piece.name: piece for piece in self._pieces_of_parameters()}
        self.buffer_pieces = list(self._pieces_of_buffers())
        initial = dict(model.named_parameters()) | dict(model.named_buffers())
        pieces = [*self.pieces.values(), *self.buffer_pieces]
        # The full model. In local steps its parameters are the anchors.
        self.full = {piece.canonical: initial[piece.place].detach().clone() for piece in pieces}
        self.buffers = [self._full_buffers() for _ in range(layout.mesh.data_ranks)]  # of every data rank
        self.trained = {name: piece for name, piece in self.pieces.items() if piece.trains}
        factors = {name: rate_factor(piece) for name, piece in self.trained.items()}
        self.groups = []
        for index in layout.everyone:
            held = {name: self.value(piece) for name, piece in self.trained.items() if index in piece.holders}
            self.groups.append(Group(index, held, make_optimizer, factors))
        self.refresh_copies(self.pieces.values())
        self.steps, self._modules = 0, dict[Any, nn.Module]()
        self.sync = SYNC | dict(sync) if sync is not None else None
        self.outer: Optimizer | None = None
        self._under_way: tuple[int, Tensors, list[Tensors]] | None = None

    def _pieces_of_parameters(self) -> Iterable[Piece]:
        for info in self.layout.parameters.values():
            cut = (
                (info.cut.dim, info.cut.start, info.cut.start + info.shape[info.cut.dim]) if info.cut else (None, 0, 0)
            )
            place = self.place_of(info.canonical)
            parts = info.tp if info.tp_dim else 1
            yield Piece(info.name, info.canonical, place, info.unit, tuple(info.holders), *cut, info.trainable, parts)

    def _pieces_of_buffers(self) -> Iterable[Piece]:
        sliced = set()
        for unit, holders in zip(self.layout.units, self.layout.placement.holders, strict=True):
            for part in unit.buffers:
                sliced.add(part.parameter)
                place = self.place_of(part.parameter)
                yield Piece(f"{place}:{part.index}", part.parameter, place, unit.name, holders, 0, *part.ranges[0])
        for name, info in self.layout.buffers.items():
            if name not in sliced:
                yield Piece(name, name, self.place_of(name), info.unit, tuple(info.holders))

    def value(self, piece: Piece) -> Tensor:
        """The piece of the full model."""
        return piece.of(self.full[piece.canonical])

    # -- the model of a group ----------------------------------------------------------------------

    def _module(self, group: Group | None, masking: str) -> nn.Module:
        """The module of a group, or the full model. Its own values are never used."""
        key = (group and group.index, masking)
        if key not in self._modules:
            self._modules[key] = module = copy.deepcopy(self.model)
            blocks: dict[str, list[str]] = {}  # units that a group holds at the path of a block
            for unit, holders in zip(self.layout.units, self.layout.placement.holders, strict=True):
                if unit.is_block:
                    held = [unit.name] if group is None or group.index in holders else []
                    blocks.setdefault(self.place_of(unit.name), []).extend(held)
            for path, held in blocks.items():
                if masking == "forward" and not held:
                    module.set_submodule(path, PassThrough(module.get_submodule(path)))
                elif held and (factor := self._factor(held[0], group, masking)) != 1.0:
                    module.get_submodule(path).register_forward_hook(scaled_branch(factor), with_kwargs=True)
            for path in ("", *map(self.place_of, self.layout.blocks)) if self.dtype != torch.float32 else ():
                module.get_submodule(path).register_forward_pre_hook(self._cast, with_kwargs=True)
        return self._modules[key]

    def _cast(self, _: nn.Module, *inputs: Any) -> Any:
        return tree_map_only(Tensor, lambda leaf: leaf.to(self.dtype) if leaf.is_floating_point() else leaf, inputs)

    def _factor(self, unit: str, group: Group | None, masking: str) -> float:
        """By what the contribution of a unit is multiplied (``sdp.branch_scale``)."""
        scale = self.layout.branch_scale if masking == "forward" else "none"
        holders = dict(zip((unit.name for unit in self.layout.units), self.layout.placement.holders, strict=True))
        share = len(holders[unit]) / len(self.groups)
        if scale == "train" and group is not None:
            return 1 / share
        return share if scale == "eval" and group is None else 1.0

    def _values(self, group: Group | None, masking: str) -> Tensors:
        """The parameters of a group's module, or of the full model, by path."""
        chosen: dict[tuple[str, int], Piece] = {}
        for piece in self.pieces.values():  # at one place, a group has the tensor that it holds
            if (piece.place, piece.first) not in chosen or (group and group.index in piece.holders):
                chosen[piece.place, piece.first] = piece
        slices: dict[str, list[Tensor]] = {}
        for piece in chosen.values():
            if group is None or not piece.trains:
                value = self.value(piece).to(self.dtype)
            elif group.index in piece.holders:
                value = group.weights[piece.name].to(self.dtype)
            elif masking == "backward":
                value = group.copies[piece.name]
            else:  # of a block that is not called, or of neurons that add nothing
                value = torch.zeros_like(group.copies[piece.name])
            if piece.dim == 1 and piece.place.endswith(".weight"):  # its neurons enter the sum of their branch
                value = value * self._factor(piece.unit, group, masking)
            slices.setdefault(piece.place, []).append(value)
        dims = {piece.place: piece.dim for piece in chosen.values()}
        return {path: parts[0] if len(parts) == 1 else torch.cat(parts, dims[path]) for path, parts in slices.items()}

    def _loss(self, group: Group | None, batch: Any, buffers: Tensors, masking: str, *, trains: bool) -> Tensor:
        """The loss of a batch. ``buffers`` change if the module trains."""
        module = self._module(group, masking).train(trains)
        called = {name for name, _ in module.named_parameters()}
        values = {name: value for name, value in self._values(group, masking).items() if name in called}
        output = functional_call(module, values | buffers, kwargs=batch)
        return output if isinstance(output, Tensor) else output.loss

    @torch.no_grad()
    def evaluate(self, batch: Any, group: int | None = None) -> float:
        """The loss of the full model, or of the subnetwork of a group."""
        of = None if group is None else self.groups[group]
        buffers = self._full_buffers(group)
        if group is not None and self.outer is not None:  # in a round the group has statistics of its own
            ranks = range(group * self.size, (group + 1) * self.size)
            whole = {piece.place: replace(piece, dim=None) for piece in self.buffer_pieces}
            buffers = {path: self._mean_buffer(piece, ranks).to(buffers[path]) for path, piece in whole.items()}
        return self._loss(of, batch, buffers, self.layout.masking, trains=False).item()

    def state_dict(self) -> Tensors:
        """The full model, tied parameters under each of their names."""
        names = dict.fromkeys(piece.canonical for piece in self.pieces.values())
        state = {name: self.full[name].clone() for name in (*names, *self.layout.buffers)}
        return state | {alias: state[name] for alias, name in self.layout.aliases.items()}

    # -- a step ------------------------------------------------------------------------------------

    def step(
        self,
        batches: Sequence[Sequence[Any]],
        rate: float,
        *,
        weights: Sequence[Sequence[float]] | None = None,
        masking: str | None = None,
        skip: bool = False,
    ) -> Step:
        """Take one optimizer step.

        Args:
            batches: the micro-batches, and of each the batch that every data rank reads.
            rate: the learning rate.
            weights: n_f of every batch. Default: 1.
            masking: that of this step. Default: the layout's.
            skip: whether all groups skip the step.
        """
        passes = [
            self._differentiate(rank, batch, weights[micro][rank] if weights else 1.0, masking or self.layout.masking)
            for micro, of_ranks in enumerate(batches)
            for rank, batch in enumerate(of_ranks)
        ]
        self.steps += 1
        loss = sum(each.weight * each.loss for each in passes) / sum(each.weight for each in passes)
        if self.sync is not None and self.steps > self.sync["start_after"]:
            return self._local_step(passes, loss, rate)
        gradients = {
            name: mean_gradient(name, [each for each in passes if each.group in piece.holders])
            for name, piece in self.trained.items()
        }
        norm = norm_of(gradients)
        self._average_buffers(self.buffer_pieces)
        if skip or not math.isfinite(norm):
            self._refresh_if_due()
            return Step(loss, norm, len(self.groups), gradients)
        for group in self.groups:
            group.step(gradients, norm, self.clip, rate)
        for name, piece in self.trained.items():
            first, *others = (self.groups[holder].weights[name].detach() for holder in piece.holders)
            assert all(torch.equal(first, other) for other in others), f"{name}: holders drift"
            self.value(piece).copy_(first)
        self._refresh_if_due()
        return Step(loss, norm, 0, gradients)

    def _differentiate(self, rank: int, batch: Any, weight: float, masking: str) -> Pass:
        group = self.groups[rank // self.size]
        loss = self._loss(group, batch, self.buffers[rank], masking, trains=True)
        scaled = loss.float() * self.loss_scale
        gradients = torch.autograd.grad(scaled, list(group.weights.values()), allow_unused=True, materialize_grads=True)
        of_names = {name: each / self.loss_scale for name, each in zip(group.weights, gradients, strict=True)}
        return Pass(group.index, weight, loss.item(), of_names)

    def refresh_copies(self, pieces: Iterable[Piece]) -> None:
        """Give these pieces of the full model to the groups that do not hold them."""
        for piece in pieces:
            for group in self.groups:
                if group.index not in piece.holders:
                    group.copies[piece.name] = self.copy_of(piece).to(self.dtype, copy=True)

    def _refresh_if_due(self) -> None:
        if self.steps % self.copies["refresh_every"] == 0:
            self.refresh_copies(self.pieces.values())

    def copy_of(self, piece: Piece) -> Tensor:
        """The piece as its copies have it. Only matrices are quantised."""
        value, kind = self.value(piece), self.copies["dtype"]
        if kind == "compute" or value.dim() < 2:
            return value
        parts = value.chunk(piece.parts, 1)
        return torch.cat([values_of(*quantised(part, kind), kind).view(part.shape) for part in parts], 1)

    # -- running statistics ------------------------------------------------------------------------

    def _full_buffers(self, group: int | None = None) -> Tensors:
        """The buffers by path: at one path, a group has the buffer that it holds."""
        chosen: dict[str, Piece] = {}
        for piece in self.buffer_pieces:
            if piece.place not in chosen or group in piece.holders:
                chosen[piece.place] = piece
        return {place: self.full[piece.canonical].clone() for place, piece in chosen.items()}

    def _mean_buffer(self, piece: Piece, ranks: Sequence[int]) -> Tensor:
        first, *others = (piece.of(self.buffers[rank][piece.place]) for rank in ranks)
        # Counts of batches are those of the first rank.
        return torch.stack([first, *others]).double().mean(0) if first.is_floating_point() else first.clone()

    def _average_buffers(self, pieces: Iterable[Piece]) -> None:
        """Give the means over the holders' data ranks to the full model and to all ranks."""
        for piece in pieces:
            ranks = [holder * self.size + rank for holder in piece.holders for rank in range(self.size)]
            mean = self._mean_buffer(piece, ranks)
            others = [one for one in self.buffer_pieces if (one.place, one.first) == (piece.place, piece.first)]
            elsewhere = {group for one in others for group in one.holders} - {*piece.holders}
            takers = [buffers for rank, buffers in enumerate(self.buffers) if rank // self.size not in elsewhere]
            for tensor in (self.full[piece.canonical], *(buffers[piece.place] for buffers in takers)):
                piece.of(tensor).copy_(mean)

    # -- local steps -------------------------------------------------------------------------------

    def _local_step(self, passes: Sequence[Pass], loss: float, rate: float) -> Step:
        """Let every group step on its own, and average the fragments that are due."""
        assert self.sync is not None
        if self.outer is None:  # anchors are views of the full model
            kind, params = (self.sync["outer_optimizer"][key] for key in ("type", "params"))
            self.anchors = {name: self.value(piece) for name, piece in self.trained.items()}
            self.outer = getattr(torch.optim, kind)(self.anchors.values(), **params)
        norms = []
        for group in self.groups:
            gradients = {
                name: mean_gradient(name, [each for each in passes if each.group == group.index])
                for name in group.weights
            }
            if math.isfinite(norm := norm_of(gradients)):
                norms.append(norm)
                group.step(gradients, norm, self.clip, rate)
        every, count, step = self.sync["every"], self.sync["fragments"], self.steps - self.sync["start_after"]
        self._apply_if_due(step)
        for fragment in range(count):
            if (step + fragment * every // count) % every == 0:
                self._start_average(fragment, due=step + self.sync["overlap"])
        self._apply_if_due(step)
        return Step(loss, sum(norms) / len(norms) if norms else math.nan, len(self.groups) - len(norms))

    def _fragment(self, piece: Piece) -> int:
        """Block i is in fragment i mod P with all of its units, the rest in 0."""
        assert self.sync is not None
        unit = next((unit for unit in self.layout.units if unit.name == piece.unit), None)
        block = self.layout.block_of(unit) if unit is not None else ""
        return self.layout.blocks.index(block) % self.sync["fragments"] if block else 0

    @torch.no_grad()
    def _start_average(self, fragment: int, due: int) -> None:
        """d_u: the mean over the holders of anchor − weights."""
        before = [{name: weight.clone() for name, weight in group.weights.items()} for group in self.groups]
        changes = {}
        for name, piece in self.trained.items():
            if self._fragment(piece) == fragment:
                moves = [self.anchors[name] - before[holder][name] for holder in piece.holders]
                changes[name] = torch.stack(moves).mean(0)
        self._under_way = due, changes, before

    @torch.no_grad()
    def _apply_if_due(self, step: int) -> None:
        """Step on the anchors. Then θ ← anchor + (θ − θ when the average was started)."""
        if self._under_way is None or self._under_way[0] != step:
            return
        assert self.sync is not None and self.outer is not None
        (_, changes, before), self._under_way = self._under_way, None
        alone = {name for name in changes if len(self.pieces[name].holders) == 1}
        skipped = alone if self.sync["single_holder"] == "skip" else set()
        for name, anchor in self.anchors.items():
            anchor.grad = changes[name] if name in changes.keys() - skipped else None
        self.outer.step()
        for name in changes:
            for group in (self.groups[holder] for holder in self.pieces[name].holders):
                weight = group.weights[name]
                if name in skipped:
                    self.anchors[name].copy_(weight)
                else:
                    weight.copy_(self.anchors[name] + (weight - before[group.index][name]))
        self.refresh_copies(self.pieces[name] for name in changes)
        fragments = {self._fragment(self.pieces[name]) for name in changes}
        self._average_buffers(piece for piece in self.buffer_pieces if self._fragment(piece) in fragments)


NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]  # fmt: skip


def quantised(value: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the numbers (rows, rest) of a matrix, and a float16 scale for each 64 of a row."""
    numbers, scales = [], []
    for block in value.flatten(1).split(64, 1):
        largest = block.abs().max(1, keepdim=True).values
        scale = (largest / (127 if kind == "int8" else 1)).to(torch.float16)
        ratio = block / scale.float()
        if kind == "int8":
            number = ratio.round().clamp(-127, 127)
        else:
            distances = (ratio[:, :, None].double() - torch.tensor(NF4, dtype=torch.float64)).abs()
            number = distances.min(2).indices
        zero = 0 if kind == "int8" else NF4.index(0.0)
        numbers.append(torch.where(scale == 0, torch.tensor(zero), number).int())
        scales.append(scale)
    return torch.cat(numbers, 1), torch.cat(scales, 1)


def values_of(numbers: Tensor, scales: Tensor, kind: str) -> Tensor:
    values = numbers.float() if kind == "int8" else torch.tensor(NF4)[numbers]
    blocks = zip(values.split(64, 1), scales.float().split(1, 1), strict=True)
    return torch.cat([block * scale for block, scale in blocks], 1)


def mean_gradient(name: str, passes: Sequence[Pass]) -> Tensor:
    """g_u = Σ n_f ∂ℓ_f / Σ n_f over the passes of the holders."""
    total = torch.stack([each.weight * each.gradients[name] for each in passes]).sum(0)
    return total / sum(each.weight for each in passes)


def norm_of(gradients: Tensors) -> float:
    """The norm of all gradients together. Each counts once."""
    return math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients.values()))


def hidden_state(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The first tensor that a block is given, to which the block adds."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def scaled_branch(factor: float) -> Callable[..., Tensor]:
    """Make a hook that multiplies what a block adds to its hidden state."""

    def hook(_: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        hidden = hidden_state(args, kwargs)
        return hidden + factor * (output - hidden)

    return hook


class PassThrough(nn.Module):
    """Stands in the place of a block that is skipped, and returns the hidden state."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self._block = (block,)  # in a tuple, so that its parameters are not this module's

    def __getattr__(self, name: str) -> Any:  # a model may look into its blocks
        return getattr(self.__dict__["_block"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_state(args, kwargs)
