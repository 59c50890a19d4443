"""Runs all workers in one process and in one pass, to study placements.

Under forward masking, the neurons that a group does not hold are multiplied by zero in its rows.
Under backward masking, its rows use these weights and give them no gradient. The results equal
those of the reference backend, but a step takes about as long as one of the dense model, for any
number of groups.

This works only if rows of a batch never interact. Forward masking also needs blocks that add
nothing but sums over hidden neurons. Backward masking of neurons needs linear layers that see the
rows in their order. The first pass therefore compares the model, every unit that a group lacks, and
the gradients of neurons with the reference. The gradients of blocks are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from ...batch.call import split_rows, target_count, tensors_in
from ...config.masking import Masking
from ...errors import ModelError
from ...model_interface import get_neuron_branches
from ...placement.layout import Layout
from ...placement.units import SHARED, Slice, find_neuron_units, goes_into_sum
from .backend import ReferenceBackend
from .frozen_neurons import FrozenNeurons
from .frozen_rows import FrozenRows

_HERE, _INSTEAD = 'sdp.engine "vectorized"', 'use "reference"'
# How far outputs may differ from the reference's, relative to the largest element.
_RELATIVE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
# How far the gradients of a layer may differ, by norm, relative to the reference's. If rows are
# mixed up, they differ by about 1.
_RELATIVE_GRADIENT = {torch.float32: 1e-3, torch.bfloat16: 1e-1}


class VectorizedBackend(ReferenceBackend):
    """The reference with all workers' rows in one pass.

    Raises ModelError for a model that cannot run this way.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        device: torch.device,
        *,
        compute_dtype: torch.dtype = torch.float32,
        maskings: Sequence[Masking] = (),
    ):
        super().__init__(model, layout, device, compute_dtype=compute_dtype, maskings=maskings)
        mixing = next((name for name, module in model.named_modules() if isinstance(module, _BatchNorm)), None)
        if mixing is not None:
            raise ModelError(f"{_HERE}: {mixing} mixes the rows of all groups; {_INSTEAD}")
        if get_neuron_branches(model) is None:
            raise ModelError(
                f"{_HERE}: {type(model).__name__} does not declare its residual branches (neuron_branches()); "
                f"{_INSTEAD}"
            )
        self._tried = False
        # None while the full model runs, or one group in the way of the reference.
        self._group_of_row: torch.Tensor | None = None
        for name, gates in self._gates().items():
            model.get_submodule(name).register_forward_pre_hook(self._gate(name, gates))
        freezes = "backward" in self.phases
        self._frozen_rows = [
            FrozenRows(model.get_submodule(unit.name), holders, self._groups_of_frozen_rows)
            for unit, holders in zip(layout.units, layout.placement.holders, strict=True)
            if freezes and unit.is_block and len(holders) < layout.mesh.sdp
        ]
        self._frozen_neurons = list(self._make_frozen_neurons()) if freezes else []

    def _groups_of_frozen_rows(self) -> torch.Tensor | None:
        return self._group_of_row if self.layout.keeps_frozen else None

    def _make_frozen_neurons(self) -> Iterator[FrozenNeurons]:
        by_layer: dict[str, list[tuple[Slice, Sequence[int]]]] = {}
        for part, holders in self.layout.slices():
            by_layer.setdefault(part.parameter.rpartition(".")[0], []).append((part, holders))
        groups = self.layout.mesh.sdp
        for name, slices in by_layer.items():
            if any(len(holders) < groups for _, holders in slices):
                layer = self.module.get_submodule(name)
                yield FrozenNeurons(name, layer, slices, groups, self._groups_of_frozen_rows)

    def _enter_phase(self) -> None:
        super()._enter_phase()
        self._tried = False

    def _gates(self) -> dict[str, torch.Tensor]:
        """Per layer that sums hidden neurons: 1 if a group holds the neuron, else 0, shape (groups,
        neurons).
        """
        gates: dict[str, torch.Tensor] = {}
        for part, holders in self._sums():
            name, ((first, last),) = part.parameter.removesuffix(".weight"), part.ranges
            bias = self.layout.parameters.get(f"{name}.bias")
            if bias is not None and bias.unit != SHARED:
                raise ModelError(f"{_HERE}: {bias.name} is added even if its unit is not held; {_INSTEAD}")
            shape = (self.layout.mesh.sdp, self.parameters[part.parameter].shape[1])
            held = gates.setdefault(name, torch.ones(shape, device=self.device))
            held[[group for group in range(len(held)) if group not in holders], first:last] = 0
        return gates

    def _sums(self) -> Iterator[tuple[Slice, Sequence[int]]]:
        """The slices along which neurons enter the sum of a branch, each with the holders of its
        unit.

        The unit may be a group of neurons or a block.
        """
        of_unit = dict(zip((unit.name for unit in self.layout.units), self.layout.placement.holders, strict=True))
        blocks = [f"{unit.name}." for unit in self.layout.units if unit.is_block]
        for unit in find_neuron_units(self.module, 1) if blocks else self.layout.units:
            owner = next((block.removesuffix(".") for block in blocks if unit.name.startswith(block)), unit.name)
            if owner in of_unit:
                yield from ((part, of_unit[owner]) for part in unit.slices if goes_into_sum(part.parameter, part.dim))

    def _gate(self, name: str, gates: torch.Tensor) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]:
        def gate(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            groups, (hidden, *others) = self._group_of_row, args
            if groups is None or self.layout.keeps_frozen:
                return None
            if hidden.shape[0] != len(groups):
                raise ModelError(f"{_HERE}: {name} has {hidden.shape[0]} rows of a batch of {len(groups)}; {_INSTEAD}")
            rows = gates[groups].to(hidden.dtype)
            return (hidden * rows.view(len(rows), *[1] * (hidden.dim() - 2), -1), *others)

        return gate

    def forward(self, call: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        mesh = self.layout.mesh
        workers = split_rows(batch, mesh.data_ranks)
        # The mean over the workers must equal the mean over all targets.
        if len({target_count(self.module, rows) for rows in workers}) > 1:
            raise ModelError(f"{_HERE}: the ranks' shares of a batch have different numbers of targets; {_INSTEAD}")
        rows = len(tensors_in(workers[0])[0])
        # This stays set after forward, because backward runs checkpointed blocks again.
        sizes = torch.tensor([rows * mesh.size(group) for group in range(mesh.sdp)], device=self.device)
        self._group_of_row = torch.arange(mesh.sdp, device=self.device).repeat_interleave(sizes)
        if not self._tried:
            self._tried = self._try_out(call, batch)
        return self._run(call, batch)

    def _try_out(self, call: Callable[[nn.Module, Any], Any], batch: Any) -> bool:
        """Compare the model, every unit that a group lacks, and the gradients of neurons with the
        reference.

        Returns whether all of it could be compared. Gradients cannot while they are off, or if they
        are zero or not finite. Raises ModelError if something differs.
        """
        lacking = {} if self.layout.keeps_frozen else self._lacking()
        modes = [(module, module.training) for module in self.module.modules()]
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        modules = {name: self.module.get_submodule(name) for name in lacking}
        hooks = [
            module.register_forward_pre_hook(self._trial(name, lacking), with_kwargs=True)
            for name, module in modules.items()
        ]
        trains = self.layout.keeps_frozen and bool(self._frozen_neurons)
        differentiates = trains and torch.is_grad_enabled()
        self.module.eval()  # dropout would draw different numbers
        try:
            with torch.set_grad_enabled(differentiates), torch.random.fork_rng(), ExitStack() as learning:
                for block in self._frozen_rows:
                    learning.enter_context(block.learning())
                rows, self._group_of_row = self._group_of_row, None
                theirs = super().forward(call, batch)
                their_gradients = self._gradients_of_neurons(theirs) if differentiates else {}
                self._group_of_row = rows
                ours = self._run(call, batch)
                our_gradients = self._gradients_of_neurons(ours) if differentiates else {}
        finally:
            for hook in hooks:
                hook.remove()
            for module, mode in modes:
                module.training = mode
            for buffer, value in buffers:
                buffer.copy_(value)
        if lacking:
            raise ModelError(
                f"{_HERE}: {next(iter(lacking))} is not called as a module, so it cannot be masked; {_INSTEAD}"
            )
        if not self._alike(ours, theirs):
            raise ModelError(
                f"{_HERE}: the model's outputs differ from the reference's, so rows of different groups interact; "
                f"{_INSTEAD}"
            )
        for layer, gradient in their_gradients.items():
            most = _RELATIVE_GRADIENT[self._compute_dtype] * gradient.norm()
            if (our_gradients[layer] - gradient).norm() > most:
                raise ModelError(
                    f"{_HERE}: the gradient of {layer} differs from the reference's, so its weights are used outside "
                    f"it, or it does not see the rows in their order; {_INSTEAD}"
                )
        size = sum((gradient.norm() for gradient in their_gradients.values()), torch.zeros(()))
        return not trains or (differentiates and bool(size.isfinite() and size > 0))

    def _gradients_of_neurons(self, outputs: Any) -> dict[str, torch.Tensor]:
        """Differentiate a random weighted sum of ``outputs`` by the parameters that are cut into
        neurons.

        Returns:
            By layer, the gradients of its weight and bias in one vector. A bias alone may have a
            gradient of zero, of which only rounding errors would be compared.
        """
        generator = torch.Generator().manual_seed(0)
        total = torch.zeros((), device=self.device)
        for output in tensors_in(outputs):
            if output.requires_grad:
                ones = [1] * (output.dim() - 2)
                weights = torch.randn((*output.shape[:2], *ones), generator=generator).to(output)
                total = total + (output * weights).float().sum()
        if not total.requires_grad:
            raise ModelError(f"{_HERE}: the model's outputs have no gradient in evaluation mode; {_INSTEAD}")
        names = dict.fromkeys(part.parameter for part, _ in self.layout.slices())
        trained = [name for name in names if self.parameters[name].requires_grad]
        if not trained:
            return {}
        values = [self.parameters[name] for name in trained]
        gradients = torch.autograd.grad(total, values, allow_unused=True, materialize_grads=True)
        of_layer: dict[str, list[torch.Tensor]] = {}
        for name, gradient in zip(trained, gradients, strict=True):
            of_layer.setdefault(name.rpartition(".")[0], []).append(gradient.flatten())
        return {layer: torch.cat(parts) for layer, parts in of_layer.items()}

    def _lacking(self) -> dict[str, int]:
        """Blocks, and branches of groups of neurons, each with a group that does not hold all of
        it.
        """
        lacking: dict[str, int] = {}
        for unit, holders in zip(self.layout.units, self.layout.placement.holders, strict=True):
            absent = next((group for group in range(self.layout.mesh.sdp) if group not in holders), None)
            if absent is not None:
                lacking.setdefault(unit.name if unit.is_block else unit.name.rpartition(".neurons.")[0], absent)
        return lacking

    def _trial(
        self, name: str, lacking: dict[str, int]
    ) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        """A hook that compares the module with the reference, as run by the group that lacks the
        module.

        It uses random values, because values that are zero at first (a bias) may not stay zero.
        """

        def trial(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in lacking or (rows := self._group_of_row) is None:  # a later call, or a run below
                return
            group = lacking.pop(name)
            generator = torch.Generator().manual_seed(0)
            floats = {key: value for key, value in module.named_parameters() if value.is_floating_point()}
            values = {key: torch.randn(value.shape, generator=generator).to(value) for key, value in floats.items()}
            self._group_of_row = torch.full_like(rows, group)
            ours = functional_call(module, values, args, kwargs)
            self._group_of_row = None
            if name in self.stand_ins_of_group[group]:
                theirs = self.stand_ins_of_group[group][name](*args, **kwargs)
            else:
                held = {key: self._held[group].get(f"{name}.{key}", torch.ones(())) for key in values}
                theirs = functional_call(
                    module, {key: value * held[key].to(value) for key, value in values.items()}, args, kwargs
                )
            self._group_of_row = rows
            if not self._alike(ours, theirs):
                raise ModelError(
                    f"{_HERE}: {name} adds more than sums over the hidden neurons that the model declares, so its "
                    f"output without them differs from the reference's; {_INSTEAD}"
                )

        return trial

    def _alike(self, ours: Any, theirs: Any) -> bool:
        """Whether the tensors of two outputs are equal up to rounding."""
        pairs = zip(tensors_in(ours), tensors_in(theirs), strict=True)
        return all(are_close(mine, other, _RELATIVE[self._compute_dtype]) for mine, other in pairs)

    def _mean_loss(
        self,
        batches: Sequence[Any],
        held: Mapping[str, torch.Tensor] | None = None,
        own: Mapping[str, torch.Tensor] | None = None,
    ) -> float:
        before, self._group_of_row = self._group_of_row, None
        try:
            return super()._mean_loss(batches, held, own)
        finally:  # a backward pass that runs blocks again may still follow
            self._group_of_row = before


def are_close(mine: torch.Tensor, other: torch.Tensor, relative: float) -> bool:
    """Whether two tensors differ by at most ``relative`` times the largest finite element.

    NaN and infinite elements must be equal.
    """
    if mine.shape != other.shape or not mine.is_floating_point():
        return torch.equal(mine, other)
    finite = mine.isfinite() & other.isfinite()
    if not torch.allclose(mine[~finite], other[~finite], equal_nan=True):
        return False
    mine, other = mine[finite], other[finite]
    return not mine.numel() or bool((mine - other).abs().max() <= relative * other.abs().max())
