"""The sweep of profiles: what it trains is comparable, and what it prints is what the runs
reached.
"""

import json
import subprocess
from pathlib import Path

import pytest
from sdp.data.prepare import prepare
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError
from sdp.engine.placement.policies import make_placement
from sdp.engine.placement.profiles import explicit_profile
from sdp.engine.placement.units import find_neuron_units, find_units
from sdp.models.registry import build_model
from sdp.tools.cli import main
from sdp.tools.study.cells import (
    CAPACITIES,
    DENSE,
    DROPOUT,
    GROUPS,
    NEURON_GROUPS,
    SMALLER,
    STOCHASTIC_DEPTH,
    TASKS,
    Cell,
    Sweep,
    linear,
    smaller_size,
)
from sdp.tools.study.profiles import best_rate, report
from sdp.tools.study.runs import run_one


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("units", [8, 64])
def test_linear_falls_at_the_capacitys_mean(units: int, capacity: float) -> None:
    holders = linear(units, capacity)
    assert sum(holders) == capacity * GROUPS * units
    assert min(holders) >= 1 and max(holders) <= GROUPS
    assert sum(holders[: units // 2]) > 1.2 * sum(holders[units // 2 :])


@pytest.mark.parametrize("task", TASKS)
def test_the_smaller_model_is_the_largest_that_a_group_has_memory_for(task: str) -> None:
    chosen, data = TASKS[task], {"vocab_size": 257} if task == "llama" else {"num_classes": 10, "image_size": 8}

    def count(size: int) -> int:
        return sum(p.numel() for p in build_model({**chosen.config["model"], chosen.size: size}, **data).parameters())

    units = sum(unit.numel for unit in find_units(build_model(chosen.config["model"], **data), "auto"))
    for capacity in CAPACITIES:
        size = smaller_size(task, capacity)
        held = count(chosen.full) - (1 - capacity) * units
        assert count(size) <= held < count(size + 1)


@pytest.mark.parametrize(
    "cell", Sweep("llama", ["block", "neuron"], CAPACITIES, 1, controls=True).cells(), ids=lambda cell: cell.name
)
def test_every_configuration_is_one_and_every_group_has_room(tmp_path: Path, cell: Cell) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(cell.config(None)))
    config = load_config(path)
    assert config.train_batch_size in (None, 16)
    if cell.granularity:
        model = build_model(config.model, 257)
        units = find_units(model, "auto") if cell.granularity == "block" else find_neuron_units(model, NEURON_GROUPS)
        assert len(units) == TASKS["llama"].equal_units[cell.granularity]
        if isinstance(config.sdp.profile, list):
            assert (
                explicit_profile(config.sdp, config.sdp.profile, cell.capacity * GROUPS, len(units))
                == config.sdp.profile
            )
        placement = make_placement(config.sdp, units)
        held = [sum(unit.numel for unit in units if placement.holds(group, unit.index)) for group in range(GROUPS)]
        assert max(held) <= cell.capacity * sum(unit.numel for unit in units)


def test_a_sweep_has_every_run_once_and_controls_and_matched_runs_where_they_are_asked_for() -> None:
    sweep = Sweep("llama", ["block", "neuron"], [0.25, 0.5], 3)
    plain = sweep.cells()
    assert len(plain) == len(set(plain)) == 1 + 2 + 2 * 2 * 3
    assert [run.seed for run in sweep.others(plain)] == [1] * len(plain) + [2] * len(plain)
    more = Sweep("llama", ["block"], [0.5], 1, ["depth"], controls=True, matched=True).cells()
    assert [(cell.profile, cell.matched) for cell in more] == [
        ("dense", False), ("dropout", False), ("stochastic depth", False), ("smaller dense", False), ("depth", False),
        ("smaller dense", True), ("depth", True),
    ]  # fmt: skip
    assert len({cell.name for cell in more}) == len(more)


def test_controls_are_the_dense_model_with_dropout_and_with_stochastic_depth() -> None:
    dense, dropout, depth = (
        Cell("llama", "", 1.0, profile, 0).config(None) for profile in (DENSE, DROPOUT, STOCHASTIC_DEPTH)
    )
    assert dropout["model"] == dense["model"] | {"attention_dropout": 0.1, "residual_dropout": 0.1}
    assert depth["model"] == dense["model"] | {"stochastic_depth": 0.5}
    assert dropout["sdp"] == depth["sdp"] == dense["sdp"]


def test_a_task_without_controls_or_with_other_profiles_says_so() -> None:
    with pytest.raises(ConfigError, match="--controls: resnet18 has no controls"):
        Sweep("resnet18", ["block"], [0.5], 1, controls=True)
    with pytest.raises(ConfigError, match="--profile linear: resnet18 has uniform, depth"):
        Sweep("resnet18", ["block"], [0.5], 1, ["linear"])


def _prepared(folder: Path) -> Path:
    """A small corpus in ``folder``."""
    for number in range(10):
        (folder / f"{number}.txt").write_text(f"text {number}\n" * 100)
    prepare([str(folder / "*.txt")], folder / "shards", tokenizer="bytes", held_out=0.2, workers=1, progress=False)
    return folder / "shards"


def test_matched_runs_have_the_operations_of_the_dense_run(tmp_path: Path) -> None:
    """By the plan's trace; here against the model's own statement of its operations."""
    cell = Cell("llama", "block", 0.5, "uniform", 0, matched=True)
    config = cell.config(_prepared(tmp_path))
    model = build_model(config["model"], 257)
    stated = model.flops_per_token(64)
    shared, units = stated.pop("shared"), sum(stated.values())
    steps = config["training"]["steps"]
    assert steps == pytest.approx(1000 * (units + shared) / (0.5 * units + shared), rel=0.01)
    assert steps < 1000 / 0.5  # of the shared part nothing is saved
    assert config["scheduler"]["params"] == {
        "warmup_num_steps": round(steps / 10), "total_num_steps": steps, "decay_num_steps": round(steps / 2)
    }  # fmt: skip
    assert config["training"]["evaluate_every"] == steps
    assert config["model"] == Cell("llama", "block", 0.5, "uniform", 0).config(None)["model"]


def test_each_method_has_every_rate_with_seed_0_and_the_best_one_with_the_others(tmp_path: Path) -> None:
    sweep = Sweep("llama", ["block"], [0.5], 2, ["depth"], rates=[0.1, 0.2, 0.3])
    cell = sweep.cell("block", 0.5, "depth")
    assert [run.config(None)["optimizer"]["params"]["lr"] for run in sweep.tried(cell)] == [0.1, 0.2, 0.3]
    assert best_rate(sweep, cell, tmp_path) is None
    for run, loss in zip(sweep.tried(cell), (1.9, 1.5, 1.7), strict=True):
        planted(tmp_path, run, loss)
    best = best_rate(sweep, cell, tmp_path)
    assert best is not None and best.rate == 0.2
    (other,) = sweep.others([best])
    assert (other.seed, other.rate) == (1, 0.2)
    planted(tmp_path, other, 1.6)
    assert "| – | – | 1.5500 ± 0.0707, rate 0.2 | ? |" in report(sweep, tmp_path)
    (row,) = json.loads((tmp_path / "llama.json").read_text())["block"]
    assert (row["rate"], row["by_seed"]) == (0.2, [1.5, 1.6])
    assert sweep.tried(cell)[0].name == "llama-block-0.5-depth-lr0.1-seed0"


def test_with_one_rate_the_other_seeds_do_not_wait_for_seed_0(tmp_path: Path) -> None:
    sweep = Sweep("llama", ["block"], [0.5], 3, ["depth"])
    cell = sweep.cell("block", 0.5, "depth")
    assert best_rate(sweep, cell, tmp_path) == cell
    planted(tmp_path, sweep.others([cell])[0], 1.6)
    assert "| – | – | 1.6000 | ? |" in report(sweep, tmp_path)


def test_a_matched_run_has_as_many_steps_with_every_rate(tmp_path: Path) -> None:
    sweep = Sweep("llama", ["block"], [0.5], 1, ["depth"], matched=True, rates=[0.1, 0.2])
    runs = sweep.tried(sweep.cell("block", 0.5, "depth", matched=True))
    assert [run.name.endswith(f"lr{run.rate}-seed0-matched") for run in runs] == [True, True]
    steps = [run.config(_prepared(tmp_path))["training"]["steps"] for run in runs]
    assert steps[0] == steps[1] > 1000


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf", "fast"])
def test_a_rate_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], rate: str) -> None:
    assert main(["study", "profiles", str(tmp_path), f"--learning-rate={rate}"]) == 2
    assert "--learning-rate" in capsys.readouterr().err


def planted(out: Path, cell: Cell, loss: float) -> None:
    folder = out / cell.name
    folder.mkdir(parents=True)
    for name, content in (
        ("config.json", "{}"),
        ("summary.json", "{}"),
        ("evaluations.jsonl", json.dumps({"step": 9, "loss": loss}) + "\n"),
    ):
        (folder / name).write_text(content)


def test_a_table_has_means_deviations_and_whether_size_pays(tmp_path: Path) -> None:
    for seed, shift in enumerate((0.0, 0.02)):
        for profile, loss in ((DENSE, 1.6), (SMALLER, 1.7)):
            planted(tmp_path, Cell("llama", "", 1.0 if profile == DENSE else 0.5, profile, seed), loss + shift)
        planted(tmp_path, Cell("llama", "block", 0.5, "depth", seed), 1.65 + shift)
    planted(tmp_path, Cell("llama", "", 0.75, SMALLER, 0), 1.61)
    text = report(Sweep("llama", ["block"], [0.5, 0.75], 2), tmp_path)
    assert "| 0.5 | 1.6100 ± 0.0141 | 1.7100 ± 0.0141 | – | – | 1.6600 ± 0.0141 | yes |" in text
    assert "| 0.75 | 1.6100 ± 0.0141 | 1.6100 | – | – | – | ? |" in text
    assert (tmp_path / "llama.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "llama.json").read_text())["block"][0]["seeds"] == 2


def test_matched_figures_stand_beside_those_of_as_many_steps(tmp_path: Path) -> None:
    planted(tmp_path, Cell("llama", "", 1.0, DENSE, 0), 1.6)
    planted(tmp_path, Cell("llama", "", 1.0, DROPOUT, 0), 1.7)
    planted(tmp_path, Cell("llama", "block", 0.5, "depth", 0), 1.65)
    planted(tmp_path, Cell("llama", "block", 0.5, "depth", 0, matched=True), 1.62)
    text = report(Sweep("llama", ["block"], [0.5], 1, ["depth"], controls=True, matched=True), tmp_path)
    assert "| C | dense | dropout | stochastic depth | smaller dense | depth | size pays |" in text
    assert "| 0.5 | 1.6000 | 1.7000 | – | – | 1.6500 | ? |" in text
    assert "| 0.5, FLOP-matched | 1.6000 (9 steps) | 1.7000 (9 steps) | – | – | 1.6200 (9 steps) | ? |" in text
    names = [row["profile"] for row in json.loads((tmp_path / "llama.json").read_text())["block"]]
    assert names == ["dense", "dropout", "depth", "depth, FLOP-matched"]


def test_a_finished_run_is_not_repeated_and_one_that_was_cut_off_is(
    tmp_path: Path,
) -> None:
    trained: list[Path] = []

    def train(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
        assert not folder.exists()
        trained.append(config)
        planted(tmp_path, cell, 1.0)
        return subprocess.CompletedProcess([], 1, "", "" if len(trained) == 1 else "one\nlast")

    cell = Cell("llama", "", 1.0, DENSE, 0)
    assert run_one(cell, tmp_path, None, train) == f"{cell.name}: exit code 1"
    assert run_one(cell, tmp_path, None, train) is None
    (tmp_path / cell.name / "summary.json").unlink()
    assert run_one(cell, tmp_path, None, train) == f"{cell.name}: last"
    assert run_one(cell, tmp_path, tmp_path, train) is not None  # by other data
    assert len(trained) == 3
