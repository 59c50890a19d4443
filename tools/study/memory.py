"""``sdp study memory OUT``: planned and measured bytes per rank, by kind, of every variant.

There are 4 groups of one rank. A row is the share of the group that holds the most. The other ranks
do not exist (torch's fake process group: collectives return at once).

- *Planned*: traced on fake tensors, as ``sdp plan`` does.
- *Measured*: the engine with real tensors on a CPU. State is counted in the tensors that exist
  after a step. Activations are watched in a second step. ``memory_probe.py``, which shares no code
  with the plan, finds the peak of all live tensors in a third step.

Every row has its own process. Finished rows are kept in OUT and not repeated, so a study can be
stopped and continued.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...engine.accounting.memory_probe import peak_tensor_bytes
from ...engine.config.load import load_config
from ...engine.distributed.fake_world import fake_world
from ...engine.distributed.mesh import mesh_of
from ...engine.distributed.tensors import local_tensor
from ...engine.engine import SDPEngine
from ...engine.errors import ConfigError, NonFiniteError, PlacementError, SDPError
from ...engine.initialize import initialize
from ...engine.json_files import read_json_file
from ...engine.placement.layout import Layout
from ...engine.tracing.ledger import ACTIVATIONS
from ...engine.tracing.step import trace_step, watched_step
from ...models.registry import build_model
from ..shared.files import make_folder, write_own
from ..shared.variants import Variant, variants

GROUPS = 4
CAPACITIES = (0.25, 0.5, 0.75, 1.0)
GRANULARITIES, MASKINGS = ("block", "neuron"), ("forward", "backward")
TOLERANCE = 0.03
COLUMNS = ("parameters", "gradients", "optimizer", "frozen", "activations", "peak")
_LLAMA_134M = {
    "name": "llama", "vocab_size": 32000, "hidden_size": 640, "intermediate_size": 2176, "num_hidden_layers": 16,
    "num_attention_heads": 10, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A model and its micro-batch: ``samples`` of ``size`` tokens, or images of ``size`` pixels a
    side.
    """

    model: Mapping[str, Any]
    samples: int
    size: int
    neuron_groups: int

    def batch(self, samples: int) -> dict[str, torch.Tensor]:
        if self.model["name"] == "llama":
            ids = torch.randint(self.model["vocab_size"], (samples, self.size))
            return {"input_ids": ids, "labels": ids}
        labels = torch.randint(self.model["num_classes"], (samples,))
        return {"images": torch.rand(samples, 3, self.size, self.size), "labels": labels}


TASKS = {
    "resnet18": Task({"name": "resnet18", "stem": "imagenet", "num_classes": 1000, "image_size": 224}, 4, 224, 4),
    "swin_t": Task({"name": "swin_t", "num_classes": 1000, "image_size": 224}, 2, 224, 3),
    "llama_134m": Task(_LLAMA_134M, 1, 256, 5),
}


def config_of(task: Task, variant: Variant, placement: str) -> dict[str, Any]:
    """Write the configuration: bfloat16, AdamW, and whole master weights on every rank."""
    section: dict[str, Any] = {
        "groups": GROUPS,
        "capacity": variant.capacity,
        "profile": "uniform",
        "placement": placement,
    }
    if variant.granularity:
        section |= {"granularity": variant.granularity, "masking": variant.masking}
    if variant.granularity == "neuron":
        section["neuron_groups"] = task.neuron_groups
    return {
        "train_micro_batch_size_per_gpu": task.samples,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 0},
        "sdp": section,
        "model": dict(task.model),
        "data": {"sequence_length": task.size} if task.model["name"] == "llama" else {"name": "digits"},
    }


def measure(task: Task, variant: Variant) -> dict[str, Any]:
    """Make a row: its ``placement``, and the bytes ``planned`` and ``measured``.

    If the engine refuses the variant, the row has only the ``error``.
    """
    try:
        config, layout = _placed(task, variant)
    except SDPError as error:
        return {"error": str(error)}
    group = max(range(GROUPS), key=lambda group: sum(info.numel for info in layout.held(group)))
    plan = trace_step(partial(build_model, config["model"]), load_config(config), layout, task.batch, group)
    planned = plan.state.to_json() | {"activations": plan.activations, "peak": plan.peak}
    with fake_world(layout.mesh.rank(group), layout.mesh.world_size):
        measured = _measured(task, config)
    return {"placement": config["sdp"]["placement"], "rank": plan.rank, "planned": planned, "measured": measured}


def _placed(task: Task, variant: Variant) -> tuple[dict[str, Any], Layout]:
    """Place the units in a balanced way if they allow that, else cyclically."""

    def placed(placement: str) -> tuple[dict[str, Any], Layout]:
        config = config_of(task, variant, placement)
        settings = load_config(config)
        with torch.device("meta"):
            model = build_model(config["model"])
        return config, Layout.of(model, settings, mesh_of(settings, GROUPS))

    try:
        return placed("balanced")
    except PlacementError:
        return placed("cyclic")


def _measured(task: Task, config: dict[str, Any]) -> dict[str, int]:
    engine, optimizer, *_ = initialize(model=build_model(config["model"]), config=config)

    def step() -> None:
        fill_frozen(engine)
        engine.backward(engine(task.batch(task.samples)))
        engine.step()

    step()  # afterwards the optimizer's state exists
    state = engine.measured_state_bytes().to_json()
    peak = peak_tensor_bytes(step, engine.module, optimizer, engine.device)
    fill_frozen(engine)
    ledger = watched_step(engine, (), set(), task.batch)
    if engine.skipped_steps:
        raise NonFiniteError(
            "a row's step was skipped, because its gradient was NaN or infinite; what an update needs was not measured"
        )
    return state | {"activations": max(window.most[ACTIVATIONS] for window in ledger.windows.values()), "peak": peak}


@torch.no_grad()
def fill_frozen(engine: SDPEngine) -> None:
    """Frozen copies come from holders, which do not exist here: any numbers will do in the place of
    uninitialised memory.
    """
    for copy in engine.frozen_here.values():
        local_tensor(copy.detach()).fill_(0.01)


# -- the table -------------------------------------------------------------------------------------


def deviation(row: Mapping[str, Any], column: str) -> float:
    """Return how far the measurement is from the plan, as a fraction of the plan.

    It is infinite if nothing was planned.
    """
    planned, measured = row["planned"][column], row["measured"][column]
    if planned == 0:
        return 0.0 if measured == 0 else float("inf")
    return measured / planned - 1


def report(rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> tuple[str, bool]:
    """Return the rows as Markdown, and whether every measurement is within 3 % of its plan."""
    text, largest, where, refused = [], 0.0, "", 0
    for model, found in rows.items():
        lines = [f"| C, variant | placement | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
        for name, row in found.items():
            if "error" in row:
                refused += 1
                lines.append(f"| {name} | {row['error'].replace('|', '/')} |{' |' * len(COLUMNS)}")
                continue
            lines.append(f"| {name} | {row['placement']} | {' | '.join(_cell(row, column) for column in COLUMNS)} |")
            for column in COLUMNS:
                if abs(deviation(row, column)) >= abs(largest):
                    largest, where = deviation(row, column), f"{column} of {model}, {name}"
        text.append(f"{model}: MB planned / measured (measured over planned)\n\n" + "\n".join(lines))
    measured = sum(map(len, rows.values())) - refused
    if measured == 0:
        return "\n\n".join([*text, "Nothing was measured."]), False
    within = abs(largest) <= TOLERANCE
    verdict = f"within {TOLERANCE:.0%}" if within else f"NOT within {TOLERANCE:.0%}"
    line = f"{measured} rows measured, {refused} without figures; largest deviation {largest:+.2%} ({where}): {verdict}"
    return "\n\n".join([*text, line]), within


def _cell(row: Mapping[str, Any], column: str) -> str:
    planned, measured = row["planned"][column], row["measured"][column]
    if planned == measured == 0:
        return "–"
    return f"{planned / 1e6:,.2f} / {measured / 1e6:,.2f} ({1 + deviation(row, column):.3f})"


def _isolated(task: Task, variant: Variant) -> dict[str, Any]:
    """Make a row in its own process, so that its memory is free afterwards."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure, task, variant).result()
        except BrokenProcessPool:
            return {
                "error": "its process was killed, most likely because memory ran out; run the command again",
                "unfinished": True,
            }


def _saved(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        rows = read_json_file(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: not the JSON of an earlier table ({error}); remove it or name another directory"
        ) from None
    if not isinstance(rows, dict) or not all(_is_table(found) for found in rows.values()):
        raise ConfigError(f"{path}: not the JSON of an earlier table; remove it or name another directory")
    return rows


def _is_table(found: Any) -> bool:
    """Whether a value of an earlier file has rows that :func:`measure` makes."""
    if not isinstance(found, dict) or not all(isinstance(row, dict) for row in found.values()):
        return False
    rows = [row for row in found.values() if "error" not in row]
    sizes = [row.get(kind) for row in rows for kind in ("planned", "measured")]
    return (
        all(isinstance(size, dict) and all(type(size.get(column)) is int for column in COLUMNS) for size in sizes)
        and all(isinstance(row.get("placement"), str) for row in rows)
        and all(isinstance(row["error"], str) for row in found.values() if "error" in row)
    )


@dataclass(frozen=True)
class MemoryOptions:
    """Which rows are measured, and the folder that keeps them."""

    out: Path
    models: tuple[str, ...]
    variants: tuple[Variant, ...]

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> MemoryOptions:
        wanted = variants(args.capacity, args.granularity, args.masking)
        return cls(args.out, tuple(args.model), tuple(wanted))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of memory.json and memory.md")
    parser.add_argument("--model", nargs="+", choices=list(TASKS), default=list(TASKS), help="models (default: all)")
    parser.add_argument(
        "--capacity", nargs="+", type=float, choices=CAPACITIES, default=list(CAPACITIES), help="of SDP (default: all)"
    )
    parser.add_argument(
        "--granularity",
        nargs="+",
        choices=GRANULARITIES,
        default=list(GRANULARITIES),
        help="what a group holds parts of (default: both)",
    )
    parser.add_argument("--masking", nargs="+", choices=MASKINGS, default=list(MASKINGS), help="of SDP (default: both)")


def run(args: argparse.Namespace) -> int:
    """Measure the rows that are missing, and print the table.

    Exit code 1: not within 3 % of the plan.
    """
    options = MemoryOptions.from_args(args)
    if torch.cuda.is_available():
        raise ConfigError(
            "rows are measured on a CPU, but the engine uses the GPU if there is one; hide it with "
            "CUDA_VISIBLE_DEVICES="
        )
    make_folder(options.out)
    path = options.out / "memory.json"
    rows = _saved(path)
    for model, variant in itertools.product(options.models, options.variants):
        found = rows.setdefault(model, {})
        if variant.name not in found or "unfinished" in found[variant.name]:
            found[variant.name] = _isolated(TASKS[model], variant)
            write_own(path, json.dumps(rows, indent=1) + "\n")
        row = found[variant.name]
        print(f"{model} {variant.name}: {row.get('error') or row['placement']}", file=sys.stderr, flush=True)
    text, within = report(
        {model: {variant.name: rows[model][variant.name] for variant in options.variants} for model in options.models}
    )
    write_own(options.out / "memory.md", text + "\n")
    print(text)
    return 0 if within else 1
