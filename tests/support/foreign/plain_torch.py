"""Trains a case with torch alone: one masked copy of the model per group, and SGD by hand."""

import copy
from collections.abc import Sequence

import torch
from sdp.engine.config.load import load_config
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.placement.layout import Layout
from sdp.tests.support import models
from sdp.tests.support.cases import Case
from torch import nn


class _Skipped(nn.Module):
    def forward(self, hidden: torch.Tensor, *_: object) -> torch.Tensor:
        return hidden


def train_plainly(case: Case, rates: Sequence[float]) -> dict[str, torch.Tensor]:
    """Return the weights after a run with SGD and these learning rates.

    A group's gradient is the mean over its ranks and micro-batches; micro-batches that do not use
    a parameter count as zero. It is averaged over the groups that hold the parameter. With bf16,
    copies of the weights in bfloat16 compute, and gradients are added up in float32.
    """
    full = models.build(case.model)
    placement = Layout.of(full, load_config(case.config()), Mesh(case.groups, case.fsdp)).placement
    holders = dict(zip(placement.units, placement.holders, strict=True))
    for step, rate in enumerate(rates):
        total = {name: torch.zeros_like(parameter) for name, parameter in full.named_parameters()}
        for data_rank in range(case.data_ranks):
            for micro in range(case.accumulation):
                masked = _mask(full, data_rank // case.fsdp, holders, case)
                batch = models.micro_batch(case.model, step, micro, data_rank)
                masked(**{key: _cast(value, case.bf16) for key, value in batch.items()}).backward()
                for name, parameter in masked.named_parameters():
                    if parameter.grad is not None:
                        total[name] += parameter.grad.float()
        with torch.no_grad():
            for name, parameter in full.named_parameters():
                held_by = next((groups for unit, groups in holders.items() if name.startswith(f"{unit}.")), None)
                groups = case.groups if held_by is None else len(held_by)
                parameter -= rate * total[name] / (case.accumulation * case.fsdp * groups)
    return {name: parameter.detach() for name, parameter in full.named_parameters()}


def _mask(full: nn.Module, group: int, holders: dict[str, tuple[int, ...]], case: Case) -> nn.Module:
    masked = copy.deepcopy(full)
    for unit, groups in holders.items():
        if group not in groups and case.masking == "backward":
            masked.get_submodule(unit).requires_grad_(False)
        elif group not in groups:
            masked.set_submodule(unit, _Skipped())
    return masked.bfloat16() if case.bf16 else masked


def _cast(value: torch.Tensor, bf16: bool) -> torch.Tensor:
    return value.bfloat16() if bf16 and value.is_floating_point() else value
