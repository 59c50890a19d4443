"""Reads a configuration file with overrides, and refuses settings that cannot be combined."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ConfigError, shorten
from ..json_files import MOST_DEPTH, JsonError, parse_json, read_json_file
from .deepspeed_keys import (
    DEEPSPEED_CLIPS_AT,
    drop_autos,
    for_deepspeed,
    known_keys,
    resolve_spellings,
    split_foreign_keys,
)
from .method import Problems, problems_with_copies, problems_with_paths, problems_with_sync
from .removed import refuse_removed_keys
from .schema import Config
from .section import parse_section


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Read and validate a configuration.

    Args:
        source: The path of a JSON or hjson file, or a mapping.
        overrides: Strings of the form ``section.key=value``. The value is JSON or a bare string.

    Raises:
        ConfigError: A key is unknown (with a suggestion), a type is wrong, a value is out of range,
            or this version cannot honour a setting. The message has one line.
    """
    raw = read_raw(source)
    _refuse_gpt_neox(raw)
    for override in overrides:
        _apply_override(raw, override)
    # A script's own optimizer and schedule replace these sections. They are checked where they
    # are used.
    refuse_removed_keys({key: value for key, value in raw.items() if key not in ("optimizer", "scheduler")})
    raw, autos = drop_autos(resolve_spellings(raw), _is_known)
    section = raw.get("sdp")
    to_deepspeed = isinstance(section, dict) and section.get("engine") == "deepspeed"
    shards_nothing = to_deepspeed and _stage_of(raw) == 0
    if to_deepspeed:
        raw.setdefault("gradient_clipping", DEEPSPEED_CLIPS_AT)
    if shards_nothing:
        to_deepspeed, raw["sdp"] = False, {**raw["sdp"], "engine": "fsdp2"}
    ours, hints = split_foreign_keys(raw, deepspeed=to_deepspeed)
    config = parse_section(Config, ours, known_keys=partial(known_keys, root=Config))
    config._hints, config._autos, config._replaces_deepspeed = hints, autos, shards_nothing
    config._deepspeed = for_deepspeed(raw) if to_deepspeed else {}
    problems = (*_problems(config), *problems_with_sync(config), *problems_with_paths(config))
    for refused, message in (*problems, *problems_with_copies(config)):
        if refused:
            raise ConfigError(message)
    return config


def _stage_of(raw: Mapping[str, Any]) -> Any:
    section = raw.get("zero_optimization")
    return section.get("stage", 0) if isinstance(section, Mapping) else 0


def _is_known(path: str) -> bool:
    *parents, key = path.split(".")
    return key in known_keys(parents, Config)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of the configuration file, with which editors can check it."""
    return Config.model_json_schema()


def read_raw(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(source, Mapping):
        try:
            return parse_json(json.dumps(source))  # a deep copy that contains only JSON values
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"the configuration must consist of JSON values ({shorten(error)})") from None
    if not isinstance(source, str | Path):
        raise ConfigError(f"the configuration must be a path or a mapping, not {type(source).__name__}")
    path = Path(source)
    try:
        raw = read_json_file(path, unique_keys=True)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except JsonError as error:
        lenient = _read_hjson(path) if "not valid JSON" in str(error) else None
        if lenient == {} and "{" not in path.read_text(encoding="utf-8-sig"):
            raise ConfigError(
                f"{path}: is empty; write the settings as a JSON object, or {{}} for the defaults"
            ) from None
        if lenient is not None:
            return lenient
        colon = ":" if str(error)[:1].isdigit() else ": "  # the line and the column follow the name directly
        raise ConfigError(f"{path}{colon}{error}") from None
    except (OSError, ValueError) as error:  # a NUL in the name raises ValueError
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a JSON object is expected, not {type(raw).__name__}")
    return raw


def _read_hjson(path: Path) -> dict[str, Any] | None:
    """Return the file as DeepSpeed reads it: with comments, trailing commas, names without quotes.

    If the file is not hjson either, or not an object, the result is None.
    """
    import hjson  # only few files need it

    def take(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError("one section has a key twice")
        return dict(pairs)

    try:
        raw = parse_json(json.dumps(hjson.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=take)))
    except (
        Exception
    ):  # hjson raises various errors on damaged files; the message of the JSON parser says where the mistake is
        return None
    return raw if isinstance(raw, dict) else None


def _refuse_gpt_neox(raw: Mapping[str, Any]) -> None:
    """Raise ConfigError for a file of GPT-NeoX, which mixes DeepSpeed's keys with its own."""
    theirs = next((key for key in raw if key.replace("_", "-") in _GPT_NEOX), None)
    if theirs is not None:
        raise ConfigError(
            f"{theirs}: this is a key of GPT-NeoX, whose files also describe a model; write a file with DeepSpeed's "
            "keys only"
        )


_GPT_NEOX = frozenset({"pipe-parallel-size", "model-parallel-size", "num-layers", "hidden-size", "train-iters"})


def _apply_override(raw: dict[str, Any], override: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in override):  # bytes of the command line
        raise ConfigError(f"--set {shorten(override)}: it is not text in UTF-8")
    path, separator, text = override.partition("=")
    if not separator or not all(part.strip() for part in path.split(".")):
        raise ConfigError(f"--set {shorten(override)}: expected section.key=value")
    value = _value_of(text, path)
    *parents, key = path.strip().split(".")
    if len(parents) >= MOST_DEPTH // 2:  # the value may be nested, too
        raise ConfigError(
            f"--set {shorten(override)}: the key has {len(parents) + 1} components, and no key has so many"
        )
    section = raw
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise ConfigError(f"--set {shorten(override)}: {shorten(parent)} is not a section")
    section[key] = value


def _value_of(text: str, path: str) -> Any:
    try:
        return parse_json(text)
    except JsonError as error:
        if "not valid JSON" in str(error):
            return text
        raise ConfigError(f"--set {shorten(path)}: {error}") from None


def _problems(config: Config) -> Problems:
    """List the settings that this version cannot combine. None of them is ignored."""
    sdp, zero, training = config.sdp, config.zero_optimization, config.training
    tp, schedule, optimizer = config.tensor_parallel.autotp_size, config.masking_schedule, config.optimizer
    deepspeed, offloads = sdp.engine == "deepspeed", sdp.engine == "fsdp2" and zero.offloads
    offloaded = "offload_optimizer" if zero.offload_optimizer is not None else "offload_param"
    offload = f'zero_optimization.{offloaded}.device: "cpu" is not available in this version together with'
    with_deepspeed = 'is not available in this version together with sdp.engine "deepspeed"; use'
    return [
        (config.fp16.enabled and config.bf16.enabled,
            "fp16.enabled: true together with bf16.enabled; a model computes in one of them, remove the other"),
        (offloads and sdp.sync is not None, f'{offload} sdp.sync; use "none"'),
        (offloads and tp > 1, f'{offload} tensor_parallel.autotp_size above 1; use "none"'),
        (sdp.lr_scale != "none" and optimizer is not None and optimizer.type.lower() == "muon",
            f'sdp.lr_scale: {json.dumps(sdp.lr_scale)} is not available with optimizer.type '
            f'"{optimizer and optimizer.type}", which steps on whole matrices, not on units; use "none", or AdamW'),
        (sdp.granularity == "neuron" and sdp.units != "auto",
            'sdp.units: patterns name blocks; with sdp.granularity "neuron" leave it "auto", because the '
            "model itself names its branches"),
        (deepspeed and tp > 1, f'tensor_parallel.autotp_size: {tp} {with_deepspeed} 1, or "fsdp2"'),
        (deepspeed and training.compile, f'training.compile: true {with_deepspeed} false, or sdp.engine "fsdp2"'),
        (deepspeed and sdp.branch_scale != "none",
            f'sdp.branch_scale: "{sdp.branch_scale}" {with_deepspeed} "none", or sdp.engine "fsdp2"'),
        (deepspeed and bool(schedule.ends),
            'sdp.masking: a schedule is not available with sdp.engine "deepspeed", whose ZeRO needs the same '
            'order of modules in every step; use sdp.engine "fsdp2"'),
        (bool(schedule.ends) and sdp.sync is not None,
            'sdp.masking: a schedule is not available in this version together with sdp.sync; use "forward" or '
            '"backward"'),
        (sdp.branch_scale != "none" and "forward" not in sdp.maskings,
            f'sdp.branch_scale: "{sdp.branch_scale}" has no meaning with sdp.masking "backward", where all units run; '
            'use "none"'),
        (training.compile and tp > 1,
            "training.compile: true is not available in this version together with tensor_parallel.autotp_size above "
            "1; use false"),
    ]  # fmt: skip
