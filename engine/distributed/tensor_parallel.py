"""Tensor parallelism inside a group.

A model's ``tensor_parallel_plan()`` says for each module how its parameters are cut. Outside of
residual branches, hidden states are cut along the sequence. What a rank has of a matrix is a plain
tensor, so FSDP2 or ZeRO can shard it further without code for tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ..model_interface import Column, Gather, Head, Row, Style, Vocabulary, get_tensor_parallel_plan
from ..module_paths import match_patterns
from .collectives import TensorRanks, gather_sequence, scatter_sequence, vocabulary_embedding

TP = "tensor_parallel.autotp_size"


def parameter_cuts(model: nn.Module, ranks: int) -> dict[str, int | None]:
    """Return the dimension along which the model's plan cuts each parameter, by name.

    The dimension is None for a parameter that every tensor-parallel rank has whole.

    Raises:
        ModelError: the model has no plan, the plan leaves a parameter out, or a size is not
            divisible by ``ranks``.
    """
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    cuts: dict[str, int | None] = {}
    for path, style in _resolved(model).items():
        for key, parameter in model.get_submodule(path).named_parameters(recurse=False):
            name = canonical[id(parameter)]
            if cuts.setdefault(name, style.dims) != style.dims:
                raise ModelError(
                    f"{name}: several modules share this weight, and tensor_parallel_plan() cuts it along different "
                    "dimensions; cut it along one dimension in all modules"
                )
            _require_divisible(f"{path}.{key}", parameter, style, ranks)
        _require_plain(path, model.get_submodule(path), style)
    missing = next((name for name in canonical.values() if name not in cuts), None)
    if missing is not None:
        raise ModelError(f"{missing}: is not in tensor_parallel_plan(); add its module to the plan, or set {TP} to 1")
    return cuts


def _resolved(model: nn.Module) -> dict[str, Style]:
    plan = get_tensor_parallel_plan(model)
    if plan is None:
        raise ModelError(f"{type(model).__name__} has no tensor_parallel_plan(), so it cannot be cut; set {TP} to 1")
    modules = dict(model.named_modules(remove_duplicate=False))
    matched = {pattern: match_patterns(modules, [pattern], "tensor_parallel_plan()") for pattern in plan}
    return {path: style for pattern, style in plan.items() for path in modules if path in matched[pattern]}


def _require_divisible(name: str, parameter: nn.Parameter, style: Style, ranks: int) -> None:
    if style.dims is None:
        return
    if isinstance(style, Row) and parameter.dim() < 2:
        raise ModelError(
            f"{name}: input features of a layer with a bias cannot be cut; leave the bias out, or set {TP} to 1"
        )
    size = parameter.shape[style.dims]
    pieces = style.pieces or size if isinstance(style, Column) else size
    if size % pieces or pieces % ranks:
        what = f"{pieces} pieces of {size // pieces}" if pieces != size else f"size {size}"
        raise ModelError(
            f"{name}: dimension {style.dims} ({what}) cannot be cut among {TP} = {ranks} ranks; choose a divisor of "
            f"{pieces}"
        )


def _require_plain(path: str, module: nn.Module, style: Style) -> None:
    for key in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
        value = getattr(module, key, None)
        if isinstance(style, Vocabulary) and value is not None and value is not False:
            raise ModelError(f"{path}: an embedding with {key} cannot be cut; leave out {key}, or set {TP} to 1")


def parallelise(model: nn.Module, cuts: Mapping[str, int | None], ranks: TensorRanks) -> None:
    """Cut ``model`` in place to this rank's part, and add hooks that run the collectives.

    ``cuts`` is the result of :func:`parameter_cuts`. The model may be on the meta device.
    """
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    attributes = [
        (module, key, canonical[id(p)])
        for module in model.modules()
        for key, p in module.named_parameters(recurse=False)
    ]
    parts: dict[str, nn.Parameter] = {}
    for module, key, name in attributes:
        dim = cuts[name]
        if dim is not None:
            if name not in parts:  # every name of a tied parameter gets the same part
                parts[name] = _tp_shard(module.get_parameter(key), dim, ranks)
            setattr(module, key, parts[name])
    for path, style in _resolved(model).items():
        _install(model.get_submodule(path), style, ranks)


def _tp_shard(parameter: nn.Parameter, dim: int, ranks: TensorRanks) -> nn.Parameter:
    part = parameter.detach().chunk(ranks.size, dim)[ranks.index].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def _install(module: nn.Module, style: Style, ranks: TensorRanks) -> None:
    if isinstance(style, Gather | Head):
        module.register_forward_pre_hook(partial(_gathered, ranks))
        if isinstance(style, Head):
            module.tensor_ranks = ranks  # type: ignore[assignment]
    elif isinstance(style, Row):
        module.register_forward_hook(partial(_scattered, ranks))
    elif isinstance(style, Vocabulary):
        module.forward = partial(_embed, module, ranks)  # type: ignore[method-assign]


def _gathered(ranks: TensorRanks, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return gather_sequence(args[0], ranks), *args[1:]


def _scattered(ranks: TensorRanks, _: nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return scatter_sequence(output, ranks)


def _embed(module: Any, ranks: TensorRanks, ids: torch.Tensor) -> torch.Tensor:
    return vocabulary_embedding(ids, module.weight, ranks)
