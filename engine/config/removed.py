"""Lists keys, values, commands and options that were removed, and what to use instead.

``docs/changes.md`` is written from the tables in this file.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError

_RESTARTS = "sdp train --restarts N starts a run again after a process was lost"

# The path of a key, and what to use instead.
KEYS: dict[str, str] = {
    "sdp.elastic": _RESTARTS,
    "sdp.group_sizes": "groups have equal sizes; leave out the ranks that do not fill a group",
    "sdp.profile.noise": 'use "depth", which needs no measurement and had lower mean losses',
    "sdp.survive": _RESTARTS,
    "sdp.sync.outer_optimizer.params.weight_decay": "remove it; the optimizer of the groups decays the weights",
    "data.verify": "remove it; a run hashes shards of at most 4 GB at its start, and sdp prepare --verify hashes all",
    "training.evaluate_tasks": "run sdp evaluate DIR --tasks NAME,… on the run's directory, also while the run trains",
    "training.recalibrate_batches": "remove it; 8 batches per rank measure batch norm's statistics",
    "training.tokens": "use training.steps: divide the tokens by train_batch_size and data.sequence_length",
    "training.noise_scale_interval": "remove it; no setting depends on the gradient noise",
}

# A key with a value that this version does not accept any more, and what to use instead. Upper and
# lower case of a text do not matter.
VALUES: dict[tuple[str, str | bool], str] = {
    ("optimizer.params.bias_correction", False): "use true, or pass an optimizer of your own as optimizer=",
    ("optimizer.type", "Lamb"): 'use "AdamW", or pass an optimizer of your own as optimizer=',
    ("optimizer.type", "Lion"): 'use "AdamW", or pass an optimizer of your own as optimizer=',
    ("scheduler.type", "LRRangeTest"): "pass a schedule object of your own as lr_scheduler=",
    ("scheduler.type", "OneCycle"): (
        'use "WSD" or "WarmupCosineLR", or pass torch.optim.lr_scheduler.OneCycleLR as lr_scheduler='
    ),
    ("sdp.sync.outer_optimizer.type", "AdamW"): 'use "SGD", by default with Nesterov momentum, as in DiLoCo',
    ("sdp.engine", "reference"): (
        'use "fsdp2", which starts a local process for each group; one group alone trains in one process'
    ),
    ("sdp.engine", "vectorized"): 'use "fsdp2", which starts a local process for each group',
}

# A command below ``sdp``, and what to use instead.
COMMANDS: dict[str, str] = {
    "version": "use sdp --version",
    "advise": "use sdp plan CONFIG --compare; docs/advice.md has the measured losses",
    "coordinate": _RESTARTS,
    "gpu-check": "use sdp bench CONFIG --alone",
    "gradient-bias": "run python -m lab.gradient_bias in a checkout of the repository (lab/README.md)",
    "study": "run python -m lab.grid in a checkout of the repository (lab/README.md)",
}

# Options of sdp bench that timed one group next to a hand-written loop.
_OVERHEAD = """capacity compile deepspeed groups heads hidden intermediate json layers micro-batch neuron-groups repeats
    sequence threads vocab-size warmup""".split()

# A command with one of its options, and what to use instead.
OPTIONS: dict[tuple[str, str], str] = {
    ("bench", "--network"): "run the command with python -m lab.network in a checkout of the repository",
    ("bench", "--workers"): "run sdp bench once for each number of groups, with --set sdp.groups=N",
    **{("bench", f"--{name}"): "run python -m lab.overhead in a checkout of the repository" for name in _OVERHEAD},
    ("plan", "--html"): "leave it out; the terminal has all figures",
    ("plan", "--alone"): "leave it out; sdp plan CONFIG plans CONFIG alone, and --compare plans other ways",
    ("report", "--noise-plot"): "leave it out; runs do not measure the gradient noise any more",
}


def refuse_removed_keys(raw: Mapping[str, Any]) -> None:
    """Raise ConfigError if a configuration file has a key or a value that this version removed."""
    for path, advice in KEYS.items():
        if _find(raw, path)[0]:
            raise ConfigError(f"{path}: this key was removed; {advice}")
    for (path, value), advice in VALUES.items():
        is_given, given = _find(raw, path)
        if is_given and (given == value or str(given).lower() == str(value).lower()):
            raise ConfigError(f"{path}: {json.dumps(value)} was removed; {advice}")


def without_removed_keys(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a finished run without keys that this version removed.

    A run writes every key into its file. The removed keys do not matter after the run.
    """
    kept = copy.deepcopy(raw)
    for path in KEYS:
        section, _, key = path.rpartition(".")
        is_given, owner = _find(kept, section) if section else (True, kept)
        if is_given and isinstance(owner, dict):
            owner.pop(key, None)
    return kept


def refuse_removed_words(arguments: Sequence[str]) -> None:
    """Raise ConfigError if a command line has a command or an option that this version removed.

    Args:
        arguments: The words after ``sdp``.
    """
    command = next((word for word in arguments if not word.startswith("-")), None)
    if command in COMMANDS:
        raise ConfigError(f"sdp {command}: this command was removed; {COMMANDS[command]}")
    given = {word.partition("=")[0] for word in arguments}
    for (owner, option), advice in OPTIONS.items():
        if owner == command and option in given:
            raise ConfigError(f"sdp {command} {option}: this option was removed; {advice}")


def _find(raw: Any, path: str) -> tuple[bool, Any]:
    for part in path.split("."):
        if not isinstance(raw, Mapping) or part not in raw:
            return False, None
        raw = raw[part]
    return True, raw
