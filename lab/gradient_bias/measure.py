"""Gradients under both maskings and of the dense model, on the same batches, at given weights.

All groups compute in this process, in float32, one after the other. Nothing is trained. Under
backward masking, holders read other rows than the dense mean does. So the gradients differ on every
batch, but not in expectation; ``estimate.py`` says how bias is told from sampling noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from operator import add
from pathlib import Path
from typing import Any

import torch
from sdp.engine.batch.call import map_leaves, to_device
from sdp.engine.batch.loader import ResumableLoader
from sdp.engine.batch.size import BatchSize
from sdp.engine.checkpoint.load import load
from sdp.engine.checkpoint.state import weights_of
from sdp.engine.config.load import load_config
from sdp.engine.config.method import Masking
from sdp.engine.config.schema import Config
from sdp.engine.errors import ConfigError
from sdp.engine.placement.layout import Layout
from sdp.engine.placement.units import SHARED
from sdp.models.registry import build_model
from sdp.tools.runs.dataset import Corpus, open_corpus, open_prepared
from sdp.tools.runs.saved_run import SavedRun, check_data
from torch import Tensor, nn

from ..simulator.training import with_first_values
from ..simulator.workers import Workers
from .estimate import Bias, Differences, Products, apparent_by_batches, estimate

MASKINGS: tuple[Masking, ...] = ("forward", "backward")
OVERALL = "overall"

# Half precision would be measured as a bias. The other keys concern only speed or several
# processes.
_IN_FLOAT32 = (
    "bf16.enabled=false",
    "fp16.enabled=false",
    "tensor_parallel.autotp_size=1",
    "training.compile=false",
    "activation_checkpointing.mode=none",
)


@dataclass(frozen=True)
class Measured:
    """The result of one measurement.

    Attributes:
        batches: The number of batches.
        samples: The number of samples in one batch, over all groups.
        same_data: Whether every group read the same rows.
        weights: Where the weights come from.
        holders: For each unit, the number of its holders.
        biases: For each masking, the bias of each unit, of the shared part and ``"overall"``.
        by_batches: For each masking, the apparent overall bias of means over a number of batches.
    """

    batches: int
    samples: int
    same_data: bool
    weights: str
    holders: dict[str, int]
    biases: dict[str, dict[str, Bias]]
    by_batches: dict[str, list[tuple[int, float]]]


def measure(
    config: Config, out: Path, batches: int, *, same_data: bool = False, saved: SavedRun | None = None
) -> Measured:
    """Measure the bias of SDP's gradient over independent batches.

    Args:
        config: The configuration whose model, placement and data are used.
        out: Where data is prepared if the configuration names none.
        batches: The number of batches.
        same_data: Whether every group reads the same rows.
        saved: The run whose weights are used. If None, weights are those of ``training.init_from``,
            or the initial ones of the seed.

    Raises:
        ConfigError: The data has too few samples.
        CheckpointError: The checkpoint belongs to another model or to other data.
    """
    config = load_config(config.model_dump(mode="json"), _IN_FLOAT32)
    corpus = _corpus(config, out, saved)
    model = build_model(config.model, **corpus.facts)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layout = with_first_values(config, model, device)
    if saved is not None:
        buffers = {name: buffer for name, buffer in model.named_buffers() if name in layout.buffers}
        tensors = weights_of({**dict(model.named_parameters()), **buffers})
        load(saved.checkpoint, tensors, saved.state["files"], alone=True)
    size = BatchSize.resolve(config, layout.mesh)
    products = compare(model, layout, _batches(config, corpus, size, batches, same_data=same_data))
    start = f"initial, seed {config.training.seed}"
    if config.training.init_from is not None:
        start = f"those in {config.training.init_from}"
    return Measured(
        batches,
        size.train,
        same_data,
        f"step {saved.step} of {saved.dump_dir}" if saved is not None else start,
        {unit.name: len(held) for unit, held in zip(layout.units, layout.placement.holders, strict=True)}
        | {SHARED: layout.mesh.sdp},
        {name: {unit: estimate(one) for unit, one in of_units.items()} for name, of_units in products.items()},
        {name: apparent_by_batches(of_units[OVERALL]) for name, of_units in products.items()},
    )


def compare(model: nn.Module, layout: Layout, batches: Iterable[Sequence[Any]]) -> dict[str, dict[str, Products]]:
    """Compare the gradients of both maskings with the dense gradient, on the same batches.

    Args:
        model: The model with its weights.
        layout: Its units and their holders.
        batches: The micro-batches of each batch, with the rows of all groups in order.

    Returns:
        For each masking, the inner products of the differences from the dense gradient: for each
        unit, for the shared part and ``"overall"``.
    """
    everything = replace(layout.placement, holders=(layout.everyone,) * len(layout.units))
    dense, masked = Workers(model, replace(layout, placement=everything)), Workers(model, layout)
    differences = Differences(layout)
    with _float32_convolutions():
        for rows in batches:
            found = {masking: gradient(masked, rows, masking) for masking in MASKINGS}
            differences.add(gradient(dense, rows, "forward"), found)
    products = {masking: differences.products(masking) for masking in MASKINGS}
    return {name: {**of_units, OVERALL: reduce(add, of_units.values())} for name, of_units in products.items()}


def gradient(workers: Workers, micro_batches: Sequence[Any], masking: Masking) -> dict[str, Tensor]:
    """Return the gradient of one step by parameter, on the CPU."""
    device = next(workers.model.parameters()).device
    workers.gradients([to_device(batch, device) for batch in micro_batches], masking, in_turn=True)
    found = {name: p.grad.cpu() for name, p in workers.model.named_parameters() if p.grad is not None}
    workers.model.zero_grad()
    return found


@contextmanager
def _float32_convolutions() -> Iterator[None]:
    """Run convolutions in float32.

    By default, cuDNN uses TF32 for them; torch's matrix products do not.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _corpus(config: Config, out: Path, saved: SavedRun | None) -> Corpus:
    """Open the data that the configuration names, or else the data of ``saved``."""
    if saved is None:
        return open_corpus(config, out)
    corpus = open_prepared(config, saved.data) if config.data.takes_default_corpus else open_corpus(config, out)
    check_data(saved.checkpoint, saved.state, corpus.path, config.data.name)
    return corpus


def _batches(config: Config, corpus: Corpus, size: BatchSize, count: int, *, same_data: bool) -> Iterator[list[Any]]:
    """Yield the micro-batches of ``count`` batches. No sample comes twice."""
    copies = config.sdp.groups if same_data else 1
    rows = size.micro * config.sdp.groups // copies
    needed, there = count * size.accumulation * rows, len(corpus.train)  # type: ignore[arg-type]
    if needed > there:
        raise ConfigError(
            f"--batches {count}: independent batches need {needed:,} samples, and {corpus.path} has {there:,} to "
            "train on"
        )
    loader = iter(ResumableLoader(corpus.train, rows, seed=config.training.seed, collate_fn=corpus.collate))

    def for_all(leaf: Any) -> Any:
        return torch.cat([leaf] * copies) if isinstance(leaf, Tensor) and leaf.dim() else leaf

    for _ in range(count):
        yield [map_leaves(for_all, batch) for batch in islice(loader, size.accumulation)]
