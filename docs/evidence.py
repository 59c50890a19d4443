"""Write tools/advise/evidence.json, which ``sdp advise`` reads, from the figures in docs/data/.

Run ``python docs/evidence.py`` after a change of the figures. It needs nothing of this package.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
TARGET = DOCS.parent / "tools" / "advise" / "evidence.json"

# Every grid but lengths_small trains the same model: 8 blocks of width 32 with byte tokens.
PARAMETERS = 115_264
PARAMETERS_OF_LENGTHS = 31_008  # width 16
GROUPS = 8  # of all grids but those of the workers and of local steps
SETTING = {"parameters": [PARAMETERS_OF_LENGTHS, PARAMETERS], "tokens_of_group": 128}
_TOKENS_OF_STEP = 1024
_STEPS_OF_PROFILES, _STEPS_OF_WORKERS = 1000, 600  # of each cell

# By page, the cells that are evidence: their row, and the method of sdp advise.
METHODS = {"dense": "dense", "dense (DDP, DiLoCo)": "dense", "smaller dense, equal memory": "smaller dense",
           "forward": "forward", "SDP forward": "forward", "backward": "backward", "SDP backward": "backward",
           "forward, then backward": "forward, then backward"}  # fmt: skip
SIX_BLOCKS = "dense, six blocks"  # of eight
EPOCHS = 49  # of the runs on the digits: 1,100 steps of 64 of 1,437 images
# The best regularisation of each method there, which was trained with nine seeds.
BEST_ON_DIGITS = {"dense": "dense-stochastic_depth_0.1", "smaller dense": "smaller_dense_equal_memory-none",
                  "forward": "forward-none", "backward": "backward-dropout_0.1"}  # fmt: skip
RATE_ON_DIGITS, SEEDS_ON_DIGITS = 0.016, 9
SCHEDULE, ONE_RATE = "forward, then backward", ", one rate"


def read(name: str) -> Any:
    """Return the figures in docs/data/``name``.json."""
    return json.loads((DOCS / "data" / f"{name}.json").read_text(encoding="utf-8"))


def tokens_per_parameter(steps: int, tokens: int = _TOKENS_OF_STEP) -> float:
    """How many tokens per parameter are so many steps, each with so many tokens."""
    return round(steps * tokens / PARAMETERS, 1)


def gap(
    method: str,
    every: int,
    capacity: float,
    cell: Mapping[str, Any],
    dense: Mapping[str, Any],
    page: str,
    groups: int = GROUPS,
) -> Any:
    """The difference of two cells, with its deviation."""
    spread = math.hypot(cell["spread"], dense["spread"]) if cell is not dense else 0.0
    return {
        "method": method,
        "every": every,
        "groups": groups,
        "capacity": capacity,
        "tokens_per_parameter": tokens_per_parameter(cell.get("steps", _STEPS_OF_PROFILES)),
        "gap": round(cell["mean"] - dense["mean"], 4),
        "spread": round(spread, 4),
        "seeds": cell["seeds"],
        "source": f"docs/results/{page}.md",
    }


def of_instruments() -> Iterator[Any]:
    """SDP and both dense models, with averages in every step, at the better of the two rates that
    have three seeds. The schedule has the better of two: with rates by holders, or without.
    """
    cells: dict[str, Any] = {}
    for cell in [*read("instruments")["cells"], *read("instruments_rates")["cells"]]:
        row, column = cell["row"], cell["column"]
        wanted = ["uniform"] if "dense" in row else ["depth, rates by holders"]
        if row == SCHEDULE:
            wanted.append("depth")
        if column in wanted and (row not in cells or cell["mean"] < cells[row]["mean"]):
            cells[row] = cell
    for row, cell in cells.items():
        yield gap(METHODS[row], 1, 1.0 if row == "dense" else 0.5, cell, cells["dense"], "instruments")


def of_local_steps() -> Iterator[Any]:
    """Local steps, against the dense model that averages in every step."""
    cells = {(cell["row"], cell["column"]): cell for cell in read("local_steps_rates")["cells"]}
    dense = cells["dense (DDP, DiLoCo)", "every step"]
    study = json.loads((DOCS.parent / "configs" / "studies" / "local_steps.json").read_text(encoding="utf-8"))
    groups = study["base"]["sdp"]["groups"]
    for (row, column), cell in cells.items():
        if column != "every step":
            capacity = 1.0 if row.startswith("dense") else 0.5
            yield gap(METHODS[row], int(column.removeprefix("H = ")), capacity, cell, dense, "local_steps", groups)


def of_profiles() -> Iterator[Any]:
    """Other capacities than 0.5, under forward masking with the profile "depth"."""
    rows = read("profiles")["llama"]["block"]
    for row in rows:
        method = {"smaller dense": "smaller dense", "depth": "forward"}.get(row["profile"])
        if row["capacity"] != 0.5 and method is not None:
            (dense,) = (one for one in rows if (one["capacity"], one["profile"]) == (row["capacity"], "dense"))
            yield gap(method, 1, row["capacity"], row, dense, "profiles")


def of_workers() -> Iterator[Any]:
    """Other numbers of groups or capacities than those of the instruments, with at least two seeds.
    Differences are seed by seed. The schedule has the better of two, as above.
    """
    lowest: dict[tuple[str, int, float], Any] = {}
    for each in [*read("workers")["differences"], *read("workers_many")["differences"]]:
        groups, row = int(each["column"].split()[0]), each["row"]
        if row == SIX_BLOCKS:
            method, capacity = "smaller dense", 0.75
        elif row.startswith("smaller dense, memory"):
            method, capacity = "smaller dense", float(row.rpartition(" ")[2])
        else:
            name, _, other = row.removesuffix(ONE_RATE).partition(", C = ")
            method, capacity = METHODS[name], float(other or 0.5)
        key = method, groups, capacity
        is_new = (groups, capacity) != (GROUPS, 0.5) and each["less"] == "dense" and each["seeds"] > 1
        if is_new and (key not in lowest or each["mean"] < lowest[key]["mean"]):
            lowest[key] = each
    for (method, groups, capacity), each in lowest.items():
        yield {
            "method": method,
            "every": 1,
            "groups": groups,
            "capacity": capacity,
            "tokens_per_parameter": tokens_per_parameter(_STEPS_OF_WORKERS, groups * SETTING["tokens_of_group"]),
            "gap": round(each["mean"], 4),
            "spread": round(each["spread"], 4),
            "seeds": each["seeds"],
            "source": "docs/results/workers.md",
        }


def of_lengths() -> Iterator[Any]:
    """Longer training than that of the instruments, which are of a larger model at about 10 tokens
    per parameter. At equal steps, with at least two seeds.
    """
    for each in read("lengths_small")["differences"]:
        length = float(each["column"].split()[0])
        is_longer = length > 2 * tokens_per_parameter(_STEPS_OF_PROFILES)
        methods = {row: (method, 0.5) for row, method in METHODS.items()} | {SIX_BLOCKS: ("smaller dense", 0.75)}
        if each["less"] == "dense" and each["row"] in methods and is_longer and each["seeds"] > 1:
            method, capacity = methods[each["row"]]
            yield {
                "method": method,
                "every": 1,
                "groups": GROUPS,
                "capacity": capacity,
                "tokens_per_parameter": length,
                "gap": round(each["mean"], 4),
                "spread": round(each["spread"], 4),
                "seeds": each["seeds"],
                "source": "docs/results/lengths.md",
            }


def curves() -> dict[str, list[Any]]:
    """By method, the mean losses after training of three lengths, in tokens per parameter."""
    cells = [cell for cell in read("lengths_small")["cells"] if cell["row"] in METHODS]
    points = [
        (METHODS[cell["row"]], [float(cell["column"].split()[0]), round(cell["mean"], 4)])
        for cell in sorted(cells, key=lambda cell: cell["steps"])
    ]
    return {method: [point for other, point in points if other == method] for method in METHODS.values()}


def many_epochs() -> dict[str, Any]:
    """The lowest held-out losses of each method on the digits: mean and deviation."""
    runs = read("epochs_digits_rates")["results"]["runs"]
    found = {
        method: [runs[f"{cell}-lr{RATE_ON_DIGITS}-seed{seed}"]["least"] for seed in range(SEEDS_ON_DIGITS)]
        for method, cell in BEST_ON_DIGITS.items()
    }
    return {
        "epochs": EPOCHS,
        "seeds": SEEDS_ON_DIGITS,
        "source": "docs/results/digits.md",
        "losses": {
            method: [round(statistics.mean(losses), 4), round(statistics.stdev(losses), 4)]
            for method, losses in found.items()
        },
    }


def evidence() -> dict[str, Any]:
    """Return the content of the file."""
    gaps = [*of_instruments(), *of_local_steps(), *of_profiles(), *of_workers(), *of_lengths()]
    groups = [choose(gap["groups"] for gap in gaps) for choose in (min, max)]
    lengths = [choose(gap["tokens_per_parameter"] for gap in gaps) for choose in (min, max)]
    setting = SETTING | {"groups": groups, "tokens_per_parameter": lengths}
    return {
        "setting": setting,
        "curves": curves(),
        "curves_source": "docs/results/lengths.md",
        "gaps": gaps,
        "many_epochs": many_epochs(),
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(evidence(), indent=1) + "\n", encoding="utf-8")
