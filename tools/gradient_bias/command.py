"""``sdp gradient-bias CONFIG``: how far SDP's gradient is from the dense model's in expectation, under either masking, at given weights.

All groups are workers of this process, and compute what ``engine/backends/reference/backend.py`` specifies, in float32. For each of N
batches there are three gradients on the same rows: of the configured placement under forward and under backward masking,
and of the dense model,
which every group holds whole. Nothing is trained. ``bias_estimate.py`` says how bias is told from sampling noise: under backward masking
holders read other rows than the dense mean does, so it differs from that on every batch, but not in expectation.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
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
from ..runs.plot import plot_bias
from ..runs.run_config import with_initial_model
from ..runs.saved_run import SavedRun, check_data, open_run
from .estimate import FEWEST, Bias, Differences, Products, apparent_by_batches, estimate

FORWARD, BACKWARD, DENSE = "forward", "backward", "dense"
OVERALL = "overall"
BATCHES = 16

# Rounding to half precision would be measured as a bias too; the rest is of several processes or of speed alone.
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
    """``biases`` and ``by_batches`` (apparent overall bias of means over so many batches) by masking; ``biases`` then by unit, the shared
    part and ``"overall"`` last. ``holders``: groups that hold a unit. ``samples``: of a batch, over all ranks.
    """

    batches: int
    samples: int
    same_data: bool
    weights: str
    holders: dict[str, int]
    biases: dict[str, dict[str, Bias]]
    by_batches: dict[str, list[tuple[int, float]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "config", metavar="CONFIG", type=Path, help="the JSON file whose model, placement and data are used"
    )
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="override a key of CONFIG; may be repeated",
    )
    parser.add_argument(
        "--checkpoint", metavar="RUN", type=Path, help="take weights and data of this run, or of one checkpoint of it"
    )
    parser.add_argument(
        "--batches", metavar="N", type=int, default=BATCHES, help=f"independent batches (default: {BATCHES})"
    )
    parser.add_argument(
        "--same-data", action="store_true", help="every group reads the same rows: what is left is masking's alone"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write every figure there")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where table, plot and, if none is named, data go "
                                                                "(default: runs/NAME-gradient-bias)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write table and plot. Raises an SDPError for what cannot be measured."""
    if args.batches < FEWEST:
        raise ConfigError(f"--batches {args.batches}: at least {FEWEST} are needed to tell bias from noise")
    config = with_initial_model(load_config(args.config, args.set))
    if config.sdp.groups == 1:
        raise ConfigError(
            "sdp.groups 1: the one group has the dense model's gradient; give several groups and a placement"
        )
    out = args.out or Path("runs") / f"{args.config.stem}-gradient-bias"
    for option, path in (("--out", out), ("--json", args.json and args.json.parent)):  # before anything is measured
        try:
            if path is not None:
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{option} {path}: cannot be made a folder ({error.strerror})") from None
    if args.json is not None and args.json.is_dir():
        raise ConfigError(f"--json {args.json}: is a folder; name a file")
    saved = open_run(args.checkpoint) if args.checkpoint is not None else None
    measured = measure(in_one_process(config), out, args.batches, same_data=args.same_data, saved=saved)
    text = table(measured)
    print(text)
    (out / "gradient_bias.md").write_text(text + "\n", encoding="utf-8")
    picture = plot_bias(measured.by_batches, *_points(measured), out / "gradient_bias.png")
    print(f"\ntable and plot: {out}/gradient_bias.md, {picture}")
    if args.json is not None:
        try:
            args.json.write_text(json.dumps(to_json(measured), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {args.json}: cannot be written ({error.strerror})") from None
    return 0


def in_one_process(config: Config) -> Config:
    """The run with all of its groups in this process, in float32."""
    engine = config.sdp.engine if config.sdp.in_one_process else "reference"
    return load_config(config.model_dump(mode="json"), [f"sdp.engine={engine}", *_IN_FLOAT32])


def measure(
    config: Config, out: Path, batches: int, *, same_data: bool = False, saved: SavedRun | None = None
) -> Measured:
    """The gradients of ``batches`` batches compared; weights of the seed, of ``training.init_from``, or of ``saved``.

    Raises ConfigError where the data has not as many samples, CheckpointError where the checkpoint is of another model or data.
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
    """Inner products of the differences from the dense gradient, by masking; then by unit, the shared part and ``"overall"`` last.

    ``model`` has values, and keeps them; ``batches``: the micro-batches of each, with the rows of all ranks in rank order.
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
    """cuDNN's, which take TF32 for float32 unless told; torch's matrix products do not."""
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
    """What CONFIG names; the data of ``saved`` where it names none."""
    if saved is None:
        return open_corpus(config, out)
    unnamed = config.data.path is None and config.data.name is None
    corpus = open_prepared(config, saved.data) if unnamed else open_corpus(config, out)
    check_data(saved.checkpoint, saved.state, corpus.path, config.data.name)
    return corpus


def _variants(layout: Layout) -> dict[str, Layout]:
    """The layout under either masking, and the dense model's, in which every group holds everything."""
    everything = replace(layout.placement, holders=(layout.everyone,) * len(layout.units), bound=0)
    whole = {name: replace(info, holders=layout.everyone) for name, info in layout.parameters.items()}
    buffers = {name: replace(info, holders=layout.everyone) for name, info in layout.buffers.items()}
    return {
        FORWARD: layout,
        BACKWARD: replace(layout, keeps_frozen=True, branch_scale="none"),
        DENSE: replace(layout, placement=everything, parameters=whole, buffers=buffers, branch_scale="none"),
    }


def _worker(config: Config, model: nn.Module, layout: Layout, device: torch.device) -> ReferenceBackend:
    """All workers of ``layout``, with weights of their own that equal the model's."""
    in_one_pass = config.sdp.engine == "vectorized" and not layout.keeps_frozen
    return (VectorizedBackend if in_one_pass else ReferenceBackend)(copy.deepcopy(model), layout, device)


def _batches(
    config: Config, corpus: Corpus, size: BatchSize, mesh: Mesh, count: int, *, same_data: bool
) -> Iterator[list[Any]]:
    """The micro-batches of ``count`` steps, of all ranks in rank order, no sample twice; raises ConfigError where there are too few."""
    copies = mesh.data_ranks if same_data else 1
    rows = size.micro * mesh.data_ranks // copies
    needed, there = count * size.accumulation * rows, len(corpus.train)  # type: ignore[arg-type]
    if needed > there:
        raise ConfigError(
            f"--batches {count}: independent batches need {needed:,} samples, and {corpus.path} has {there:,} to train on"
        )
    loader = iter(ResumableLoader(corpus.train, rows, seed=config.training.seed, collate_fn=corpus.collate))

    def for_all(leaf: Any) -> Any:
        return torch.cat([leaf] * copies) if isinstance(leaf, Tensor) and leaf.dim() else leaf

    for _ in range(count):
        yield [map_leaves(for_all, batch) for batch in islice(loader, size.accumulation)]


def gradient(worker: ReferenceBackend, micro_batches: Sequence[Any]) -> dict[str, Tensor]:
    """g_u of one step's data, by parameter, on the CPU; zeros where nothing came."""
    worker.zero_grad()
    for number, batch in enumerate(micro_batches, 1):
        loss = loss_of(worker.forward(call_model, to_device(batch, worker.device)))
        worker.backward(loss / len(micro_batches), boundary=number == len(micro_batches))
    trained = (name for name, info in worker.layout.parameters.items() if info.trainable)
    gradients = {name: worker.parameters[name].grad for name in trained}
    worker.zero_grad()
    return {name: found.cpu() for name, found in gradients.items() if found is not None}


def to_json(measured: Measured) -> dict[str, Any]:
    """Every figure; relative to the dense mean's norm, see :class:`~sdp.tools.gradient_bias.estimate.Bias`."""
    biases = {
        name: {unit: asdict(bias) | {"shown": bias.shown} for unit, bias in of_units.items()}
        for name, of_units in measured.biases.items()
    }
    return asdict(measured) | {"biases": biases}


def table(measured: Measured) -> str:
    """Markdown: a row for each unit, the shared part and the whole; and in words what it shows."""
    what = "the same rows for every rank" if measured.same_data else "rows of its own for every rank"
    lines = [
        f"bias of the gradient against the dense model's: {measured.batches} batches of {measured.samples} samples, {what}; "
        f"weights: {measured.weights}",
        "",
        "| unit | holders |" + "".join(f" {name}: apparent | noise | bias | cosine |" for name in measured.biases),
        "|---" * (2 + 4 * len(measured.biases)) + "|",
    ]
    for unit in (*measured.holders, OVERALL):
        cells = [cell for of_units in measured.biases.values() for cell in _cells(of_units[unit])]
        lines.append(f"| {unit} | {measured.holders.get(unit, '')} | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"{name}: {_verdict(of_units[OVERALL])}" for name, of_units in measured.biases.items()]
    return "\n".join(lines)


def _cells(bias: Bias) -> Iterator[str]:
    for value in (bias.apparent, bias.floor):
        yield "–" if value is None else f"{value:.4f}"
    error = f" ± {bias.error:.4f}" if bias.error and not bias.rounding else ""
    yield "–" if bias.bias is None else f"{bias.bias:.4f}{error}" if bias.shown or bias.rounding else "not shown"
    yield "–" if bias.cosine is None else f"{bias.cosine:.4f}"


def _verdict(bias: Bias) -> str:
    if bias.apparent is None:
        return "the dense gradient is zero"
    if bias.apparent == 0:
        return "exactly the dense gradient on every batch"
    if bias.rounding:
        return f"the dense gradient on every batch, but for rounding ({bias.apparent:.1e} of its norm)"
    if bias.shown:
        return f"biased by {bias.bias:.4f} of the dense gradient's norm ({bias.z:.1f} standard errors of its square)"
    return f"no bias shown: the apparent {bias.apparent:.4f} is what noise makes ({bias.floor:.4f} expected; {bias.z:+.1f} standard errors)"


def _points(measured: Measured) -> tuple[dict[str, tuple[float, float]], dict[str, list[tuple[float, float]]]]:
    """For the plot: by masking the estimated overall bias and floor, and bias and standard error of every unit in order."""
    overall = {
        name: (of_units[OVERALL].bias or 0.0, of_units[OVERALL].floor or 0.0)
        for name, of_units in measured.biases.items()
    }
    units = [unit for unit in measured.holders if unit != SHARED]
    by_unit = {
        name: [(of_units[unit].bias or 0.0, of_units[unit].error or 0.0) for unit in units]
        for name, of_units in measured.biases.items()
    }
    return overall, by_unit
