"""Counts how many public DeepSpeed scripts and configuration files work with this engine.

    python -m lab.deepspeed_compat.count

``names.json`` has the names that 34 public scripts use on DeepSpeed's engine, by script. They were
read from the scripts' syntax trees. A script works if the engine, torch's ``nn.Module`` or the
script's own model has each of its names.

``files.json`` has the keys and values of 79 files from public repositories, by repository and path.
Each file gets the section ``"sdp": {"groups": 2, "capacity": 0.5}``, and is loaded for
``sdp.engine`` "fsdp2" and "deepspeed".

A script may pass its own optimizer and schedule, which replace those of the file. So a file counts
as loaded even if its optimizer or schedule does not exist here. Such files are also counted
separately. ``--reasons`` prints the reason of every refusal, with its files.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import sdp
import torch
from sdp.engine.config.load import load_config
from sdp.engine.deepspeed_names import REFUSED
from sdp.engine.errors import ConfigError
from sdp.engine.optim.optimizers import build_optimizer
from sdp.engine.optim.schedules import build_scheduler
from sdp.tests.support.ranks import rank_alone

FILES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("files.json").read_text(encoding="utf-8"))
NAMES: dict[str, list[str]] = json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))
ENGINES = ("fsdp2", "deepspeed")
# Names that scripts use on the engine and that are attributes of their own models.
NAMES_OF_MODELS = frozenset(
    ("encoder", "features", "gradient_checkpointing_enable", "model", "no_weight_decay", "no_weight_decay_keywords",
     "parallelize")
)  # fmt: skip
# Names of torch's DDP and FSDP. DeepSpeed's engine does not have them either. One of the two
# scripts that use them catches the error; the other one was not read.
NAMES_OF_WRAPPERS = frozenset(("clip_grad_norm_", "register_comm_hook"))


def find_missing_names(names: Iterable[str]) -> list[str]:
    """Return the names in ``names`` that neither the engine nor torch's modules have.

    A name counts as missing, too, if the engine only answers it with an error.
    """
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    with rank_alone():
        engine = sdp.initialize(model=model, config={"train_batch_size": 1})[0]
    return sorted(name for name in {*names} if name in REFUSED or not hasattr(engine, name))


def find_reason(settings: Mapping[str, Any], engine: str) -> str | None:
    """Return why a configuration file does not load for ``engine``, or None if it loads."""
    try:
        load_config({**settings, "sdp": {"groups": 2, "capacity": 0.5, "engine": engine}})
    except ConfigError as error:
        return str(error)
    return None


def find_engines(settings: Mapping[str, Any]) -> list[str]:
    """Return the engines for which a configuration file loads."""
    return [engine for engine in ENGINES if find_reason(settings, engine) is None]


def find_missing_part(settings: Mapping[str, Any]) -> str | None:
    """Return why the script must pass an optimizer, a schedule or a number of steps itself.

    Returns None if the file is enough.
    """
    config = load_config({**settings, "sdp": {"groups": 2, "capacity": 0.5}})
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer: torch.optim.Optimizer = torch.optim.SGD([parameter])
    try:
        if config.optimizer is not None:
            section = config.optimizer
            optimizer, _ = build_optimizer(section.type, section.params, [parameter], torch.device("cpu"))
        if config.scheduler is not None:
            build_scheduler(config.scheduler.type, config.scheduler.params, optimizer)
    except ConfigError as error:
        return str(error)
    return None


def describe_names() -> Iterator[str]:
    """Yield the lines to print about the scripts."""
    unknown = {*find_missing_names(name for names in NAMES.values() for name in names)}
    missing = {script: unknown & {*names} for script, names in NAMES.items()}
    left = {script: names - NAMES_OF_MODELS - NAMES_OF_WRAPPERS for script, names in missing.items()}
    alone = sum(not names for names in missing.values())
    models = sum(bool(names) and names <= NAMES_OF_MODELS for names in missing.values())
    exist = sum(not names for names in left.values())
    yield f"{exist} of {len(NAMES)} scripts use only names that exist"
    yield f"  {alone} use names of the engine alone"
    yield f"  {models} use names of their own models, too"
    yield f"  {exist - alone - models} use names of torch's wrappers, too, which DeepSpeed's engine does not have"
    for script, names in left.items():
        if names:
            owner, *path = script.split("__")
            yield f"missing: {', '.join(sorted(names))} in {owner.replace('+', '/')}, {path[-1]}"


def describe_files(*, reasons: bool) -> Iterator[str]:
    """Yield the lines to print about the configuration files.

    With ``reasons``, these include the reason of each refusal.
    """
    engines = {name: find_engines(settings) for name, settings in FILES.items()}
    refused: dict[str, list[str]] = defaultdict(list)
    incomplete: dict[str, list[str]] = defaultdict(list)
    for name, found in engines.items():
        reason = find_missing_part(FILES[name]) if "fsdp2" in found else None
        if not found:
            refused[str(find_reason(FILES[name], "fsdp2"))].append(name)
        elif reason is not None:
            incomplete[reason].append(name)
    yield f"{sum(map(bool, engines.values()))} of {len(FILES)} files load"
    for engine in ENGINES:
        yield f'  {sum(engine in found for found in engines.values())} with sdp.engine "{engine}"'
    yield f"  {sum(map(len, incomplete.values()))} need an optimizer, a schedule or a number of steps from the script"
    for title, found in (("refused", refused), ("the script must pass more", incomplete)) if reasons else ():
        for reason, names in sorted(found.items(), key=lambda item: -len(item[1])):
            yield f"\n{title}, {len(names)} × {reason}"
            yield from (f"    {name}" for name in names)


def main() -> None:
    """Print both counts."""
    logging.disable(logging.WARNING)
    print("\n".join([*describe_names(), "", *describe_files(reasons="--reasons" in sys.argv)]))


if __name__ == "__main__":
    main()
