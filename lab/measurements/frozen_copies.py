"""``python -m lab.measurements.frozen_copies``: what frozen copies cost in memory and in time.

There are 4 groups of one rank at C = 0.25, with backward masking, placement "contiguous", int8
copies, bfloat16 and full activation checkpointing. Only one rank exists (torch's fake process
group).

- *Peak*: the peak memory of every group, divided by that of a dense model which has as many
  parameters as a group holds on average. The engine runs with real tensors on a CPU, and
  ``memory_probe.py`` watches all of them. With ``--plan CONFIG``, peaks of this configuration's
  model are planned instead, with its samples in 8 groups.
- *Speed*: the seconds of a step with copies in compute precision, divided by those of a step with
  int8 copies, in the group with the largest peak. Both take turns step by step
  (``lab.overhead.race``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sdp.engine.accounting.memory_probe import peak_tensor_bytes
from sdp.engine.config.load import load_config
from sdp.engine.distributed.collectives import local_tensor
from sdp.engine.distributed.fake_world import fake_world
from sdp.engine.distributed.mesh import mesh_of
from sdp.engine.initialize import initialize
from sdp.engine.placement.layout import Layout
from sdp.engine.tracing.step import trace_step
from sdp.lab.overhead.race import Contestant, race
from sdp.models.registry import build_model

CPU = torch.device("cpu")
SMALL = {
    "name": "llama", "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 16,
    "num_attention_heads": 8, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


def config_of(model: Mapping[str, Any], samples: int, groups: int, copies: str) -> dict[str, Any]:
    """Return a configuration. ``copies`` is "int8", "compute", or "" for a dense model."""
    section: dict[str, Any] = {"groups": groups}
    if copies:
        section |= {"capacity": 0.25, "masking": "backward", "placement": "contiguous", "profile": "uniform"}
        section |= {"copies": {"dtype": copies}}
    return {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": True},
        "activation_checkpointing": {"mode": "full"},
        "sdp": section,
        "model": dict(model),
    }


def held_by(config: dict[str, Any], groups: int) -> tuple[Layout, list[int]]:
    """Return the layout, and the number of parameters that each group holds."""
    settings = load_config(config)
    with torch.device("meta"):
        layout = Layout.of(build_model(config["model"]), settings, mesh_of(settings, groups))
    return layout, [sum(info.numel for info in layout.held(group)) for group in range(groups)]


def dense_of(model: Mapping[str, Any], parameters: float) -> dict[str, Any]:
    """Return the ``model`` section of a smaller dense model with about this number of parameters.

    It has fewer layers, and a wider feed-forward.
    """

    def count(layers: int, wide: int) -> int:
        with torch.device("meta"):
            built = build_model({**model, "num_hidden_layers": layers, "intermediate_size": wide})
        return sum(parameter.numel() for parameter in built.parameters())

    wide = int(model["intermediate_size"])
    layers = max((n for n in range(1, model["num_hidden_layers"]) if count(n, wide) <= parameters), default=1)
    wide += round((parameters - count(layers, wide)) / (count(layers, wide + 1) - count(layers, wide)))
    return {**model, "num_hidden_layers": layers, "intermediate_size": wide}


def batch_of(model: Mapping[str, Any], length: int, samples: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(model["vocab_size"], (samples, length))
    return {"input_ids": ids, "labels": ids}


def engine_of(config: dict[str, Any]) -> Any:
    """Build the engine of this rank. Its frozen copies get constants, as there are no holders."""
    engine = initialize(model=build_model(config["model"]), config=config)[0]
    with torch.no_grad():
        for copy in engine.frozen_here.values():
            tensor = local_tensor(copy.detach())
            if tensor.is_floating_point() or tensor.dtype == torch.int8:
                tensor.fill_(1 if tensor.dtype == torch.int8 else 0.01)
            else:
                tensor.view(torch.float16).fill_(1e-4)
    return engine


def step_of(engine: Any, batch: Mapping[str, torch.Tensor]) -> None:
    engine.backward(engine(batch))
    engine.step()


def measured_peak(config: dict[str, Any], groups: int, group: int, length: int) -> int:
    """Return the measured peak of live tensors of a rank in its second step, in bytes."""
    batch = batch_of(config["model"], length, config["train_micro_batch_size_per_gpu"])
    with fake_world(group, groups):
        engine = engine_of(config)
        step_of(engine, batch)
        return peak_tensor_bytes(partial(step_of, engine, batch), engine.module, engine.optimizer, engine.device)


def planned_peak(config: dict[str, Any], groups: int, group: int, length: int) -> int:
    """Return the planned peak of a rank, in bytes."""
    layout, _ = held_by(config, groups)
    model = config["model"]
    batch = partial(batch_of, model, length)
    return trace_step(partial(build_model, model), load_config(config), layout, batch, group).peak


def compare_peaks(model: Mapping[str, Any], samples: int, length: int, groups: int, peak_of: Any) -> list[float]:
    """Return each group's peak, divided by the peak of the dense model of equal state."""
    config = config_of(model, samples, groups, "int8")
    _, held = held_by(config, groups)
    dense = config_of(dense_of(model, sum(held) / groups), samples, groups, "")
    whole = peak_of(dense, groups, 0, length)
    return [peak_of(config, groups, group, length) / whole for group in range(groups)]


def compare_speed(model: Mapping[str, Any], samples: int, length: int, groups: int, group: int, rounds: int) -> float:
    """Return the seconds of a step with copies in compute precision, divided by those with int8."""
    with fake_world(group, groups):
        steps = [
            Contestant(copies, 0, partial(step_of, engine_of(config_of(model, samples, groups, copies))))
            for copies in ("compute", "int8")
        ]
        batches = [batch_of(model, length, samples) for _ in range(rounds)]
        return 1 / race(steps, batches, 2, CPU)[1].median_ratio


def main() -> None:
    """Print ratios."""
    parser = argparse.ArgumentParser(prog="python -m lab.measurements.frozen_copies")
    parser.add_argument("--plan", metavar="CONFIG", type=Path, help="plan this configuration's peaks")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of the race")
    args = parser.parse_args()
    model, samples, length, groups, peak_of = SMALL, 4, 512, 4, measured_peak
    if args.plan is not None:
        config = json.loads(args.plan.read_text())
        model, samples, groups = config["model"], config["train_micro_batch_size_per_gpu"], 8
        length, peak_of = config["data"]["sequence_length"], planned_peak
    ratios = compare_peaks(model, samples, length, groups, peak_of)
    print("peak over dense:", *(f"{ratio:.2f}" for ratio in ratios), f"mean {sum(ratios) / groups:.2f}")
    if args.plan is None:
        largest = max(range(groups), key=ratios.__getitem__)
        speed = compare_speed(model, samples, length, groups, largest, args.rounds)
        print(f"speed with int8 copies over that with copies in compute precision: {speed:.2f}")


if __name__ == "__main__":
    main()
