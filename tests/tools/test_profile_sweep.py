"""The sweep of profiles: what it trains is comparable, and what it prints is what the runs reached."""

import json
import subprocess
from pathlib import Path

import pytest
from sdp.engine.config import load_config
from sdp.engine.place import place
from sdp.engine.profiles import explicit_profile
from sdp.engine.units import find_neuron_units, find_units
from sdp.models.registry import build_model
from sdp.tools import profile_sweep as sweep


@pytest.mark.parametrize("capacity", sweep.CAPACITIES)
@pytest.mark.parametrize("units", [8, 64])
def test_linear_falls_at_the_capacitys_mean(units: int, capacity: float) -> None:
    holders = sweep.linear(units, capacity)
    assert sum(holders) == capacity * sweep.GROUPS * units
    assert min(holders) >= 1 and max(holders) <= sweep.GROUPS
    assert sum(holders[: units // 2]) > 1.2 * sum(holders[units // 2 :])


@pytest.mark.parametrize("task", sweep.TASKS)
def test_the_smaller_model_is_the_largest_that_a_group_has_memory_for(task: str) -> None:
    chosen, data = sweep.TASKS[task], {"vocab_size": 257} if task == "llama" else {"num_classes": 10, "image_size": 8}

    def count(size: int) -> int:
        return sum(p.numel() for p in build_model({**chosen.config["model"], chosen.size: size}, **data).parameters())

    units = sum(unit.numel for unit in find_units(build_model(chosen.config["model"], **data), "auto"))
    for capacity in sweep.CAPACITIES:
        size = sweep.smaller_size(task, capacity)
        held = count(chosen.full) - (1 - capacity) * units
        assert count(size) <= held < count(size + 1)


@pytest.mark.parametrize("cell", sweep.cells("llama", ["block", "neuron"], sweep.CAPACITIES, 1), ids=lambda cell: cell.name)
def test_every_configuration_is_one_and_every_group_has_room(tmp_path: Path, cell: sweep.Cell) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(cell.config(None)))
    config = load_config(path)
    assert config.train_batch_size in (None, 16)
    if cell.granularity:
        model = build_model(config.model, 257)
        units = find_units(model, "auto") if cell.granularity == "block" else find_neuron_units(model, sweep.NEURON_GROUPS)
        assert len(units) == sweep.TASKS["llama"].equal_units[cell.granularity]
        if isinstance(config.sdp.profile, list):
            assert explicit_profile(config.sdp, config.sdp.profile, cell.capacity * sweep.GROUPS, len(units)) == config.sdp.profile
        placement = place(config.sdp, units)
        held = [sum(unit.numel for unit in units if placement.holds(group, unit.index)) for group in range(sweep.GROUPS)]
        assert max(held) <= cell.capacity * sum(unit.numel for unit in units)


def planted(out: Path, cell: sweep.Cell, loss: float) -> None:
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
        for profile, loss in ((sweep.DENSE, 1.6), (sweep.SMALLER, 1.7)):
            planted(tmp_path, sweep.Cell("llama", "", 1.0 if profile == sweep.DENSE else 0.5, profile, seed), loss + shift)
        planted(tmp_path, sweep.Cell("llama", "block", 0.5, "depth", seed), 1.65 + shift)
    planted(tmp_path, sweep.Cell("llama", "", 0.75, sweep.SMALLER, 0), 1.61)
    text = sweep.report("llama", ["block"], [0.5, 0.75], 2, tmp_path)
    assert "| 0.5 | 1.6100 ± 0.0141 | 1.7100 ± 0.0141 | – | – | 1.6600 ± 0.0141 | yes |" in text
    assert "| 0.75 | 1.6100 ± 0.0141 | 1.6100 | – | – | – | ? |" in text
    assert (tmp_path / "llama.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "llama.json").read_text())["block"][0]["seeds"] == 2


def test_a_finished_run_is_not_repeated_and_one_that_was_cut_off_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Path] = []

    def train(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
        assert not folder.exists()
        trained.append(config)
        planted(tmp_path, cell, 1.0)
        return subprocess.CompletedProcess([], 1, "", "" if len(trained) == 1 else "one\nlast")

    monkeypatch.setattr(sweep, "_train", train)
    cell = sweep.Cell("llama", "", 1.0, sweep.DENSE, 0)
    assert sweep.run_cell(cell, tmp_path, None) == f"{cell.name}: exit code 1"
    assert sweep.run_cell(cell, tmp_path, None) is None
    (tmp_path / cell.name / "summary.json").unlink()
    assert sweep.run_cell(cell, tmp_path, None) == f"{cell.name}: last"
    assert sweep.run_cell(cell, tmp_path, tmp_path) is not None  # by other data
    assert len(trained) == 3
