"""Trains one configuration with all groups in one process."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from sdp.engine.batch.call import to_device
from sdp.engine.batch.loader import ResumableLoader, evaluation_batches
from sdp.engine.batch.size import BatchSize
from sdp.engine.config.schema import Config
from sdp.engine.construct import values_to_give
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.errors import ConfigError, ModelError, NonFiniteError
from sdp.engine.model_interface import get_random_options
from sdp.engine.optim.clip import clip_, squared_norm
from sdp.engine.optim.optimizers import build_optimizer
from sdp.engine.optim.schedules import HolderScale, exponent_of, is_decoupled, scheduler_of
from sdp.engine.placement.layout import Layout
from sdp.engine.placement.tensor_info import Shard
from sdp.engine.subnetwork.execution import compile_units
from sdp.engine.subnetwork.initialisation import seed_of
from sdp.engine.subnetwork.materialise import give_values
from sdp.models.registry import build_model
from sdp.tools.runs.dataset import open_corpus
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .rows import per_unit
from .workers import Workers, mean_loss

# The keys that the simulator follows, by section, and those that change nothing that it computes.
_FOLLOWED = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping optimizer "
    "scheduler model data sdp training steps_per_print zero_optimization tensorboard wandb env",
    "sdp": "groups capacity granularity neuron_groups masking placement profile units protect seed lr_scale "
    "check_interval",
    "training": "steps seed evaluate_every evaluate_batches max_skips init_from save_every keep async_save "
    "start_timeout step_timeout compile",
}


def require_followed(config: Config) -> None:
    """Raise ConfigError if the simulator would not follow a key that the configuration sets."""
    sections: dict[str, BaseModel] = {"": config, "sdp": config.sdp, "training": config.training}
    for section, given in sections.items():
        default = type(given)()
        for key in type(given).model_fields:
            if key not in _FOLLOWED[section].split() and getattr(given, key) != getattr(default, key):
                raise ConfigError(
                    f"{section}.{key}: the simulator does not follow this key".lstrip(".") + "; remove it"
                )
    if config.training.steps is None:
        raise ConfigError("training.steps: the simulator needs a number of steps")
    if config.training.compile and config.sdp.granularity == "neuron":
        raise ConfigError("training.compile: the simulator compiles blocks only; remove it")
    if config.optimizer is not None and config.optimizer.type.lower() == "muon":
        raise ConfigError("optimizer.type: the simulator has no Muon; use another optimizer")


def scale_steps(optimizer: torch.optim.Optimizer, rates: Mapping[nn.Parameter, Any]) -> None:
    """Multiply each step's change of a parameter by a factor, but not decoupled weight decay.

    Args:
        optimizer: The optimizer. It gets hooks.
        rates: For each parameter, a number, or a tensor that broadcasts to the parameter.
    """
    before: dict[nn.Parameter, Tensor] = {}

    def keep(*_: Any) -> None:
        before.update((parameter, parameter.detach().clone()) for parameter in rates)

    @torch.no_grad()
    def scale(*_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in rates.keys() & {*group["params"]}:
                kept = before.pop(parameter)
                if is_decoupled(optimizer, group):
                    kept = kept * (1 - group["lr"] * group["weight_decay"])
                parameter.copy_(kept + rates[parameter] * (parameter - kept))

    optimizer.register_step_pre_hook(keep)
    optimizer.register_step_post_hook(scale)


class Simulation:
    """A training of all groups in one process. Each group is one worker.

    Args:
        config: A configuration that :func:`require_followed` accepts.
        model: The full model, with or without values. It is changed.
        device: Where it computes.

    Raises:
        ModelError: The model cannot run all groups in one pass.
    """

    def __init__(self, config: Config, model: nn.Module, device: torch.device):
        self.model, self.steps, self._config, self._device = model, 0, config, device
        self.layout = with_first_values(config, model, device)
        if mixing := [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]:
            raise ModelError(f"{mixing[0]}: mixes the rows of all groups; train without the simulator")
        if config.training.compile:
            # A block has a graph for each number of rows: of its holders, of others, and of all.
            blocks, phases = [unit.name for unit in self.layout.units if unit.is_block], len(config.sdp.maskings)
            compile_units(model, blocks, device, sliced=True, phases=phases * config.sdp.groups)
        self._workers = Workers(model, self.layout)
        self.optimizer = self._make_optimizer()
        self._scheduler = scheduler_of(config, None, self.optimizer)
        self._checked: set[str] = set()
        self._skipped = 0

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """Make the optimizer, with a rate for each unit if ``sdp.lr_scale`` says so."""
        section, model = self._config.optimizer, self.model
        kind, params = (section.type, section.params) if section is not None else ("AdamW", {})
        optimizer, _ = build_optimizer(kind, params, [p for p in model.parameters() if p.requires_grad], self._device)
        exponent = exponent_of(self._config.sdp.lr_scale, is_sgd=isinstance(optimizer, torch.optim.SGD))
        if exponent:
            rates = per_unit(model, self.layout, HolderScale(self.layout.placement, exponent).of, 1.0)
            scale_steps(optimizer, {model.get_parameter(name): rate for name, rate in rates.items()})
        return optimizer

    def step(self, micro_batches: Sequence[Any]) -> tuple[float, float]:
        """Make one optimizer step, and return the mean loss and the norm of the gradient.

        A step whose gradient is NaN or infinite is counted, and changes nothing else.

        Args:
            micro_batches: The micro-batches of the step. Each has the rows of all groups, in order.

        Raises:
            ModelError: Rows of different groups interact.
            NonFiniteError: Too many steps in a row changed nothing.
        """
        self.steps += 1
        masking = self._config.masking_schedule.at(self.steps)
        if masking not in self._checked:
            with torch.random.fork_rng():
                self._workers.check(micro_batches, masking)
            self._checked.add(masking)
        loss = self._workers.gradients(micro_batches, masking)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = math.sqrt(squared_norm(gradients, self._device).item())
        self._skipped = 0 if math.isfinite(norm) else self._skipped + 1
        if self._skipped > self._config.training.max_skips:
            raise NonFiniteError(
                f"step {self.steps}: {self._skipped} gradients in a row are NaN or infinite; lower the learning rate"
            )
        if not self._skipped:
            if self._config.gradient_clipping:
                clip_(gradients, norm, self._config.gradient_clipping)
            self.optimizer.step()
            if self._scheduler is not None:
                self._scheduler.step()
        return loss, norm


def with_first_values(config: Config, model: nn.Module, device: torch.device) -> Layout:
    """Place the units of the full ``model``, and give its parameters their initial values."""
    layout = Layout.of(model, config, Mesh(config.sdp.groups))
    if get_random_options(model):
        torch.manual_seed(seed_of(config.training.seed, "draws", 0))
    give_values(model, layout, values_to_give(model, config, layout), device, Shard())
    return layout


def train(config: Config, folder: Path) -> dict[str, Any]:
    """Train ``config``, and write ``folder/result.json``.

    Args:
        config: The configuration of a run.
        folder: Where the result goes, and the corpus if the configuration names none.

    Returns:
        The losses of the full model on held-out data ("evaluations"), and the seconds.

    Raises:
        ConfigError: The simulator does not follow a key of the configuration.
    """
    require_followed(config)
    started, device = time.perf_counter(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    corpus, training = open_corpus(config, folder), config.training
    run = Simulation(config, build_model(config.model, **corpus.facts), device)
    size = BatchSize.resolve(config, run.layout.mesh)
    rows = size.micro * config.sdp.groups
    batches = iter(ResumableLoader(corpus.train, rows, seed=training.seed, collate_fn=corpus.collate))
    held_out = evaluation_batches(
        corpus.held_out, rows, limit=training.evaluate_batches, collate_fn=corpus.collate_held_out
    )
    kept, evaluations, steps = [to_device(batch, device) for batch in held_out], [], training.steps or 0
    while run.steps < steps:
        run.step([to_device(batch, device) for batch in islice(batches, size.accumulation)])
        if run.steps == steps or (training.evaluate_every and run.steps % training.evaluate_every == 0):
            evaluations.append({"step": run.steps, "loss": mean_loss(run.model, kept)})
    result = {"evaluations": evaluations, "seconds": time.perf_counter() - started}
    (folder / "result.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    return result
