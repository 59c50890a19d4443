"""``python -m lab.memory OUT``: planned and measured bytes per rank, by kind, of every variant.

There are 4 groups of one rank. A row is the share of the group that holds the most. The other ranks
do not exist (torch's fake process group: collectives return at once).

- *Planned*: traced on fake tensors, as ``sdp plan`` does.
- *Measured*: the engine with real tensors on a CPU. State is counted in the tensors that exist
  after a step. Activations are watched in a second step. ``memory_probe.py``, which shares no code
  with the plan, finds the peak of all live tensors in a third step.

Every row has a process. Rows in OUT/results.json are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sdp.engine.accounting.memory_probe import peak_tensor_bytes
from sdp.engine.config.load import load_config
from sdp.engine.distributed.collectives import local_tensor
from sdp.engine.distributed.fake_world import fake_world
from sdp.engine.distributed.mesh import mesh_of
from sdp.engine.engine import SDPEngine
from sdp.engine.errors import NonFiniteError, PlacementError
from sdp.engine.initialize import initialize
from sdp.engine.placement.layout import Layout
from sdp.engine.tracing.ledger import ACTIVATIONS
from sdp.engine.tracing.step import trace_step, watched_step
from sdp.models.registry import build_model

GROUPS = 4
# The granularity is "" for the dense model.
VARIANTS = [*itertools.product((0.25, 0.5, 0.75), ("block", "neuron"), ("forward", "backward")), (1.0, "", "")]
TOLERANCE = 0.03
KINDS = ("parameters", "gradients", "optimizer", "frozen", "activations", "peak")
_LLAMA_134M = {
    "name": "llama", "vocab_size": 32000, "hidden_size": 640, "intermediate_size": 2176, "num_hidden_layers": 16,
    "num_attention_heads": 10, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A model to measure, and its micro-batch of ``samples`` samples.

    ``size`` is the number of tokens in a sample, or of pixels per side of an image.
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

    def config(self, capacity: float, granularity: str, masking: str, placement: str) -> dict[str, Any]:
        """Return a configuration in bfloat16 with AdamW, and whole master weights on every rank."""
        section = {"groups": GROUPS, "capacity": capacity, "profile": "uniform", "placement": placement}
        if granularity:
            section |= {"granularity": granularity, "masking": masking, "neuron_groups": self.neuron_groups}
        return {
            "train_micro_batch_size_per_gpu": self.samples,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "bf16": {"enabled": True},
            "sdp": section,
            "model": dict(self.model),
            "data": {"sequence_length": self.size} if self.model["name"] == "llama" else {"name": "digits"},
        }


TASKS = {
    "resnet18": Task({"name": "resnet18", "stem": "imagenet", "num_classes": 1000, "image_size": 224}, 4, 224, 4),
    "swin_t": Task({"name": "swin_t", "num_classes": 1000, "image_size": 224}, 2, 224, 3),
    "llama_134m": Task(_LLAMA_134M, 1, 256, 5),
}


def measure(task: Task, capacity: float, granularity: str, masking: str) -> dict[str, Any]:
    """Return a row of the table: for each kind of memory, the planned and the measured bytes."""
    config, layout = _placed(task, capacity, granularity, masking)
    group = max(range(GROUPS), key=lambda group: sum(info.numel for info in layout.held(group)))
    plan = trace_step(partial(build_model, config["model"]), load_config(config), layout, task.batch, group)
    planned = plan.state.to_json() | {"activations": plan.activations, "peak": plan.peak}
    with fake_world(layout.mesh.rank(group), layout.mesh.world_size):
        found = measured(task, config)
    row = {"capacity": capacity, "variant": f"{granularity} {masking}" if granularity else "dense"}
    return {**row, "placement": config["sdp"]["placement"], **{kind: [planned[kind], found[kind]] for kind in KINDS}}


def _placed(task: Task, *variant: Any) -> tuple[dict[str, Any], Layout]:

    def placed(placement: str) -> tuple[dict[str, Any], Layout]:
        config = task.config(*variant, placement)
        settings = load_config(config)
        with torch.device("meta"):
            model = build_model(config["model"])
        return config, Layout.of(model, settings, mesh_of(settings, GROUPS))

    try:
        return placed("balanced")
    except PlacementError:
        return placed("cyclic")


def measured(task: Task, config: dict[str, Any]) -> dict[str, int]:
    """Return this rank's bytes in its second step, by kind, with real tensors on a CPU."""
    engine, optimizer, *_ = initialize(model=build_model(config["model"]), config=config)

    def step() -> None:
        _fill_frozen(engine)
        engine.backward(engine(task.batch(task.samples)))
        engine.step()

    step()  # afterwards the optimizer's state exists
    state = engine.measured_state_bytes().to_json()
    peak = peak_tensor_bytes(step, engine.module, optimizer, engine.device)
    _fill_frozen(engine)
    ledger, _ = watched_step(engine, (), set(), task.batch)
    if engine.skipped_steps:
        raise NonFiniteError("a row's step was skipped, so what an update needs was not measured")
    return state | {"activations": max(window.most[ACTIVATIONS] for window in ledger.windows.values()), "peak": peak}


@torch.no_grad()
def _fill_frozen(engine: SDPEngine) -> None:
    """Frozen copies come from holders, which do not exist here: any numbers will do in the place of
    uninitialised memory.
    """
    for copy in engine.frozen_here.values():
        local_tensor(copy.detach()).fill_(0.01)


def report(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[str, bool]:
    """Return the rows as Markdown, and whether every measurement is within 3 % of its plan."""
    texts, deviations = [], []
    for model, found in rows.items():
        lines = [f"| C | variant | placement | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 3) + "|"]
        for row in found:
            pairs = [row[kind] for kind in KINDS]
            cells = [" / ".join(f"{size / 1e6:,.2f}" for size in pair) if any(pair) else "–" for pair in pairs]
            lines.append(f"| {row['capacity']} | {row['variant']} | {row['placement']} | {' | '.join(cells)} |")
            name = f"{model}, {row['capacity']} {row['variant']}"
            deviations += [(_deviation(*row[kind]), f"{kind} of {name}") for kind in KINDS]
        texts.append(f"{model}: MB planned / measured\n\n" + "\n".join(lines))
    largest, where = max(deviations, key=lambda one: abs(one[0]))
    is_within = abs(largest) <= TOLERANCE
    verdict = f"{'within' if is_within else 'NOT within'} {TOLERANCE:.0%}"
    texts.append(f"largest deviation {largest:+.2%} ({where}): {verdict}")
    return "\n\n".join(texts), is_within


def _deviation(planned: int, measured: int) -> float:
    return measured / planned - 1 if planned else float(measured > 0)


def main() -> int:
    """Measure missing rows, and print the table. Exit code 1: a row differs by more than 3 %."""
    parser = argparse.ArgumentParser(prog="python -m lab.memory", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of results.json and results.md")
    args = parser.parse_args()
    if torch.cuda.is_available():
        print("lab.memory: error: rows are measured on a CPU; hide the GPU with CUDA_VISIBLE_DEVICES=", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "results.json"
    rows: dict[str, list[dict[str, Any]]] = json.loads(path.read_text()) if path.exists() else {}
    for model, variant in itertools.product(TASKS, VARIANTS):
        found = rows.setdefault(model, [])
        if len(found) <= VARIANTS.index(variant):  # in a process, so that its memory is free afterwards
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                found.append(pool.submit(measure, TASKS[model], *variant).result())
            path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            print(model, *variant, file=sys.stderr, flush=True)
    text, is_within = report(rows)
    (args.out / "results.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
