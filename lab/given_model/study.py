"""``python -m lab.given_model OUT``: continue a model of Python on C++ and English.

All groups of SDP compute in one process. Methods have equal state on a device, counted as 16 bytes
for a parameter that is trained (AdamW in float32) and 2 for one that is frozen (a bfloat16 copy).
Learning rates are chosen for each method with seed 0, on C++, at 10 tokens for each parameter. If
the best rate is at the edge of the grid of rates, the grid is widened.

Runs in OUT/results.json are not repeated.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from sdp.engine.config.load import load_config
from sdp.engine.distributed.mesh import mesh_of
from sdp.engine.optim.clip import clip_, squared_norm
from sdp.engine.placement.layout import Layout
from sdp.models.registry import build_model
from torch import Tensor, nn

from ..simulator.training import with_first_values
from ..simulator.workers import Workers, mean_loss
from .texts import Text, find_texts

GROUPS, BLOCKS, LENGTH = 8, 8, 128  # a step has one window of bytes for each group
LENGTHS = (1, 10, 50)  # tokens for each parameter of the model
PRETRAINING = 200
RATES = (0.002, 0.004, 0.008)
TUNED_AT = ("C++", 10)
SEEDS = (0, 1, 2)
ROUND = 20  # local steps between two averages
TRAINED, FROZEN = 16, 2  # bytes for a parameter
ANCHOR = 4  # further bytes for a trained parameter in local steps, whose outer optimizer has no momentum
LARGEST_NORM = 1.0  # of a gradient


@dataclass(frozen=True)
class Method:
    """A way to continue training.

    Attributes:
        kind: "full", "sdp", "lora", "badam", "last" or "spread".
        capacity: The share C of the blocks' state that a device may have.
        local_steps: The number of steps between averages of SDP.
        interval: BAdam trains other blocks after so many steps.
        alpha: The alpha of LoRA, divided by its rank.
        trains_rest: LoRA also trains everything outside the blocks, as all other methods do. Its
            rank is then smaller.
    """

    kind: str
    capacity: float = 1.0
    local_steps: int = 1
    interval: int = 50
    alpha: int = 2
    trains_rest: bool = False

    @property
    def name(self) -> str:
        settings = [(self.local_steps, "every"), (self.interval, "interval"), (self.alpha, "alpha")]
        usual = (Method.local_steps, Method.interval, Method.alpha)
        differing = [
            f", {word} {value}" for (value, word), default in zip(settings, usual, strict=True) if value != default
        ]
        share = f" {self.capacity:g}" if self.capacity < 1 else ""
        return f"{self.kind}{share}{''.join(differing)}{', with the rest' if self.trains_rest else ''}"


METHODS = (
    Method("full"),
    *(Method("sdp", capacity) for capacity in (0.125, 0.25, 0.5)),
    *(Method("sdp", capacity, ROUND) for capacity in (0.125, 0.25, 0.5)),
    *(Method("lora", capacity) for capacity in (0.125, 0.25, 0.5)),
    *(Method("lora", capacity, trains_rest=True) for capacity in (0.25, 0.5)),
    Method("lora", 0.25, alpha=8),
    *(Method("badam", 0.25, interval=interval) for interval in (50, 20)),
    Method("last", 0.25),
    Method("spread", 0.25),
)


class Size:
    """A size of the model, which is a LLaMA of eight blocks with bytes as tokens."""

    def __init__(self, width: int):
        self.width = width

    def config(self, capacity: float) -> Any:
        masking = {"masking": "backward", "profile": "uniform"} if capacity < 1 else {}
        return load_config({
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "model": {
                "name": "llama", "hidden_size": self.width, "intermediate_size": 3 * self.width,
                "num_hidden_layers": BLOCKS, "num_attention_heads": 2, "num_key_value_heads": 2,
                "max_position_embeddings": LENGTH, "tie_word_embeddings": True,
            },
            "sdp": {"groups": GROUPS, "capacity": capacity, **masking},
        })  # fmt: skip

    def empty(self) -> nn.Module:
        return build_model(self.config(1.0).model, vocab_size=256)

    def new_model(self) -> nn.Module:
        """Return a new model of this size with its initial weights."""
        model = self.empty()
        with_first_values(self.config(1.0), model, torch.device("cpu"))
        return model

    def layout(self, model: nn.Module, capacity: float) -> Layout:
        config = self.config(capacity)
        return Layout.of(model, config, mesh_of(config, GROUPS))

    @cached_property
    def counts(self) -> tuple[int, int]:
        """The number of parameters in all blocks, and the number of all other parameters."""
        sizes = {name: parameter.numel() for name, parameter in self.empty().named_parameters()}
        blocks = sum(size for name, size in sizes.items() if ".layers." in name)
        return blocks, sum(sizes.values()) - blocks

    def steps(self, tokens_per_parameter: float) -> int:
        return round(tokens_per_parameter * sum(self.counts) / (GROUPS * LENGTH))


def state_bytes(method: Method, size: Size) -> int:
    """Count the bytes of state on a device. LoRA with its rank has nearly those of SDP."""
    if method.kind == "lora":
        return _bytes_of_adapters(method, size, rank_of_equal_state(method, size))
    blocks, shared = size.counts
    held = round(blocks * method.capacity)
    trains = TRAINED + ANCHOR if method.local_steps > 1 else TRAINED
    return trains * (shared + held) + FROZEN * (blocks - held)


def rank_of_equal_state(method: Method, size: Size) -> int:
    """Return the rank of LoRA whose state is nearest to that of SDP with this capacity."""
    wanted = state_bytes(Method("sdp", method.capacity), size)
    return min(range(1, size.width + 1), key=lambda rank: abs(_bytes_of_adapters(method, size, rank) - wanted))


def _bytes_of_adapters(method: Method, size: Size, rank: int) -> int:
    parameters = with_adapters(size.empty(), method, rank).parameters()
    return sum(parameter.numel() * (TRAINED if parameter.requires_grad else FROZEN) for parameter in parameters)


# -- methods --------------------------------------------------------------------------------------


def make_optimizer(parameters: Iterator[nn.Parameter] | Sequence[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.01, foreach=True)


class Continued:
    """A training of the given model. ``model`` is the full model, which is evaluated."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]):
        self.model, self.optimizers = model, optimizers

    def step(self, windows: Tensor, rate: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        self._update(windows)

    def _update(self, windows: Tensor) -> None:
        self._gradients(windows)
        _clipped(self.model)
        self.optimizers[0].step()

    def _gradients(self, windows: Tensor) -> None:
        self.model.zero_grad()
        self.model(windows, labels=windows).backward()


def _clipped(model: nn.Module) -> None:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    clip_(gradients, math.sqrt(squared_norm(gradients, torch.device("cpu")).item()), LARGEST_NORM)


class OfBlocks(Continued):
    """A training of some blocks, and of everything outside the blocks.

    If ``every`` is set, other blocks are trained after this number of steps, with new moments
    (BAdam, arXiv 2404.02827).
    """

    def __init__(self, model: nn.Module, blocks: Sequence[int], every: int = 0):
        self._blocks, self._every, self._steps = list(blocks), every, 0
        super().__init__(model, [])
        self._choose()

    def _choose(self) -> None:
        patterns = tuple(f".layers.{block}." for block in self._blocks)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(".layers." not in name or any(pattern in name for pattern in patterns))
        kept = self.optimizers[0].state if self.optimizers else {}
        optimizer = make_optimizer([parameter for parameter in self.model.parameters() if parameter.requires_grad])
        shared = {parameter for name, parameter in self.model.named_parameters() if ".layers." not in name}
        optimizer.state.update({parameter: state for parameter, state in kept.items() if parameter in shared})
        self.optimizers = [optimizer]

    def _update(self, windows: Tensor) -> None:
        if self._every and self._steps and self._steps % self._every == 0:
            count = len(self._blocks)
            self._blocks = [(block + count) % BLOCKS for block in self._blocks]
            rate = self.optimizers[0].param_groups[0]["lr"]
            self._choose()
            self.optimizers[0].param_groups[0]["lr"] = rate
        self._steps += 1
        super()._update(windows)


class OfGroups(Continued):
    """A training by SDP with averages in every step, under backward masking."""

    def __init__(self, model: nn.Module, layout: Layout):
        super().__init__(model, [make_optimizer(list(model.parameters()))])
        self._workers = Workers(model, layout)

    def _gradients(self, windows: Tensor) -> None:
        self._workers.gradients([{"input_ids": windows, "labels": windows}], "backward")


class OfLocalSteps(Continued):
    """A training by SDP with local steps: groups train alone, and average weights every few steps.

    The new weight is the mean of the holders' weights, as with an outer rate of 1 and no momentum.
    Moments are not averaged.
    """

    def __init__(self, model: nn.Module, layout: Layout, local_steps: int):
        self._groups = [copy.deepcopy(model) for _ in range(GROUPS)]
        holders = {unit.name: holders for unit, holders in zip(layout.units, layout.placement.holders, strict=True)}
        self._holders = {
            name: next((groups for unit, groups in holders.items() if name.startswith(unit + ".")), range(GROUPS))
            for name, _ in model.named_parameters()
        }
        for index, group in enumerate(self._groups):
            for name, parameter in group.named_parameters():
                parameter.requires_grad_(index in self._holders[name])
        super().__init__(model, [make_optimizer([p for p in g.parameters() if p.requires_grad]) for g in self._groups])
        self._local_steps, self._steps = local_steps, 0

    def _update(self, windows: Tensor) -> None:
        for group, optimizer, mine in zip(self._groups, self.optimizers, windows.chunk(GROUPS), strict=True):
            group.zero_grad()
            group(mine, labels=mine).backward()
            _clipped(group)
            optimizer.step()
        self._steps += 1
        if self._steps % self._local_steps == 0:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        everyones = [dict(group.named_parameters()) for group in self._groups]
        for name, parameter in self.model.named_parameters():
            parameter.copy_(torch.stack([everyones[group][name] for group in self._holders[name]]).mean(0))
            for one in everyones:
                one[name].copy_(parameter)


def with_adapters(model: nn.Module, method: Method, rank: int) -> nn.Module:
    """Add LoRA to all linear layers of the blocks, freeze their weights, and return the model."""
    from peft import LoraConfig, inject_adapter_in_model  # of the extra "dev"

    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=method.alpha * rank, target_modules=layers), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or (method.trains_rest and ".layers." not in name))
    return model


def continued(method: Method, size: Size, model: nn.Module) -> Continued:
    """Return the training of ``model`` by a method, ready for its first step."""
    count = round(method.capacity * BLOCKS)
    makers: dict[str, Callable[[], Continued]] = {
        "full": lambda: Continued(model, [make_optimizer(list(model.parameters()))]),
        "lora": lambda: _of_adapters(with_adapters(model, method, rank_of_equal_state(method, size))),
        "badam": lambda: OfBlocks(model, range(count), method.interval),
        "last": lambda: OfBlocks(model, range(BLOCKS - count, BLOCKS)),
        "spread": lambda: OfBlocks(model, range(BLOCKS // count - 1, BLOCKS, BLOCKS // count)),
        "sdp": lambda: _of_groups(model, size.layout(model, method.capacity), method.local_steps),
    }
    return makers[method.kind]()


def _of_adapters(model: nn.Module) -> Continued:
    return Continued(model, [make_optimizer([p for p in model.parameters() if p.requires_grad])])


def _of_groups(model: nn.Module, layout: Layout, local_steps: int) -> Continued:
    return OfGroups(model, layout) if local_steps == 1 else OfLocalSteps(model, layout, local_steps)


# -- runs -----------------------------------------------------------------------------------------


def train(run: Continued, text: Text, steps: int, rate: float, seed: int) -> None:
    """Train for some steps. The rate has a warm-up, and falls linearly in the second half."""
    windows = text.windows(GROUPS, LENGTH, 1000 + seed)
    for step in range(steps):
        run.step(next(windows), rate * min(1, (step + 1) / min(20, steps / 4), (steps - step) / (steps / 2)))
    if isinstance(run, OfLocalSteps):
        run.average()


def loss_on(model: nn.Module, text: Text) -> float:
    return mean_loss(model, [{"input_ids": part, "labels": part} for part in text.held_out.split(64)])


class Results:
    """The results of all finished runs, in one file."""

    def __init__(self, out: Path, size: Size):
        self._path, self._size, self._out = out / "results.json", size, out
        self.texts, hash_of_texts = find_texts(LENGTH)
        fresh = {"width": size.width, "texts": hash_of_texts, "runs": {}}
        self.found: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else fresh
        if (self.found["width"], self.found["texts"]) != (size.width, hash_of_texts):
            sys.exit(f"{self._path}: has runs of another width or of other texts; name another folder")

    def given(self) -> nn.Module:
        """Return the given model, which was pre-trained on Python. It is kept in OUT/given.pt."""
        file, model = self._out / "given.pt", self._size.new_model()
        if not file.exists():
            run = Continued(model, [make_optimizer(list(model.parameters()))])
            train(run, self.texts["Python"], self._size.steps(PRETRAINING), 0.016, 99)
            torch.save(model.state_dict(), file)
        model.load_state_dict(torch.load(file, weights_only=True))
        return model

    def losses(self, method: Method, text: str, tokens: float, rate: float, seed: int) -> dict[str, float]:
        """Train on ``text``, and return the losses on this new text and on the old one, Python."""
        key = f"{method.name} | {text} | {tokens:g} | rate {rate:g} | seed {seed}"
        if key not in self.found["runs"]:
            torch.manual_seed(seed)
            started = time.perf_counter()
            run = continued(method, self._size, self.given())
            train(run, self.texts[text], self._size.steps(tokens), rate, seed)
            new, old = loss_on(run.model, self.texts[text]), loss_on(run.model, self.texts["Python"])
            self.found["runs"][key] = {"new": new, "old": old, "seconds": time.perf_counter() - started}
            self._path.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
            print(key, self.found["runs"][key], file=sys.stderr, flush=True)
        return self.found["runs"][key]

    def best_rate(self, method: Method) -> float:
        rates = list(RATES)
        while True:
            losses = [self.losses(method, *TUNED_AT, rate, 0)["new"] for rate in rates]
            best = min(range(len(rates)), key=lambda index: losses[index] if math.isfinite(losses[index]) else math.inf)
            if 0 < best < len(rates) - 1:
                return rates[best]
            rates = [rates[0] / 2, *rates] if best == 0 else [*rates, rates[-1] * 2]


def table(results: Results, size: Size, text: str, kind: str) -> str:
    """Return the table of losses after training on ``text``.

    ``kind`` is "new" for losses on this text, or "old" for losses on Python.
    """
    lines = [
        f"| | state, kB | rate | {' | '.join(f'{tokens:g} tokens per parameter' for tokens in LENGTHS)} |",
        "|---|---:|---:|" + "---:|" * len(LENGTHS),
    ]
    for method in METHODS:
        rate, cells = results.best_rate(method), []
        for tokens in LENGTHS:
            losses = [results.losses(method, text, tokens, rate, seed)[kind] for seed in SEEDS]
            cells.append(f"{statistics.fmean(losses):.3f} ± {statistics.stdev(losses):.3f}")
        state = state_bytes(method, size) / 1e3
        lines.append(f"| {method.name} | {state:.0f} | {rate:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.given_model", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of results.json and results.md")
    parser.add_argument("--width", type=int, default=16, help="the width of the model (default: 16)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    size = Size(args.width)
    results = Results(args.out, size)
    given = results.given()
    before = {name: loss_on(given, text) for name, text in results.texts.items()}
    texts = [name for name in results.texts if name != "Python"]
    for method in METHODS:
        results.best_rate(method)
    for seed, text, tokens, method in itertools.product(SEEDS, texts, LENGTHS, METHODS):
        results.losses(method, text, tokens, results.best_rate(method), seed)
    parts = [f"Before: {json.dumps(before)}", f"Texts: {results.found['texts']}"]
    for text, kind in itertools.product(texts, ("new", "old")):
        parts.append(f"{text}, loss on the {kind} text\n\n{table(results, size, text, kind)}")
    report = "\n\n".join(parts)
    (args.out / "results.md").write_text(report + "\n", encoding="utf-8")
    print(report)
    return 0
