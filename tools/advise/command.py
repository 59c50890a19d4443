"""``sdp advise CONFIG``: which way to train is expected to be best on given machines, and why.

Every way is planned: its memory, and the seconds of a step. What each learns is taken from losses
that were measured at small sizes. The answer says where it extrapolates.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...engine.accounting.quantities import format_bytes
from ...engine.config.load import load_config
from ...engine.config.schema import Config
from ...engine.errors import ConfigError
from ..plan.options import MachineOptions, add_machine_arguments, given_machines
from ..plan.tables import describe_nodes
from ..runs.dataset import training_samples
from ..runs.run_config import with_initial_model
from ..runs.run_files import read_run
from ..shared.arguments import add_config_arguments, positive_int
from .candidate import Candidate
from .candidates import candidates_in_the_better_layout, with_groups
from .evidence import Estimate, Evidence, ManyEpochs
from .verdict import SIMILAR, Verdict, decide, extrapolations


@dataclass(frozen=True, kw_only=True)
class AdviseOptions(MachineOptions):
    """The options of ``sdp advise``.

    Attributes:
        config: the JSON file of the run.
        settings: what changes it, in the form of ``--set``.
        tokens: tokens (or images) of the whole run. None: those of ``training.steps``.
        noise: the directory of a run that measured its gradient noise.
        json: print JSON.
    """

    config: Path
    settings: tuple[str, ...] = ()
    tokens: int | None = None
    noise: Path | None = None
    json: bool = False

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> AdviseOptions:
        """Take the parsed arguments. Raises :class:`ConfigError` for values that mean nothing."""
        options = cls(
            config=args.config,
            settings=tuple(args.set),
            tokens=args.tokens,
            noise=args.noise,
            json=args.json,
            **given_machines(args),
        )
        options.check()
        _ = options.memory  # planning takes a while, so a mistake is named before it
        return options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(parser, "the JSON file of the run")
    add_machine_arguments(parser, "memory of a device, such as 80GB or 80GiB: leave out what does not fit")
    parser.add_argument(
        "--tokens",
        type=positive_int,
        metavar="N",
        help="tokens (or images) of the whole run (default: those of training.steps)",
    )
    parser.add_argument(
        "--noise", type=Path, metavar="DIR", help="a run with training.noise_scale_interval, whose noise is compared"
    )
    parser.add_argument("--json", action="store_true", help="print every figure as JSON instead")


def run(args: argparse.Namespace) -> int:
    """Plan all ways to train, and print the best one. Exit code 2 if nothing fits."""
    options = AdviseOptions.from_args(args)
    config = with_initial_model(load_config(options.config, options.settings))
    world, source = options.ranks(config)
    machine = options.machine(world)
    memory = options.memory
    config, chosen = with_groups(config, machine, world)
    noise = None if options.noise is None else _noise_scale(options.noise)  # planning takes a while
    config, found, notes = candidates_in_the_better_layout(config, machine, world, memory, _report)
    if not any(one.method == "dense" and one.every == 1 for one in found):
        why = "; ".join(notes)
        raise ConfigError(f"{options.config}: the dense model cannot be planned ({why}), so nothing is compared")
    evidence = Evidence.read()
    tokens_of_step = found[0].samples * _tokens_of_sample(config)
    tokens = options.tokens or ((config.training.steps or 0) * tokens_of_step or None)
    verdict = decide(found, memory, evidence, tokens)
    beyond = extrapolations(verdict, evidence, config, tokens_of_step / config.sdp.groups, tokens)
    notes = chosen + notes
    if noise is not None:
        notes.append(_compare_noise(options.noise, noise, found[0].samples, config))
    if tokens is not None and (epochs := _epochs(config, tokens)) is not None and epochs > SIMILAR:
        notes.append(_compare_epochs(epochs, evidence.many_epochs))
    if options.json:
        print(json.dumps(_to_json(verdict, beyond, notes, memory), indent=2))
    else:
        print(f"{world} ranks ({source}) on {describe_nodes(machine)}; {tokens_of_step:,} tokens a step\n")
        print(_table(verdict, memory, None if tokens is None else tokens / tokens_of_step))
        print(_text(verdict, beyond, notes, evidence))
    return 0 if verdict.best is not None else 2


def _report(what: str) -> None:
    """Say on a terminal what is planned next."""
    if sys.stderr.isatty():
        print(f"planning {what} …", file=sys.stderr, flush=True)


def _tokens_of_sample(config: Config) -> int:
    return config.data.sequence_length if config.data.name is None else 1


def _table(verdict: Verdict, memory: float | None, steps: float | None) -> str:
    """A line for each candidate."""
    heading = ["", "peak", "fits", "step", "whole run", "equal steps", "equal time", "measured at"]
    lines = [heading, *(_line(one, verdict, memory, steps) for one in verdict.estimates)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))]
        ).rstrip()
        for line in lines
    )


def _line(one: Estimate, verdict: Verdict, memory: float | None, steps: float | None) -> list[str]:
    candidate = one.candidate
    mark = "→ " if candidate is verdict.best else "  "
    fits = "" if memory is None else ("yes" if candidate.peak <= memory else "no")
    measured = "not measured" if one.gap is None else _where(one)
    return [
        mark + candidate.name,
        format_bytes(candidate.peak),
        fits,
        _duration(candidate.seconds),
        "" if steps is None else _duration(candidate.seconds * steps),
        _difference(one.at_equal_steps),
        _difference(one.at_equal_time),
        measured,
    ]


def _where(one: Estimate) -> str:
    assert one.gap is not None
    capacity = "" if one.gap.method == "dense" else f"C = {one.gap.capacity:g}"
    every = "" if one.gap.every == 1 else f"H = {one.gap.every}"
    length = f"{one.gap.tokens_per_parameter:g} tokens/parameter"
    return ", ".join(filter(None, [f"N = {one.gap.groups}", capacity, every, length]))


def _difference(loss: float | None) -> str:
    return "" if loss is None else f"{loss:+.3f}".replace("-0.000", "+0.000")


def _duration(seconds: float) -> str:
    """Seconds in the unit in which a person would say them."""
    for unit, size, least in (("days", 86400.0, 2.0), ("h", 3600.0, 2.0), ("min", 60.0, 2.0), ("s", 1.0, 1.0)):
        if seconds >= least * size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds * 1e3:.3g} ms"


def _text(verdict: Verdict, beyond: list[str], notes: list[str], evidence: Evidence) -> str:
    sizes = " and ".join(format(size, ",") for size in evidence.setting.parameters)
    shortest, longest = evidence.lengths
    lines = ["", f"Expected to be best: {verdict.best.name if verdict.best else 'nothing fits'}", *verdict.reasons, ""]
    lines += [
        f"- Equal steps and equal time: expected loss less that of {verdict.reference.name}, in nats. More steps "
        "in the same time change a loss as they did for the same method, with averages in every step, between "
        f"{shortest:g} and {longest:g} tokens per parameter ({evidence.curves_source}). Losses were "
        f"measured with LLaMA of {sizes} parameters and byte tokens; the pages are "
        f"{', '.join(dict.fromkeys(gap.source for gap in evidence.gaps))}."
    ]
    if beyond:
        lines += ["- This extrapolates:", *(f"  - {line}" for line in beyond)]
    return "\n".join([*lines, *(f"- {note}" for note in notes)])


def _noise_scale(folder: Path) -> float:
    """The last noise scale, in samples, of the run in ``folder``."""
    measured = [line["noise_scale"] for line in read_run(folder).metrics if isinstance(line.get("noise_scale"), float)]
    if not measured or not math.isfinite(measured[-1]) or measured[-1] <= 0:
        raise ConfigError(
            f"--noise {folder}: this run has no noise scale; train it with training.noise_scale_interval, and long "
            "enough that the mean of the squared gradient is positive"
        )
    return measured[-1]


def _compare_noise(folder: Path | None, scale: float, samples: int, config: Config) -> str:
    """A sentence about the noise that the run in ``folder`` measured."""
    unit, ratio = samples / config.sdp.groups, samples / scale
    where = "far below" if ratio < 1 / 3 else ("far above" if ratio > 3 else "near")
    meaning = {
        "far below": "noise dominates. More workers help almost in proportion, and so do more holders",
        "near": "noise and signal are alike",
        "far above": "averaging over more samples has little left to remove. The bias of forward masking stays",
    }[where]
    return (
        f"The noise scale of {folder} is {scale:,.1f} samples. A step has {samples:,} ({unit:,.4g} of each group), "
        f"{where} it: {meaning}."
    )


def _epochs(config: Config, tokens: float) -> float | None:
    """How often a run of so many tokens or images reads its data. None if nobody knows."""
    samples = training_samples(config)
    return None if samples is None else tokens / _tokens_of_sample(config) / samples


def _compare_epochs(epochs: float, measured: ManyEpochs) -> str:
    """A sentence about data that are read many times."""
    losses = sorted(measured.losses.items(), key=lambda item: item[1])
    figures = ", ".join(f"{method} {mean:.3f} ± {spread:.3f}" for method, (mean, spread) in losses)
    return (
        f"This run reads its data {epochs:,.0f} times, and the losses above are from less than one pass. With "
        f"{measured.epochs:,.0f} passes over small images and each method's best regularisation, the lowest held-out "
        f"losses were: {figures} ({measured.seeds} seeds, {measured.source})."
    )


def _to_json(verdict: Verdict, beyond: list[str], notes: list[str], memory: float | None) -> dict[str, Any]:
    def entry(one: Estimate) -> dict[str, Any]:
        candidate: Candidate = one.candidate
        return {
            "name": candidate.name,
            "peak": candidate.peak,
            "fits": None if memory is None else candidate.peak <= memory,
            "step_seconds": candidate.seconds,
            "parameters": candidate.parameters,
            "layout": candidate.layout or None,
            "at_equal_steps": one.at_equal_steps,
            "at_equal_time": one.at_equal_time,
            "evidence": None if one.gap is None else one.gap.model_dump(),
        }

    return {
        "best": None if verdict.best is None else verdict.best.name,
        "reference": verdict.reference.name,
        "reasons": list(verdict.reasons),
        "candidates": [entry(one) for one in verdict.estimates],
        "extrapolations": beyond,
        "notes": notes,
    }
