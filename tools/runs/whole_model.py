"""Loads the full model of a checkpoint, or a Hugging Face model, into this process."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from ...engine.batch.call import call_model, logits_of, loss_of, to_device
from ...engine.checkpoint.load import load
from ...engine.checkpoint.state import weights_of
from ...engine.construct import values_to_give
from ...engine.distributed.mesh import Mesh
from ...engine.errors import ConfigError
from ...engine.full_model.whole_copy import UncutModel
from ...engine.placement.layout import Layout
from ...engine.subnetwork.execution import autocast_forward
from ...engine.subnetwork.initialisation import WeightFiles, fillers_from
from .saved_run import SavedRun

# The whole model is in this process, so the engine and the layout of the training do not matter.
IN_ONE_PROCESS = (
    "sdp.engine=fsdp2",
    "fp16.enabled=false",
    "tensor_parallel.autotp_size=1",
    "training.init_from=null",
    "training.compile=false",
    "activation_checkpointing.mode=none",
)


def check_exportable(saved: SavedRun, command: str) -> None:
    """Raise ConfigError if no model of transformers computes the same as the full model."""
    if saved.config.sdp.branch_scale == "eval" and saved.config.sdp.groups > 1:
        raise ConfigError(
            f'{command}: {saved.dump_dir} was trained with sdp.branch_scale "eval", and transformers cannot scale '
            'branches in evaluation; to export a model, train with sdp.branch_scale "train" or "none"'
        )
    if saved.config.data.name is not None:
        raise ConfigError(
            f"{command}: {saved.dump_dir} trained {saved.config.model['name']} on images, and transformers has no "
            "model with these tensor names; measure it with sdp evaluate. For its weights under torchvision's names, "
            "load the checkpoint in a script (engine.load_checkpoint) and call engine.save_pretrained"
        )


@dataclass(frozen=True)
class WholeModel:
    """A full model in evaluation mode, and the device that it is on."""

    module: nn.Module
    device: torch.device

    @torch.no_grad()
    def mean_loss(self, batches: Sequence[Any], weights: Sequence[float]) -> float:
        """Return the weighted mean of the batches' losses. Batches with weight 0 are left out."""
        total = weight = 0.0
        shown = tqdm(batches, "held out", disable=not sys.stderr.isatty())
        for batch, count in zip(shown, weights, strict=True):
            if count:  # the mean over no targets is NaN
                total += loss_of(call_model(self.module, to_device(batch, self.device))).item() * count
                weight += count
        return total / weight if weight else math.nan

    @torch.no_grad()
    def target_losses(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the loss of each target of a language model, shape (rows, tokens − 1), on the CPU.

        A target whose label does not count has the loss 0.
        """
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = logits_of(call_model(self.module, to_device(inputs, self.device)))[:, :-1].float()
        targets = batch["labels"][:, 1:].to(self.device)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets).cpu()


@contextmanager
def whole_model(saved: SavedRun, model: nn.Module, path: int = 0) -> Iterator[WholeModel]:
    """A context in which ``model``, built on the meta device, has the weights of ``saved``.

    With several paths (``sdp.paths``), the weights are those of path number ``path``.
    """
    config = saved.config
    layout = Layout.of(model, config, Mesh(config.sdp.groups))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    uncut = UncutModel(model, layout, values_to_give(model, config, layout))
    here = layout.parameters_at(path) | layout.buffers_at(path)  # group P trains path P
    infos = {info.canonical: info for info in here.values()}
    tensors = {name: torch.empty(info.full_shape, dtype=info.dtype, device=device) for name, info in infos.items()}
    if saved.is_model:
        fillers = fillers_from(WeightFiles(saved.dump_dir), saved.dump_dir, model, layout)
        for name, tensor in tensors.items():
            fillers[infos[name].path](tensor, 0)
    else:
        load(saved.checkpoint, weights_of(tensors), saved.state["files"], alone=True)
    dtype = getattr(torch, config.precision)
    for name in tensors.keys() & layout.wholes.keys():
        tensors[name] = tensors[name].to(dtype if infos[name].dtype.is_floating_point else infos[name].dtype)
    values = {infos[name].path: tensors.pop(name) for name in infos}
    phase = layout.in_phase(config.masking_schedule.at(saved.step + 1))
    with uncut.filled(values, dtype, device, phase) as module:
        autocast_forward(module, config, device)
        yield WholeModel(module, device)
