"""Builds the contestants of ``python -m lab.overhead``: the engine and hand-written loops."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from sdp.engine.engine import SDPEngine
from sdp.engine.initialize import initialize
from sdp.engine.placement.placement import Placement
from sdp.models.registry import build_model
from torch import nn

from .options import PlainOptions
from .race import Batch, Contestant

MAX_NORM = 0.1  # so small that every step is clipped, so that both sides scale every gradient
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
# Both do the same arithmetic, except that the engine computes the clipping factor in float64. AdamW
# carries the difference from step to step.
WEIGHT_TOLERANCE = 1e-6


def batches(options: PlainOptions, device: torch.device) -> Iterator[Batch]:
    """Yield batches of random tokens, which are the same in every run."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(options.warmup + options.repeats):
        tokens = torch.randint(options.vocab_size, (options.micro_batch, options.sequence), generator=generator).to(
            device
        )
        yield {"input_ids": tokens, "labels": tokens}


def build_llama(options: PlainOptions, layers: int) -> nn.Module:
    """Build the model on the meta device, with this number of layers."""
    section = {
        "name": "llama",
        "vocab_size": options.vocab_size,
        "hidden_size": options.hidden,
        "intermediate_size": options.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": options.heads,
        "max_position_embeddings": options.sequence,
    }
    return build_model(section)


def build_random_model(options: PlainOptions, device: torch.device) -> nn.Module:
    """Build the full model with random weights."""
    model = build_llama(options, options.layers).to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
    return model


def copy_held_layers(engine: SDPEngine, options: PlainOptions) -> nn.Module:
    """Build a plain model of the layers that the engine holds, with the engine's weights."""
    placement = engine.layout.placement
    model = build_llama(options, count_held_layers(placement)).to_empty(device=engine.device)
    model.load_state_dict(
        {name_in_copy(name, placement): value.detach() for name, value in engine.parameters_here.items()}
    )
    return model


def copy_narrower(
    engine: SDPEngine, options: PlainOptions
) -> tuple[nn.Module, dict[str, torch.Tensor], dict[str, Any]]:
    """Build a plain model whose layers have only the neurons that the engine holds.

    Returns:
        The model, and its weights by the engine's names. The third value has for each parameter, by
        the model's names, the number of ranks that average its gradient: one number, or one for
        each index.
    """
    model = build_llama(options, options.layers)
    weights: dict[str, torch.Tensor] = {}
    holders: dict[str, Any] = {}
    for name, slices in engine.layout.wholes.items():
        held = [info for info in slices if info.name in engine.parameters_here]
        dim = held[0].cut.dim if held[0].cut else 0
        parameter = nn.Parameter(torch.cat([engine.parameters_here[info.name].detach() for info in held], dim))
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, parameter)
        widths = [info.shape[dim] for info in held]
        weights |= zip((info.name for info in held), parameter.detach().split(widths, dim), strict=True)
        counts = torch.tensor(
            [len(info.holders) for info in held for _ in range(info.shape[dim])], device=engine.device
        )
        shape = [-1 if axis == dim else 1 for axis in range(parameter.dim())]
        holders[name] = len(held[0].holders) if len({info.holders for info in held}) == 1 else counts.view(shape)
    return model, weights, holders


def count_held_layers(placement: Placement) -> int:
    """Count the layers that group 0 holds."""
    return sum(0 in holders for holders in placement.holders)


def name_in_copy(name: str, placement: Placement) -> str:
    """Return a parameter's name in the plain model of the layers that group 0 holds.

    The plain model numbers its layers without gaps.
    """
    held = [unit for unit, holders in zip(placement.units, placement.holders, strict=True) if 0 in holders]
    for index, unit in enumerate(held):
        if name.startswith(f"{unit}."):
            return f"{unit.rpartition('.')[0]}.{index}{name.removeprefix(unit)}"
    return name


def build_engine(
    options: PlainOptions,
    *,
    layers: int,
    groups: int,
    capacity: float,
    bf16: bool = False,
    compiled: bool = False,
    neuron_groups: int = 0,
) -> SDPEngine:
    """Build the engine for the share of one group.

    Args:
        options: Sizes of the model and the batch.
        layers: The number of layers of the model.
        groups: The number of SDP groups.
        capacity: The fraction of the model that a group holds.
        bf16: Whether to compute in bfloat16.
        compiled: Whether to compile the units.
        neuron_groups: The number of groups of neurons in a branch. If 0, units are layers.
    """
    units: dict[str, Any] = {"granularity": "neuron", "neuron_groups": neuron_groups} if neuron_groups else {}
    config = {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_clipping": MAX_NORM,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "bf16": {"enabled": bf16},
        "sdp": {"groups": groups, "capacity": capacity, "profile": "uniform", "check_interval": 0, **units},
        "training": {"compile": compiled},
    }
    return initialize(model=build_llama(options, layers), config=config)[0]


def drive(name: str, engine: SDPEngine) -> Contestant:
    """Make a contestant that trains with the engine."""

    def step(batch: Batch) -> None:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

    return Contestant(name, sum(parameter.numel() for parameter in engine.parameters_here.values()), step)


def write_by_hand(name: str, model: nn.Module, holders: Mapping[str, Any] | None = None) -> Contestant:
    """Make a contestant that trains with the loop that a user would write.

    For gradients that several ranks average, ``holders`` has the number of these ranks.
    """
    parameters = dict(model.named_parameters())
    averaged = [(parameters[key], ranks) for key, ranks in (holders or {}).items()]
    optimizer = torch.optim.AdamW(parameters.values(), **ADAMW, fused=True)

    def step(batch: Batch) -> None:
        loss = model(**batch)
        loss.backward()
        for parameter, ranks in averaged:
            assert parameter.grad is not None
            parameter.grad.div_(ranks)
        nn.utils.clip_grad_norm_(parameters.values(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(name, sum(parameter.numel() for parameter in parameters.values()), step)


def weights_of(engine: SDPEngine, plain: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of the plain model of held layers, by the engine's names."""
    theirs = dict(plain.named_parameters())
    return {name: theirs[name_in_copy(name, engine.layout.placement)] for name in engine.parameters_here}


def weight_difference(ours: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> float:
    """Return ‖engine − others‖ / ‖others‖ over all ``weights``, which have the engine's names.

    Raises RuntimeError if the difference is more than rounding.
    """
    pairs = [(value, weights[name]) for name, value in ours.items()]
    with torch.no_grad():
        apart = sum(float((mine - other).double().square().sum()) for mine, other in pairs)
        whole = sum(float(other.double().square().sum()) for _, other in pairs)
    difference = math.sqrt(apart / whole)
    if not difference <= WEIGHT_TOLERANCE:
        raise RuntimeError(
            f"the weights of the engine and of the other side differ by {difference:.1e} at the end: they did not do "
            "the same work"
        )
    return difference
