"""Gradients under both maskings and of the dense model, on the same batches, at given weights.

All groups are workers of this process. They compute what ``engine/backends/reference/backend.py``
specifies, in float32. Nothing is trained. Under backward masking, holders read other rows than the
dense mean does. So the gradients differ on every batch, but not in expectation; ``estimate.py``
says how bias is told from sampling noise.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.backends.reference.backend import ReferenceBackend
from ...engine.backends.reference.vectorized import VectorizedBackend
from ...engine.batch.call import call_model, loss_of, map_leaves, to_device
from ...engine.batch.loader import ResumableLoader
from ...engine.batch.size import BatchSize
from ...engine.checkpoint.load import load
from ...engine.checkpoint.state import weights_of
from ...engine.config.load import load_config
from ...engine.config.schema import Config
from ...engine.construct import values_to_give
from ...engine.distributed.mesh import Mesh, mesh_of
from ...engine.errors import ConfigError
from ...engine.placement.layout import Layout
from ...engine.placement.tensor_info import Shard
from ...engine.placement.units import SHARED
from ...engine.subnetwork.materialise import give_values
from ...models.registry import build_model
from ..runs.dataset import Corpus, open_corpus, open_prepared
from ..runs.saved_run import SavedRun, check_data
from .estimate import Bias, Differences, Products, apparent_by_batches, estimate

FORWARD, BACKWARD, DENSE = "forward", "backward", "dense"
OVERALL = "overall"

# Half precision would be measured as a bias. The other keys concern only speed or several
# processes.
_IN_FLOAT32 = (
    "bf16.enabled=false",
    "fp16.enabled=false",
    "tensor_parallel.autotp_size=1",
    "training.compile=false",
    "activation_checkpointing.mode=none",
    "sdp.masking=forward",
)


@dataclass(frozen=True)
class Measured:
    """The figures of one measurement.

    Attributes:
        batches: Number of batches.
        samples: Samples of one batch, over all ranks.
        same_data: Whether every group read the same rows.
        weights: Where the weights come from.
        holders: Number of groups that hold a unit, by unit.
        biases: By masking, then by unit, then for the shared part and ``"overall"``.
        by_batches: By masking, the apparent overall bias of a mean over so many batches.
    """

    batches: int
    samples: int
    same_data: bool
    weights: str
    holders: dict[str, int]
    biases: dict[str, dict[str, Bias]]
    by_batches: dict[str, list[tuple[int, float]]]


def in_one_process(config: Config) -> Config:
    """Return the configuration with all groups in this process, in float32."""
    engine = config.sdp.engine if config.sdp.in_one_process else "reference"
    return load_config(config.model_dump(mode="json"), [f"sdp.engine={engine}", *_IN_FLOAT32])


def measure(
    config: Config, out: Path, batches: int, *, same_data: bool = False, saved: SavedRun | None = None
) -> Measured:
    """Compare the gradients of independent batches.

    Args:
        config: A configuration from :func:`in_one_process`.
        out: Where data is prepared if the configuration names none.
        batches: Number of batches.
        same_data: Every group reads the same rows.
        saved: The run whose weights are used. None: ``training.init_from``, or the seed's weights.

    Raises:
        ConfigError: The data has too few samples.
        CheckpointError: The checkpoint belongs to another model or to other data.
    """
    mesh = mesh_of(config, 1)
    corpus = _corpus(config, out, saved)
    model = build_model(config.model, **corpus.facts)
    layout = Layout.of(model, config, mesh)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    give_values(model, layout, values_to_give(model, config, layout), device, Shard())
    if saved is not None:
        buffers = {name: buffer for name, buffer in model.named_buffers() if name in layout.buffers}
        tensors = weights_of({**dict(model.named_parameters()), **buffers})
        load(saved.checkpoint, tensors, saved.state["files"], alone=True)
    size = BatchSize.resolve(config, mesh)
    products = compare(config, model, layout, _batches(config, corpus, size, mesh, batches, same_data=same_data))
    return Measured(
        batches,
        size.train,
        same_data,
        f"step {saved.step} of {saved.dump_dir}" if saved is not None else _start(config),
        {unit.name: len(held) for unit, held in zip(layout.units, layout.placement.holders, strict=True)}
        | {SHARED: mesh.sdp},
        {name: {unit: estimate(one) for unit, one in of_units.items()} for name, of_units in products.items()},
        {name: apparent_by_batches(of_units[OVERALL]) for name, of_units in products.items()},
    )


def compare(
    config: Config, model: nn.Module, layout: Layout, batches: Iterable[Sequence[Any]]
) -> dict[str, dict[str, Products]]:
    """Compare both maskings with the dense gradient, on the same batches.

    Args:
        config: A configuration from :func:`in_one_process`.
        model: The model with its weights. They stay unchanged.
        layout: The layout of the configured placement.
        batches: The micro-batches of each batch, with the rows of all ranks in rank order.

    Returns:
        Inner products of the differences from the dense gradient: by masking, then by unit, then
        for the shared part and ``"overall"``.
    """
    device = next(model.parameters()).device
    workers = {name: _worker(config, model, variant, device) for name, variant in _variants(layout).items()}
    dense = workers.pop(DENSE)
    differences = Differences(layout)
    with _float32_convolutions():
        for rows in batches:
            differences.add(gradient(dense, rows), {name: gradient(worker, rows) for name, worker in workers.items()})
    found = {name: differences.products(name) for name in workers}
    return {name: {**products, OVERALL: reduce(add, products.values())} for name, products in found.items()}


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


def _start(config: Config) -> str:
    return (
        f"those in {config.training.init_from}"
        if config.training.init_from is not None
        else f"initial, seed {config.training.seed}"
    )


def _corpus(config: Config, out: Path, saved: SavedRun | None) -> Corpus:
    """Open the data that CONFIG names, or else the data of ``saved``."""
    if saved is None:
        return open_corpus(config, out)
    corpus = open_prepared(config, saved.data) if config.data.takes_default_corpus else open_corpus(config, out)
    check_data(saved.checkpoint, saved.state, corpus.path, config.data.name)
    return corpus


def _variants(layout: Layout) -> dict[str, Layout]:
    """Return the layout under each masking, and the dense one, in which every group holds
    everything.
    """
    everything = replace(layout.placement, holders=(layout.everyone,) * len(layout.units), bound=0)
    whole = {name: replace(info, holders=layout.everyone) for name, info in layout.parameters.items()}
    buffers = {name: replace(info, holders=layout.everyone) for name, info in layout.buffers.items()}
    return {
        FORWARD: layout,
        BACKWARD: replace(layout, keeps_frozen=True, branch_scale="none"),
        DENSE: replace(layout, placement=everything, parameters=whole, buffers=buffers, branch_scale="none"),
    }


def _worker(config: Config, model: nn.Module, layout: Layout, device: torch.device) -> ReferenceBackend:
    """Make the workers of ``layout`` with a copy of the model's weights."""
    in_one_pass = config.sdp.engine == "vectorized" and not layout.keeps_frozen
    return (VectorizedBackend if in_one_pass else ReferenceBackend)(copy.deepcopy(model), layout, device)


def _batches(
    config: Config, corpus: Corpus, size: BatchSize, mesh: Mesh, count: int, *, same_data: bool
) -> Iterator[list[Any]]:
    """Yield the micro-batches of ``count`` steps, with the rows of all ranks in rank order.

    No sample comes twice. Raises :class:`ConfigError` if there are too few samples.
    """
    copies = mesh.data_ranks if same_data else 1
    rows = size.micro * mesh.data_ranks // copies
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


def gradient(worker: ReferenceBackend, micro_batches: Sequence[Any]) -> dict[str, Tensor]:
    """Return the gradient of one step by parameter, on the CPU.

    It is zero where nothing arrived.
    """
    worker.zero_grad()
    for number, batch in enumerate(micro_batches, 1):
        loss = loss_of(worker.forward(call_model, to_device(batch, worker.device)))
        worker.backward(loss / len(micro_batches), boundary=number == len(micro_batches))
    trained = (name for name, info in worker.layout.parameters.items() if info.trainable)
    gradients = {name: worker.parameters[name].grad for name in trained}
    worker.zero_grad()
    return {name: found.cpu() for name, found in gradients.items() if found is not None}
