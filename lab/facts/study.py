"""``python -m lab.facts OUT``: learn facts by heart, with SDP and dense models of equal memory.

For each capacity, there are dense models of equal state, and of equal peak.

All 16 groups compute in one process (lab.simulator), with 64 facts each in a step. Learning rates
are chosen on seed 0, with facts of one bit for each parameter. If the best rate is at the edge of
the grid of rates, the grid is widened. Then every row trains with three seeds at every number of
facts. Bytes are counted in the tensors of a rank of the engine. The peak is measured in a step.

Runs in OUT/results.json are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from sdp.engine.accounting.memory_probe import peak_tensor_bytes
from sdp.engine.config.load import load_config
from sdp.engine.distributed.collectives import local_tensor
from sdp.engine.distributed.fake_world import fake_world
from sdp.engine.distributed.mesh import mesh_of
from sdp.engine.initialize import initialize
from sdp.engine.optim.clip import clip_, squared_norm
from sdp.engine.optim.small_state import SmallStateAdam
from sdp.engine.placement.layout import Layout
from sdp.engine.subnetwork.copies import dequantise, quantise

from ..simulator.workers import Workers
from .model import Answers, Shape, facts_at, make_facts

GROUPS, ROWS, STEPS = 16, 64, 1000
CAPACITIES = (0.25, 0.125, 0.5)
BITS = (1.0, 2.0, 4.0, 0.5)  # in the order in which they are trained
RATES = (0.004, 0.008, 0.016)
SEEDS = (0, 1, 2)
LONGER = " longer"  # ends the name of a row with the operations of SDP
TUNED_AT = 1.0  # bits for each parameter of the full model
PARAMETERS = sum(parameter.numel() for parameter in Answers(Shape()).parameters())


@dataclass(frozen=True)
class Row:
    """A row of the table: a model, and how it is trained.

    Attributes:
        name: Its name in the results.
        shape: The shape of the full model, or of the dense model if ``capacity`` is 1.
        capacity: The capacity C of SDP; 1 for a dense model.
        steps: The number of steps.
        state_dtype: The type in which the optimizer keeps its moments.
    """

    name: str
    shape: Shape
    capacity: float = 1.0
    steps: int = STEPS
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"

    def config(self) -> dict[str, Any]:
        """Return the engine's configuration: for SDP, with backward masking and int8 copies."""
        section = {"groups": GROUPS, "capacity": self.capacity, "profile": "uniform"}
        if self.capacity < 1:
            section |= {"masking": "backward", "copies": {"dtype": "int8"}}
        params = {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.0, "state_dtype": self.state_dtype}
        optimizer = {"type": "AdamW", "params": params}
        return {"train_micro_batch_size_per_gpu": ROWS, "optimizer": optimizer, "sdp": section}

    def layout(self) -> Layout:
        settings = load_config(self.config())
        return Layout.of(Answers(self.shape), settings, mesh_of(settings, GROUPS))


def int8_copy(weight: torch.Tensor) -> torch.Tensor:
    """Return the frozen copy that other groups would have of a weight. Vectors stay exact."""
    if weight.dim() < 2:
        return weight
    return dequantise(*quantise(weight, "int8"), weight.shape[1:], "int8", weight.dtype)


def make_optimizer(row: Row, model: Answers, rate: float) -> torch.optim.Optimizer:
    betas = (0.9, 0.95)
    if row.state_dtype == "float32":
        return torch.optim.AdamW(model.parameters(), lr=rate, betas=betas, weight_decay=0.0, foreach=True)
    return SmallStateAdam(
        model.parameters(), row.state_dtype, lr=rate, betas=betas, eps=1e-8, weight_decay=0.0, decoupled=True
    )


def train(row: Row, bits: float, rate: float, seed: int) -> dict[str, float]:
    """Train, and return the loss of the full model on all facts, and the seconds that it took."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    started, model, layout = time.perf_counter(), Answers(row.shape), row.layout()
    workers = Workers(model, layout)
    workers.rows.copy = int8_copy
    questions, answers = make_facts(facts_at(bits, PARAMETERS))
    optimizer = make_optimizer(row, model, rate)
    order, batch = torch.Generator().manual_seed(50 + seed), GROUPS * ROWS
    numbers = torch.empty(0, dtype=torch.long)
    for step in range(row.steps):
        while len(numbers) < batch:
            numbers = torch.cat((numbers, torch.randperm(len(answers), generator=order)))
        mine, numbers = numbers[:batch], numbers[batch:]
        for group in optimizer.param_groups:  # a warm-up, and a linear decay in the second half
            group["lr"] = rate * min(1, (step + 1) / 50, (row.steps - step) / (row.steps / 2))
        workers.gradients([{"questions": questions[mine], "answers": answers[mine]}], "backward")
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        clip_(gradients, math.sqrt(squared_norm(gradients, torch.device("cpu")).item()), 1.0)
        optimizer.step()
    with torch.no_grad():
        loss = model(questions, answers).item()
    return {"loss": loss, "seconds": time.perf_counter() - started}


def measure(row: Row) -> dict[str, float]:
    """Count bytes of the rank that holds most: its state after a step, and a step's peak."""
    layout = row.layout()
    group = max(range(GROUPS), key=lambda group: sum(info.numel for info in layout.held(group)))
    with fake_world(group, GROUPS):
        engine, optimizer, *_ = initialize(model=Answers(row.shape), config=row.config())
        questions, answers = make_facts(ROWS)

        @torch.no_grad()
        def fill_copies() -> None:  # the holders, whose weights they have, do not exist here
            for copy in engine.frozen_here.values():
                local_tensor(copy.detach()).fill_(1)

        def step() -> None:
            fill_copies()
            engine.backward(engine(questions, answers))
            engine.step()

        step()
        return {
            "state": engine.measured_state_bytes().total,
            "peak": peak_tensor_bytes(step, engine.module, optimizer, engine.device),
        }


def in_a_process(function: Any, *args: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


class Results:
    """The results of all finished runs, and measured bytes, in one file."""

    def __init__(self, path: Path):
        self._path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"bytes": {}, "runs": {}}

    def _keep(self, kind: str, key: str, value: Any) -> Any:
        self.found[kind][key] = value
        self._path.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        print(key, value, file=sys.stderr, flush=True)
        return value

    def bytes_of(self, row: Row) -> dict[str, float]:
        key = f"{row.name} {row.shape.blocks}x{row.shape.neurons}"
        return self.found["bytes"].get(key) or self._keep("bytes", key, in_a_process(measure, row))

    def loss(self, row: Row, bits: float, rate: float, seed: int) -> float:
        key = f"{row.name} bits={bits} rate={rate} seed={seed}"
        found = self.found["runs"].get(key) or self._keep("runs", key, train(row, bits, rate, seed))
        return found["loss"] if math.isfinite(found["loss"]) else math.inf

    def best_rate(self, row: Row) -> float:
        """Return the best learning rate for seed 0 with ``TUNED_AT`` bits for each parameter.

        For a longer run of a row (``LONGER``), the search begins at the best rate of the shorter
        run.
        """
        rates = list(RATES)
        if row.name.endswith(LONGER):
            best = self.best_rate(shorter(row))
            rates = [best / 2, best, best * 2]
        while True:
            losses = [self.loss(row, TUNED_AT, rate, 0) for rate in rates]
            best = losses.index(min(losses))
            if 0 < best < len(rates) - 1:
                return rates[best]
            rates = [rates[0] / 2, *rates] if best == 0 else [*rates, rates[-1] * 2]


def smaller(state: float, blocks: int) -> Shape:
    """Return the smallest dense model with this number of blocks, and at least ``state`` bytes."""
    shape = Shape(blocks, 1)
    while 16 * sum(parameter.numel() for parameter in Answers(shape).parameters()) < state:
        shape = replace(shape, neurons=shape.neurons + 1)
    return shape


def with_peak(results: Results, peak: float, blocks: int) -> Shape:
    """Return the smallest dense model with this number of blocks and at least this ``peak``."""
    low, high = 1, 256
    while low < high:
        middle = Row("sized", Shape(blocks, (low + high) // 2))
        if results.bytes_of(middle)["peak"] < peak:
            low = middle.shape.neurons + 1
        else:
            high = middle.shape.neurons
    return Shape(blocks, low)


def shorter(row: Row) -> Row:
    return replace(row, name=row.name.removesuffix(LONGER), steps=STEPS)


def operations(row: Row) -> float:
    """Count the multiplications of a step, up to a factor that all rows share.

    Forward, the gradient of activations and the gradient of weights count once each. A frozen block
    needs no gradient of its weights.
    """
    passes = 3 if row.capacity == 1 else 2 + row.capacity
    return passes * row.shape.blocks * row.shape.neurons


def best_of(results: Results, tried: Sequence[Row]) -> Row:
    return min(tried, key=lambda row: results.loss(row, TUNED_AT, results.best_rate(row), 0))


def rows(results: Results) -> list[Row]:
    """Return all rows. Of two shapes that a smaller model can have, the better one is a row."""
    found = [Row("dense", Shape())]
    found += [Row(f"dense, {dtype} moments", Shape(), state_dtype=dtype) for dtype in ("bfloat16", "int8")]
    for capacity in CAPACITIES:
        sdp = Row(f"sdp {capacity}", Shape(), capacity)
        size = results.bytes_of(sdp)
        shapes = [smaller(size["state"], blocks) for blocks in (2, 4)]
        best = best_of(results, [Row(f"smaller {capacity} {shape.blocks}", shape) for shape in shapes])
        steps = round(STEPS * operations(sdp) / operations(best))
        shapes = [with_peak(results, size["peak"], blocks) for blocks in (2, 4)]
        peak = best_of(results, [Row(f"peak {capacity} {shape.blocks}", shape) for shape in shapes])
        found += [sdp, best, replace(best, name=best.name + LONGER, steps=steps), peak]
    return found


def table(results: Results, chosen: Sequence[Row]) -> str:
    lines = [
        f"| | state, kB | peak, kB | steps | {' | '.join(f'{bits:g} bits' for bits in sorted(BITS))} |",
        "|---|---:|---:|---:|" + "---:|" * len(BITS),
    ]
    for row in chosen:
        size, rate, cells = (
            results.bytes_of(shorter(row)),
            results.best_rate(row),
            [],
        )
        for bits in sorted(BITS):
            losses = [results.loss(row, bits, rate, seed) for seed in SEEDS]
            cells.append(f"{statistics.fmean(losses):.3f} ± {statistics.stdev(losses):.3f}")
        what = f"{row.name} (rate {rate:g}) | {size['state'] / 1e3:.0f} | {size['peak'] / 1e3:.0f} | {row.steps}"
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.facts", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of results.json and results.md")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(args.out / "results.json")
    chosen = rows(results)
    for bits, seed, row in itertools.product(BITS, SEEDS, chosen):
        results.loss(row, bits, results.best_rate(row), seed)
    text = table(results, chosen)
    (args.out / "results.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0
