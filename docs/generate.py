"""Writes docs/configuration.md, docs/commands.md and docs/changes.md from the schema, the commands
and the tables of what was removed.

    python docs/generate.py

The pages are committed, so that they can be read without building the site. ``make docs`` runs
this script first, and tests/test_docs.py fails if a page differs from what it would write.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from sdp.engine.config import deepspeed_keys, removed
from sdp.engine.config.method import (
    CopiesSection,
    MaskingPhase,
    OuterSGDParams,
    PathsSection,
    ServiceSection,
    SyncSection,
)
from sdp.engine.config.named_params import SCHEDULES, AdamParams, MuonParams, SGDParams
from sdp.engine.config.schema import Config
from sdp.engine.config.section import Section
from sdp.models.registry import MODELS
from sdp.tools import cli

DOCS = Path(__file__).resolve().parent
TOP_LEVEL = "top level"

_EDITED = "<!-- Written by docs/generate.py. Do not edit this page: edit {source}. -->\n\n"

_CONFIGURATION = """# Configuration

A run is described by one JSON file. Keys that DeepSpeed has keep DeepSpeed's names and meanings.
The sections `sdp`, `model`, `data` and `training` are ours.

```
sdp config FILE                  # the file with all defaults filled in
sdp config FILE --set sdp.capacity=0.75 training.steps=20
sdp config --schema              # the JSON schema, for editors
```

An unknown key, a wrong type or a value out of range is an error of one line. Values are never
converted: `"4"` is not accepted for `4`. `--set SECTION.KEY=VALUE` overrides one key; the value is
JSON, or a bare string.
"""

_COMMANDS = """# Command line

`sdp COMMAND --help` prints what this page lists. Options must be written in full.

| exit code | meaning |
|---|---|
| 0 | The command succeeded. |
| 1 | The program or the run failed: a rank died, a gradient stayed NaN, memory ran out. |
| 2 | A mistake in the input. One line says what is wrong and what to do. |
| 128 + n | Signal n ended a run after it wrote a checkpoint. |
| 130 | Interrupted with Ctrl-C. |
| 141 | Nobody reads the output any more, for example because it is piped to `head`. |
"""


_CHANGES = """# What changed in this version

If you use a key, value, command or option that was removed, one line says what to use instead:

```
$ sdp config configs/quickstart.json --set training.tokens=1000000
sdp: error: training.tokens: this key was removed; use training.steps: divide the tokens by train_batch_size and \
data.sequence_length
```

The tables below list what was removed. This version has one way to do each thing.
Programs that only a laboratory needs are in `lab/`, which is not installed. The last commit before
these changes has the tag `before-one-runtime`.

## Runs and checkpoints of earlier versions

| what | what happens |
|---|---|
| a configuration without removed keys | It runs as before. |
| a checkpoint of an earlier version | Refused with one line. Finish the run with the tag, or export the checkpoint \
with the tag and set `training.init_from`. |
| an exported Hugging Face folder | Every version reads it. |
| `sdp.placement` "balanced" | The algorithm is new, so groups may hold other blocks. To keep the old blocks, \
give the holders in the old run's `placement.json` as `sdp.placement`. |
| `sdp.engine` "deepspeed" at stage 0 | The engine "fsdp2" runs, and a line at the start says so. |
| `sdp.engine` "deepspeed" with `sdp.sync` or a schedule of maskings | Refused with one line. Use "fsdp2". |
| a DeepSpeed checkpoint in `training.init_from` | Refused with one line. Convert it first, with its \
`zero_to_fp32.py`. |
| scripts with `import sdp as deepspeed` | Keep `import deepspeed`, and call `sdp.initialize` in place of \
`deepspeed.initialize`. |
| scripts with the Lightning strategy | Use Accelerate or the Trainer with `sdp.integrations`, or a loop of your own. |
| objects of Python in a `client_state` | Refused with one line. JSON and tensors are saved. |
"""


def config_sections() -> Iterator[tuple[str, type[Section]]]:
    """Name and schema of every section of the configuration file, in the order of the page."""
    yield TOP_LEVEL, Config
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield name, field.annotation
        if name == "sdp":
            yield "sdp.masking", MaskingPhase
            yield "sdp.copies", CopiesSection
            yield "sdp.sync", SyncSection
            yield "sdp.sync.outer_optimizer.params", OuterSGDParams
            yield "sdp.sync.service", ServiceSection
            yield "sdp.paths", PathsSection
    yield "optimizer (AdamW, Adam, FusedAdam)", AdamParams
    yield "optimizer (SGD)", SGDParams
    yield "optimizer (Muon)", MuonParams
    for name, schema in SCHEDULES.items():
        yield f"scheduler ({name})", schema
    for name, entry in MODELS.items():
        yield f"model ({name})", entry.config


def read_meanings() -> dict[str, dict[str, str]]:
    """What docs/keys.toml says of every key, by section."""
    return tomllib.loads((DOCS / "keys.toml").read_text(encoding="utf-8"))


def keys_of(schema: type[Section]) -> list[str]:
    """The keys of ``schema`` that have a row. Its sub-sections have tables of their own."""
    kinds = {name: field.annotation for name, field in schema.model_fields.items()}
    return [name for name, kind in kinds.items() if not (isinstance(kind, type) and issubclass(kind, Section))]


def configuration_page() -> str:
    """The page with every key, its values, its default and its meaning."""
    meanings = read_meanings()
    parts = [_EDITED.format(source="docs/keys.toml or the schema"), _CONFIGURATION]
    family = ""
    for name, schema in config_sections():
        title, _, variant = name.partition(" (")
        if title != family:
            heading = "Top-level keys" if name == TOP_LEVEL else f"`{title}`"
            parts.append(f"\n## {heading}\n\n{_INTRODUCTIONS.get(title, '')}")
        if variant:
            parts.append(f"\n### `{variant.rstrip(')').replace(', ', '`, `')}`\n\n")
        family = title
        parts += _key_rows(schema, meanings[name])
    return "".join(parts) + _deepspeed_keys()


_INTRODUCTIONS = {
    "sdp": "Which group of ranks holds which part of the model.\n\n",
    "sdp.masking": "One phase of a masking schedule. [Concepts](concepts.md#a-masking-schedule) has an example.\n\n",
    "sdp.copies": "The object `copies` says how frozen copies are kept under backward masking.\n"
    "[Concepts](concepts.md#copies-that-cost-less) has an example.\n\n",
    "sdp.sync": "Local steps. [Slow links](slow_links.md) says when to use them.\n\n",
    "sdp.sync.outer_optimizer.params": "The `outer_optimizer` moves the anchors by the mean change of the holders:\n"
    '`{"type": "SGD", "params": {…}}`. If it is not given, `lr` is 0.7, with Nesterov momentum 0.9, as in DiLoCo.\n'
    "With `lr` 1 and without momentum, it is plain averaging.\n\n",
    "sdp.sync.service": "[Groups that come and go](groups_that_come_and_go.md) has an example.\n\n",
    "sdp.paths": "Models that share some units. [Paths](paths.md) has an example.\n\n",
    "zero_optimization": "How a group shards its state among its own ranks.\n\n",
    "data": "What to train on. [Data](data.md) and [Images](images.md) have examples.\n\n",
    "training": "Length of the run, evaluation, checkpoints and time limits. `sdp train` reads them.\n\n",
    "optimizer": '`{"type": NAME, "params": {…}}`. Upper and lower case of the name do not matter.\n',
    "scheduler": '`{"type": NAME, "params": {…}}`.\n',
    "model": '`{"name": NAME, …}`. Your own model is trained [from Python](your_model.md).\n',
    "fp16": "DeepSpeed's section. [Migrating from DeepSpeed](deepspeed.md) says what differs.\n\n",
}


def _key_rows(schema: type[Section], meanings: Mapping[str, str]) -> Iterator[str]:
    described = schema.model_json_schema()
    required = described.get("required", [])
    yield "| key | values | default | meaning |\n|---|---|---|---|\n"
    for key in keys_of(schema):
        field = described["properties"][key]
        factory = schema.model_fields[key].default_factory
        default = field.get("default", factory() if factory is not None else None)  # type: ignore[call-arg]
        shown = "required" if key in required else f"`{json.dumps(default)}`"
        yield f"| `{key}` | {_cell(_values(field, described.get('$defs', {})))} | {shown} | {_cell(meanings[key])} |\n"


def _values(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows, in words."""
    if "$ref" in field:
        return "object" if field["$ref"].rpartition("/")[2] in definitions else "value"
    if "anyOf" in field:
        return " or ".join(_values(choice, definitions) for choice in field["anyOf"])
    if "enum" in field or "const" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field.get("enum", [field.get("const")]))
    kind = field.get("type")
    if kind == "array":
        return f"list of {_values(field['items'], definitions)}" if field.get("items") else "list"
    if kind in ("integer", "number"):
        return f"{kind}{_bounds(field)}"
    return "`null`" if kind == "null" else str(kind or "any")


def _bounds(field: Mapping[str, Any]) -> str:
    words = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    return ",".join(f" {sign} {_round_number(field[key])}" for key, sign in words.items() if key in field)


def _round_number(value: float) -> str:
    """``value``, written as a power of two where that is shorter."""
    exponent = value.bit_length() - 1 if isinstance(value, int) and value > 2**10 else 0
    return f"2^{exponent}" if exponent and value == 2**exponent else f"{value:g}"


def _deepspeed_keys() -> str:
    hints = ", ".join(f"`{key}`" for key in sorted(deepspeed_keys.HINTS))
    kept = ", ".join(f"`{key}`" for key in sorted(deepspeed_keys.HINTS & deepspeed_keys.KEPT_FROM_DEEPSPEED))
    sections = "".join(f"| `{key}` | {why} |\n" for key, why in deepspeed_keys.HINT_SECTIONS.items())
    moved = deepspeed_keys.HINTS | {"zero_optimization.offload_optimizer", "zero_optimization.offload_param"}
    ignored = "".join(
        f"| `{key}` | {why} |\n"
        for key, why in deepspeed_keys.IGNORED_BY_DEEPSPEED.items()
        if f"zero_optimization.{key}" not in moved
    )
    refused = "".join(
        f"| `{key}` | {_any_of(values)} | {_any_of(deepspeed_keys.HONOURED_BY_DEEPSPEED.get(key, values))} | "
        f"{_cell(why)} |\n"
        for key, (values, why) in deepspeed_keys.REFUSED.items()
    )
    return (
        "\n## DeepSpeed's other keys\n\nThese performance hints are accepted and listed once at the start. They have "
        "no effect with `sdp.engine` "
        '`"fsdp2"`. With `"deepspeed"`, DeepSpeed acts on them, except on those of `activation_checkpointing` and on '
        f"{kept}.\n\n"
        f"{hints}\n\nThese sections are accepted in the same way:\n\n| section | why it has no effect |\n|---|---|\n"
        + sections
        + "\n"
        "DeepSpeed ignores these keys, and so do we. A warning at the start says so. The same holds for "
        "`offload_optimizer`, `offload_param` and the hints of `zero_optimization` at the top level of the file.\n\n"
        "| key | why it has no effect |\n|---|---|\n" + ignored + "\n"
        "These keys would change what is computed. Each is accepted only with the values listed here, and is an error "
        "with any other value.\n\n"
        '| key | `"fsdp2"` accepts | `"deepspeed"` accepts | why not others |\n|---|---|---|---|\n' + refused
    )


def _any_of(values: Sequence[Any]) -> str:
    texts = dict.fromkeys(json.dumps(value) for value in values if value != 1.0 or isinstance(value, bool | int))
    return ", ".join(f"`{text}`" for text in texts)


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """A parser with the arguments of every command, by the command's name."""
    parsers = {}
    for name, (_, text) in cli.COMMANDS.items():
        parsers[name] = argparse.ArgumentParser(prog=f"sdp {name}", description=text)
        cli.module_of(name).add_arguments(parsers[name])
    return parsers


def commands_page() -> str:
    """The page with every command, its options, their defaults and meanings."""
    parts = [_EDITED.format(source="the commands' help texts"), _COMMANDS]
    for name, parser in _with_sub_commands(command_parsers()):
        actions = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
        actions = [action for action in actions if not isinstance(action, argparse._SubParsersAction)]
        positional = [_operand(action) for action in actions if not action.option_strings]
        usage = " ".join(["sdp", name, *(["[OPTIONS]"] if len(actions) > len(positional) else []), *positional])
        summary = f"{(parser.description or '')[:1].upper()}{(parser.description or '')[1:]}"
        level = "###" if " " in name else "##"
        parts.append(f"\n{level} sdp {name}\n\n{summary.rstrip('.')}.\n\n```\n{usage}\n```\n")
        for group in parser._action_groups:
            own = [action for action in group._group_actions if action in actions]
            if own:
                title = "" if group.title in ("positional arguments", "options") else f"\n**{group.title}**\n"
                parts += [title, "\n| argument | default | meaning |\n|---|---|---|\n", *map(_argument_row, own)]
    return "".join(parts)


def _with_sub_commands(
    parsers: Mapping[str, argparse.ArgumentParser],
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every parser with its command, each followed by those of its sub-commands."""
    for name, parser in parsers.items():
        yield name, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from ((f"{name} {sub}", inner) for sub, inner in action.choices.items())


def _operand(action: argparse.Action) -> str:
    word = str(action.metavar or action.dest.upper())
    forms = {"?": f"[{word}]", "*": f"[{word} …]", "+": f"{word} [{word} …]", "...": f"{word} [OPTIONS OF sdp train]"}
    return forms.get(str(action.nargs), word).replace("… [", "[")


def _argument_row(action: argparse.Action) -> str:
    help_text, default = action.help or "", action.default
    stated = re.search(r" \(default: (.*)\)$", help_text)
    if stated:
        help_text, shown = help_text[: stated.start()], stated[1]
    elif action.required and action.option_strings:
        shown = "required"
    else:
        shown = "" if default in (None, False, []) else f"`{default}`"
    word = f"{{{','.join(map(str, action.choices))}}}" if action.choices and not action.metavar else action.metavar
    word = cast("str | None", word) or ("" if action.nargs == 0 else action.dest.upper())
    word = f"[{word}]" if action.nargs == "?" else word
    name = " ".join(filter(None, [", ".join(action.option_strings), word]))
    return f"| `{_cell(name)}` | {_cell(shown)} | {_cell(help_text)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def changes_page() -> str:
    """Return the page that lists what was removed, and what to use instead."""

    def table(title: str, rows: Mapping[str, str]) -> str:
        names: dict[str, list[str]] = {}
        for name, advice in sorted(rows.items()):
            names.setdefault(advice, []).append(f"`{name}`")
        lines = [f"| {', '.join(some)} | {_cell(advice)} |" for advice, some in names.items()]
        return "\n".join([f"\n## {title}\n", "| removed | instead |", "|---|---|", *lines, ""])

    values = {f"{path}: {json.dumps(value)}": advice for (path, value), advice in removed.VALUES.items()}
    options = {f"sdp {command} {option}": advice for (command, option), advice in removed.OPTIONS.items()}
    commands = {f"sdp {command}": advice for command, advice in removed.COMMANDS.items()}
    return (
        _EDITED.format(source="docs/generate.py and engine/config/removed.py")
        + _CHANGES
        + table("Keys of the configuration", removed.KEYS)
        + table("Values", values)
        + table("Commands", commands)
        + table("Options", options)
    )


PAGES = {"configuration.md": configuration_page, "commands.md": commands_page, "changes.md": changes_page}


def main() -> None:
    """Write the pages that changed."""
    for name, make in PAGES.items():
        path, text = DOCS / name, make()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
