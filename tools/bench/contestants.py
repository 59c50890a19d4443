"""What ``sdp bench`` times without CONFIG: the engine, hand-written loops over the same layers, and the models of both."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...engine.engine import SDPEngine
from ...engine.initialize import initialize
from ...engine.placement.placement import Placement
from ...models.registry import build_model
from .race import Batch, Contestant

MAX_NORM = 0.1  # so small that every step is clipped: both sides then scale every gradient
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
# Same arithmetic but for the rounding of the clipping factor (the engine's is in float64), which AdamW carries on from step to step.
WEIGHT_TOLERANCE = 1e-6


def batches(args: argparse.Namespace, device: torch.device) -> Iterator[Batch]:
    """Random tokens, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(args.warmup + args.repeats):
        tokens = torch.randint(args.vocab_size, (args.micro_batch, args.sequence), generator=generator).to(device)
        yield {"input_ids": tokens, "labels": tokens}


def llama_of(args: argparse.Namespace, layers: int) -> nn.Module:
    section = {
        "name": "llama",
        "vocab_size": args.vocab_size,
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": args.heads,
        "max_position_embeddings": args.sequence,
    }
    return build_model(section)


def random_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The full model with weights of its own."""
    model = llama_of(args, args.layers).to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
    return model


def hand_written_copy(engine: SDPEngine, args: argparse.Namespace) -> nn.Module:
    """A model of the layers that the engine holds and nothing else, with the engine's weights."""
    placement = engine.layout.placement
    model = llama_of(args, held_layers(placement)).to_empty(device=engine.device)
    model.load_state_dict(
        {name_in_copy(name, placement): value.detach() for name, value in engine.parameters_here.items()}
    )
    return model


def narrower_copy(
    engine: SDPEngine, args: argparse.Namespace
) -> tuple[nn.Module, dict[str, torch.Tensor], dict[str, Any]]:
    """A model whose layers have the engine's neurons and no others; the weights in it by the engine's names, and by its own over how many
    ranks a gradient is averaged: a number, or one for every index.
    """
    model = llama_of(args, args.layers)
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


def held_layers(placement: Placement) -> int:
    return sum(0 in holders for holders in placement.holders)


def name_in_copy(name: str, placement: Placement) -> str:
    """A parameter's name in the model of group 0's layers alone, where held layers move up to the places of absent ones."""
    held = [unit for unit, holders in zip(placement.units, placement.holders, strict=True) if 0 in holders]
    for index, unit in enumerate(held):
        if name.startswith(f"{unit}."):
            return f"{unit.rpartition('.')[0]}.{index}{name.removeprefix(unit)}"
    return name


def engine_of(
    args: argparse.Namespace,
    *,
    layers: int,
    groups: int,
    capacity: float,
    bf16: bool = False,
    compiled: bool = False,
    neuron_groups: int = 0,
) -> SDPEngine:
    units: dict[str, Any] = {"granularity": "neuron", "neuron_groups": neuron_groups} if neuron_groups else {}
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_clipping": MAX_NORM,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "bf16": {"enabled": bf16},
        "sdp": {"groups": groups, "capacity": capacity, "profile": "uniform", "check_interval": 0, **units},
        "training": {"compile": compiled},
    }
    return initialize(model=llama_of(args, layers), config=config)[0]


def driven(name: str, engine: SDPEngine) -> Contestant:
    def step(batch: Batch) -> None:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

    return Contestant(name, sum(parameter.numel() for parameter in engine.parameters_here.values()), step)


def hand_written(name: str, model: nn.Module, holders: Mapping[str, Any] | None = None) -> Contestant:
    """The loop that a user would write; ``holders``: over how many ranks each gradient is averaged, where there are several."""
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
    """The weights of a copy of the held layers, by the engine's names."""
    theirs = dict(plain.named_parameters())
    return {name: theirs[name_in_copy(name, engine.layout.placement)] for name in engine.parameters_here}


def weight_difference(ours: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> float:
    """‖ours − others‖ / ‖others‖ over all ``weights``, the others' by the engine's names; RuntimeError if it is more than rounding."""
    pairs = [(value, weights[name]) for name, value in ours.items()]
    with torch.no_grad():
        apart = sum(float((mine - other).double().square().sum()) for mine, other in pairs)
        whole = sum(float(other.double().square().sum()) for _, other in pairs)
    difference = math.sqrt(apart / whole)
    if not difference <= WEIGHT_TOLERANCE:
        raise RuntimeError(
            f"the engine and what it is compared with ended with weights {difference:.1e} apart: they did not do the same work"
        )
    return difference
