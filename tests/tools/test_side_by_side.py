"""``sdp bench CONFIG``: methods that make the same steps do, bytes on the wire are those planned, and the report has every figure."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from sdp.engine.config import load_config
from sdp.engine.errors import ConfigError
from sdp.launcher.main import main
from sdp.tools.methods import DENSE, default_methods, variant, why_not
from sdp.tools.networks import Link
from sdp.tools.side_by_side import measure
from sdp.tools.side_plan import plan_methods
from sdp.tools.side_report import Report, write_report

MODEL = {"name": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "sdp": {"groups": 4, "capacity": 0.5},
    "model": MODEL,
    "data": {"sequence_length": 16},
}
ROUNDS = argparse.Namespace(rounds=1, steps=1, network=None)
SETTINGS = {
    "config": "tiny.json", "model": MODEL, "world": 4, "batch": {"train": 8, "micro": 2, "accumulation": 1}, "tokens_per_sample": 16,
    "activation_checkpointing": "none", "compile": False, "rounds": 2, "steps_per_turn": 1, "dtype": "float32", "device": "cpu",
    "threads": 1, "torch": torch.__version__,
}  # fmt: skip


def measured(names: list[str], layers: int) -> Any:
    config = load_config(CONFIG)
    return measure({name: variant(name, config, layers) for name in names}, ROUNDS, config, torch.device("cpu"))


def test_every_method_does_its_work_and_is_reported(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(CONFIG)
    names = [*DENSE, "sdp-block-forward-0.5", "sdp-neuron-backward-0.5"]
    plans = plan_methods(names, config, 4)
    layers = plans["smaller-ddp"].config.model["num_hidden_layers"]
    assert 1 <= layers < 4
    facts, races = ranks.run(measured, names, layers, world=4)[0]  # raises where DDP, FSDP2, HSDP and ZeRO have other losses
    write_report(tmp_path, Report(SETTINGS, plans, facts, races))
    rows = json.loads((tmp_path / "report.json").read_text())["races"][0]["methods"]
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "report.md").read_text() + "\n"
    for name, row in rows.items():
        assert f"| {name} " in printed
        assert row["seconds"]["least"] <= row["seconds"]["median"] <= row["seconds"]["most"]
        assert row["tokens_per_second"] == 8 * 16 / row["seconds"]["median"]
        assert row["compute_seconds"] > 0
        if row["planned_peak_bytes"]:
            assert row["peak_bytes"] == pytest.approx(row["planned_peak_bytes"], rel=0.1), name  # tiny: counters and scalars show
    # On a ring of four, and only there, gloo sends what is planned, beside 100 bytes for each message.
    for name in ("ddp", "ddp-recompute", "ddp-bf16-gradients", "smaller-ddp", "sdp-block-forward-0.5"):
        assert rows[name]["planned_sent_bytes"] <= rows[name]["sent_bytes"] <= rows[name]["planned_sent_bytes"] * 1.05 + 20_000, name
    assert rows["ddp-bf16-gradients"]["sent_bytes"] < 0.7 * rows["ddp"]["sent_bytes"]
    assert rows["diloco"]["sent_bytes"] < 0.1 * rows["ddp"]["sent_bytes"]
    for name in names[-2:]:
        assert rows[name]["state_bytes"] == rows[name]["planned_state_bytes"]
        assert rows[name]["between_groups_bytes"] == rows[name]["planned_between_groups_bytes"] > 0
        assert "exposed_not_overlapped_seconds" in rows[name]
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_methods_of_another_work_are_told_apart() -> None:
    from sdp.tools.side_by_side import _require_same_losses

    _require_same_losses({"ddp": {"losses": [2.0, 1.0]}, "zero3": {"losses": [2.00001, 1.0]}, "diloco": {"losses": [2.0, 3.0]}})
    with pytest.raises(RuntimeError, match="did not do the same work"):
        _require_same_losses({"ddp": {"losses": [2.0, 1.0]}, "zero3": {"losses": [2.0, 1.1]}})


def test_defaults_are_all_methods_at_the_capacity() -> None:
    config = load_config(CONFIG)
    names = default_methods(config)
    assert names[-1] == "sdp-neuron-backward-0.5"
    assert len(names) == len(set(names)) == len(DENSE) + 4
    assert variant("sdp-neuron-backward-0.75", config).sdp.masking == "backward"
    assert why_not("hsdp", config, 3) is not None
    assert why_not("hsdp", config, 4) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "ddq"], "--methods ddq: unknown"),
        (["--methods", "sdp-block-0.5"], "--methods sdp-block-0.5: write sdp"),
        (["--methods", "hsdp", "--nproc", "2", "--set", "sdp.groups=2"], "--methods hsdp: needs an even number of ranks"),
        (["--rounds", "0"], "--rounds: 0 is not a positive whole number"),
        (["--network", "fast"], "--network fast: expected rates"),
        (["--layers", "3"], "--layers: has no effect with CONFIG"),
        (["--set", "sdp.groups=1"], "sdp.groups: 1 group has nothing of SDP"),
        (["--set", "bf16.enabled=true"], "bf16.enabled: methods are compared in float32"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    assert main(["bench", str(path), *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err


def test_options_of_the_comparison_need_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--rounds", "3"]) == 2
    assert "--rounds: needs a CONFIG" in capsys.readouterr().err


def test_links_are_tcs_rates() -> None:
    assert Link.parse("300mbit").bytes_per_second == 37.5e6
    assert Link.parse("1gbit").bytes_per_second == 125e6
    for wrong in ("300", "300mbps", "-1mbit", ""):
        with pytest.raises(ConfigError):
            Link.parse(wrong)
