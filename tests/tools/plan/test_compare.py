"""``sdp plan CONFIG --compare``: a row for each way to train, with the figures of its own plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError
from sdp.tools.cli import main
from sdp.tools.plan.machine import Machine
from sdp.tools.plan.ways import compare, row_json

pytestmark = pytest.mark.usefixtures("traced_once")

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "model": {"name": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8},
    "data": {"sequence_length": 8, "tokenizer": "bytes"},
    "training": {"steps": 100},
    "sdp": {"groups": 2, "capacity": 0.5, "lr_scale": 0.5},
}  # fmt: skip
NODES = Machine((2, 2), 1e12, 1.0, 1e12, 1e9)
WORDS = ["--world", "4", "--gpus-per-node", "2", "--device", "cpu"]
DENSE = ["DDP", "FSDP (ZeRO-3)", "HSDP", "ZeRO-2"]
ALL = [*DENSE, "smaller dense", "DiLoCo", "SDP, forward", "SDP, backward", "SDP, forward, local steps"]


def _run(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> str:
    assert main(["plan", str(path), *WORDS, *words]) == 0
    return capsys.readouterr().out


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "my.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_rows_have_the_figures_of_their_own_plans(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(_run(capsys, path, "--compare", "--json"))["rows"]
    assert list(rows) == ALL
    every = 'sdp.sync={"every": 32}'
    settings = {
        "FSDP (ZeRO-3)": ["sdp={}", "zero_optimization.stage=3"],
        "HSDP": ['sdp={"groups": 2}', "zero_optimization.stage=3"],
        "DiLoCo": ['sdp={"groups": 2}', every],
        "SDP, forward, local steps": [every, "sdp.masking=forward", "sdp.lr_scale=none"],
    }
    for masking in ("forward", "backward"):
        settings[f"SDP, {masking}"] = [f"sdp.masking={masking}"]
    for name, words in settings.items():
        plan, row = json.loads(_run(capsys, path, "--json", "--set", *words))["plan"], rows[name]
        assert (row["peak"], row["seconds"]) == (plan["ranks"][0]["peak"], plan["step_seconds"])
        assert row["sent"] == plan["sent_at_most"]


def test_the_smaller_dense_model_has_the_state_of_a_group() -> None:
    config = load_config(CONFIG)
    rows = {plan.name: row_json(plan, None) for plan in compare(config, NODES, 4)[0]}
    small, full = rows["smaller dense"], rows["DDP"]["parameters"]
    assert rows["SDP, forward"]["parameters"] == full > small["parameters"]
    assert (small["groups"], small["ranks_of_group"]) == (2, 2)
    layer = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    assert small["parameters"] == full - layer, "one of two layers, as a group holds at capacity 0.5"


def test_the_table_says_what_fits_and_nothing_of_losses(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(_run(capsys, path, "--compare", "--json"))["rows"]
    peak = rows["SDP, forward"]["peak"]
    printed = _run(capsys, path, "--compare", "--device-memory", f"{peak}B")
    lines = {line[:25].strip(): line for line in printed.splitlines() if line[:25].strip() in ALL}
    assert list(lines) == ALL
    assert {name for name, line in lines.items() if " yes " in line} == {
        name for name in ALL if rows[name]["peak"] <= peak
    }
    assert " no " in lines["DDP"]
    report = json.loads(_run(capsys, path, "--compare", "--json", "--device-memory", f"{peak}B"))
    assert (report["device_memory"], report["rows"]["SDP, forward"]["fits"], report["rows"]["DDP"]["fits"]) == (
        peak,
        True,
        False,
    )
    without = _run(capsys, path, "--compare")
    assert " fits " not in without.splitlines()[2] and " fits " in printed.splitlines()[2]
    assert "The plan does not say which loss each row reaches." in without


def test_a_dense_configuration_gets_groups() -> None:
    config = load_config(CONFIG | {"sdp": {}})
    rows, notes = compare(config, NODES, 4)
    assert [row.name for row in rows] == ALL
    assert notes[0] == "The configuration is dense. SDP is planned with sdp.groups 2 and sdp.capacity 0.5."
    rows, notes = compare(config, Machine((1,), 1e12, 1.0, 1e12, 1e9), 1)
    assert [row.name for row in rows] == ["DDP", "FSDP (ZeRO-3)", "ZeRO-2"]
    assert notes[:2] == ["SDP and DiLoCo need at least two groups", "HSDP: on one node it is FSDP"]


def test_a_world_without_the_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"world size 4 is not divisible by sdp.groups 3"):
        compare(load_config(CONFIG | {"sdp": CONFIG["sdp"] | {"groups": 3}}), NODES, 4)


def test_a_schedule_has_a_row_for_each_masking() -> None:
    schedule = [{"masking": "forward", "until": 0.5}, {"masking": "backward"}]
    rows, notes = compare(load_config(CONFIG | {"sdp": CONFIG["sdp"] | {"masking": schedule}}), NODES, 4)
    assert [row.name for row in rows][-3:] == ["SDP, forward", "SDP, backward", "SDP, backward, local steps"]
    assert "sdp.masking is a schedule, which needs the larger peak of its maskings." in notes


def test_a_fit_is_of_one_way(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(path), *WORDS, "--compare", "--fit", "--device-memory", "1GB"]) == 2
    assert "--fit: plans one way to train, and --compare plans many; give one of the two" in capsys.readouterr().err


@pytest.mark.slow
def test_seventy_billion_parameters_on_512_devices(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--compare", "--world", "512", "--json", "--device-memory", "80GB"]
    assert main(["plan", str(Path(__file__).parents[3] / "configs/llama_70b_hybrid.json"), *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["rows"]) == [name for name in ALL if name != "HSDP"]
    assert [name for name, row in report["rows"].items() if not row["fits"]] == ["DDP"]
