"""``sdp bench CONFIG``: the same steps, and every figure."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.engine.config.load import load_config
from sdp.engine.errors import NonFiniteError
from sdp.tests.support.bench_configs import CONFIG, MODEL
from sdp.tests.support.ranks import RankPool
from sdp.tests.support.small_runs import run_sdp, write_config
from sdp.tools.bench.command import choose_methods
from sdp.tools.bench.measure import begin, make_batches, measure, require_same_losses, take_turns
from sdp.tools.bench.methods import DEFAULT, DENSE, Runner, build, variant, why_not
from sdp.tools.bench.report import plan_methods, rows_of, to_markdown, write_report
from sdp.tools.cli import main

pytestmark = pytest.mark.usefixtures("traced_once")
CPU = torch.device("cpu")
LOCAL = CONFIG | {"sdp": CONFIG["sdp"] | {"sync": {"every": 4, "fragments": 2, "overlap": 1, "compression": "bf16"}}}
SETTINGS = {
    "config": "tiny.json", "model": MODEL, "world": 4, "batch": {"train": 8, "micro": 2, "accumulation": 1},
    "tokens_per_sample": 16,
    "activation_checkpointing": "none", "compile": False, "rounds": 2, "steps": 1, "precision": "float32",
    "device": "cpu",
    "threads": 1, "torch": torch.__version__,
}  # fmt: skip


def measured(raw: dict[str, Any], names: list[str]) -> Any:
    config = load_config(raw)
    return measure({name: variant(name, config, dist.get_world_size()) for name in names}, config, CPU, 1, 1)


@pytest.mark.slow
def test_every_method_does_its_work_and_is_reported(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = plan_methods(DEFAULT, load_config(CONFIG), 4)
    facts = ranks.run(measured, CONFIG, DEFAULT, world=4)[0]  # raises where DDP, FSDP2 and HSDP differ
    write_report(tmp_path, SETTINGS, rows_of(facts, plans, 8 * 16))
    rows = json.loads((tmp_path / "report.json").read_text())["methods"]
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "report.md").read_text() + "\n"
    for name, row in rows.items():
        assert f"| {name} " in printed
        assert row["seconds"]["least"] <= row["seconds"]["median"] <= row["seconds"]["most"]
        assert row["tokens_per_second"] == 8 * 16 / row["seconds"]["median"]
        tiny = 0.01 if name == "ddp" else 0.1  # counters and scalars show
        assert row["peak_bytes"] == pytest.approx(row["planned_peak_bytes"], rel=tiny), name
    assert rows["diloco"]["planned_sent_bytes"] < 0.1 * rows["ddp"]["planned_sent_bytes"]
    for name in DEFAULT[-2:]:
        assert rows[name]["state_bytes"] == rows[name]["planned_state_bytes"]
        assert rows[name]["between_groups_bytes"] > 0


def _peak_of_ddp(config: dict[str, Any]) -> int:
    settings = variant("ddp", load_config(config), 2)
    return begin(lambda: build("ddp", settings, CPU), make_batches(settings, CPU), CPU)[1]["peak_bytes"]


def test_gradients_of_earlier_micro_batches_are_beside_ddps_buckets(ranks: RankPool) -> None:
    config = CONFIG | {"gradient_accumulation_steps": 2, "sdp": {"groups": 2, "capacity": 0.5}}
    plan = plan_methods(["ddp"], load_config(config), 2)["ddp"]
    trace = plan.worst.trace
    assert trace.peak > trace.state.total + trace.state.gradients
    assert ranks.run(_peak_of_ddp, config, world=2)[0] == pytest.approx(trace.peak, rel=0.01)


def test_methods_of_another_work_are_told_apart() -> None:
    require_same_losses(
        {"ddp": {"losses": [2.0, 1.0]}, "fsdp2": {"losses": [2.00001, 1.0]}, "diloco": {"losses": [2.0, 3.0]}}
    )
    with pytest.raises(RuntimeError, match="did not compute the same"):
        require_same_losses({"ddp": {"losses": [2.0, 1.0]}, "fsdp2": {"losses": [2.0, 1.1]}})


class _Diverges:
    """Steps whose loss on rank 1 is NaN, and which leave the weights as they are."""

    def __init__(self) -> None:
        self.module = torch.nn.Linear(1, 1)
        self.runner = Runner(2, self.module, torch.optim.SGD(self.module.parameters(), lr=0.1), self.step)

    def step(self, _: Any) -> torch.Tensor:
        return torch.tensor(float("nan") if dist.get_rank() == 1 else 1.0)


def _race_of(spoilt: str) -> str:
    case = _Diverges()
    if spoilt == "weights":
        case.runner = replace(case.runner, step=lambda _: torch.tensor(1.0))
        if dist.get_rank() == 1:
            torch.nn.init.constant_(case.module.bias, float("inf"))
    with pytest.raises(NonFiniteError) as error:
        take_turns({"ddp": case.runner}, [], CPU, 1, 1)
    return str(error.value)


@pytest.mark.parametrize("spoilt", ["loss", "weights"])
def test_what_is_no_number_after_a_turn_ends_the_comparison_on_every_rank(ranks: RankPool, spoilt: str) -> None:
    first, second = ranks.run(_race_of, spoilt, world=2)
    assert first == second
    assert first.startswith("ddp: the loss or the weights are NaN or infinite after a turn")


def test_what_is_left_out_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(CONFIG, ["sdp.groups=2"])
    assert "hsdp" not in choose_methods(None, config, 2, speaks=True)
    assert capsys.readouterr().err.count("sdp bench: hsdp is left out") == 1
    assert "hsdp" not in choose_methods(None, config, 2, speaks=False)
    assert capsys.readouterr().err == ""


def test_counts_of_sdp_stand_beside_the_plan() -> None:
    plans = plan_methods(["ddp", "sdp"], load_config(CONFIG | {"sdp": CONFIG["sdp"] | {"lr_scale": "auto"}}), 4)
    ddp = {"losses": [1.0], "parameters": 1, "peak_bytes": 1, "seconds": [4.0, 4.0, 9.0]}
    ours = {"state_bytes": 9, "planned_state_bytes": 8, "between_groups_bytes": 4_000_000, "seconds": [2.0, 2.0, 1.0]}
    rows = rows_of({"ddp": ddp, "sdp": ddp | ours}, plans, 8 * 16)
    assert rows["sdp"]["speed_over_ddp"] == 2
    text = to_markdown(SETTINGS, rows)
    assert "- sdp: state 1.125 of planned; 4.00 MB sent between groups, counted by the engine" in text
    assert f"learning rates of units multiplied by {rows['sdp']['rates']}" in text
    assert rows["sdp"]["rates"] == "0.71 (1 holder) to 1.41 (4 holders)", "√(1 ÷ 2) and √(4 ÷ 2)"
    assert rows["ddp"]["rates"] is None


def test_methods_with_local_steps_are_timed_by_whole_rounds(ranks: RankPool) -> None:
    names, config = ["sdp-backward", "diloco"], LOCAL | {"sdp": LOCAL["sdp"] | {"groups": 2}}
    facts, plans = ranks.run(measured, config, names, world=2)[0], plan_methods(names, load_config(config), 2)
    for name in names:
        peak = plans[name].worst.trace.peak
        # With overlap the plan is a bound: it adds what travels to the peak, wherever that is.
        assert 0.75 * peak <= facts[name]["peak_bytes"] <= 1.02 * peak, name
        sent = [sum(one.sent for one in rank.averages) / rank.every for rank in plans[name].ranks]
        assert facts[name]["between_groups_bytes"] == max(sent) > 0
        assert facts[name]["state_bytes"] == facts[name]["planned_state_bytes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "ddq"], "--methods ddq: unknown"),
        (["--methods", "sdp-block-forward-0.5"], "in CONFIG, or with --set, such as --set sdp.capacity=0.5"),
        (["--methods", "ddp,"], "--methods : unknown"),
        (["--methods", "hsdp", "--nproc", "2", "--set", "sdp.groups=2"],
            "--methods hsdp: needs an even number of ranks"),
        (["--set", "sdp.capacity=0.05"], "SDP cannot run on 4 ranks: sdp.capacity: 0.05 × 4 groups"),
        (["--rounds", "0"], "--rounds: '0' is not a positive whole number"),
        (["--alone", "--methods", "ddp"], "--methods: --alone always measures the dense model, and SDP as in CONFIG"),
        (
            ["--alone", "--set", "sdp.engine=deepspeed", "zero_optimization.stage=1"],
            'sdp.engine: "deepspeed" cannot run with --alone',
        ),
        (["--set", "sdp.groups=1"], "sdp.groups: with 1 group, SDP is the dense model"),
        (["--set", "bf16.enabled=true"], "bf16.enabled: methods are compared in float32"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # a comparison that is not refused leaves its report there
    Path("tiny.json").write_text(json.dumps(CONFIG))
    assert main(["bench", "tiny.json", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err


def test_a_report_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "report.json").write_text("{}")
    for words, said in (
        (
            ["--methods", "ddp", "--out", str(tmp_path / "old")],
            f"--out {tmp_path / 'old'}: holds the report of an earlier run",
        ),
        (["--out", str(tmp_path / "old"), "--alone"], f"--out {tmp_path / 'old'}: holds the report of an earlier run"),
        (
            ["--methods", "ddp", "--out", str(path / "below")],
            f"--out {path / 'below'}: cannot be made (Not a directory)",
        ),
    ):
        assert main(["bench", str(path), *words]) == 2
        assert said in capsys.readouterr().err
    assert (tmp_path / "old" / "report.json").read_text() == "{}"


def test_methods_take_their_settings_from_the_configuration() -> None:
    config = load_config(LOCAL)
    assert variant("sdp", config, 4) is config
    assert variant("sdp-backward", config, 4).sdp == config.sdp.model_copy(update={"masking": "backward"})
    dense = variant("diloco", config, 4).sdp
    assert (dense.groups, dense.capacity, dense.sync) == (4, 1.0, config.sdp.sync)
    plain = variant("diloco", load_config(CONFIG), 4).sdp.sync
    assert plain is not None and plain.every == 50
    assert all(variant(name, config, 4).sdp.sync is None for name in DENSE if name != "diloco")
    assert why_not("hsdp", config, 3) is not None
    assert why_not("hsdp", config, 4) is None


# -- ``sdp bench CONFIG --alone``: one rank's share is what the placement says ---------------------


LAYER, OF_ALL = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32, 2 * 64 * 32 + 32


@pytest.mark.parametrize(
    ("settings", "ranks", "own"),
    [
        (["sdp.masking=forward"], 4, OF_ALL + 2 * LAYER),
        (["sdp.masking=backward", "zero_optimization.stage=1"], 8, (OF_ALL + 2 * LAYER) / 2),
    ],
)
def test_a_share_is_what_the_placement_says(tmp_path: Path, settings: list[str], ranks: int, own: float) -> None:
    words = [write_config(CONFIG, tmp_path), "--alone", "--rounds", 1, "--nproc", ranks, "--out", tmp_path / "out"]
    done = run_sdp("bench", *words, "--set", *settings)
    assert done.returncode == 0, done.stderr
    assert "equal" in done.stdout and "NOT equal" not in done.stdout
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    share, dense = report["shares"]["SDP"], report["shares"]["dense"]
    whole, sharded = OF_ALL + 4 * LAYER, ranks // 4
    assert dense["flops_per_step"] > share["flops_per_step"] > 0.5 * dense["flops_per_step"]
    assert share["state_bytes"] == share["planned_state_bytes"] < dense["state_bytes"]
    if sharded == 1:
        assert (share["parameters"], dense["parameters"]) == (own, whole)
        assert share["state_bytes"] == 16 * own  # float32 weights, gradients and two moments
    assert share["peak_bytes"] > share["state_bytes"]
    assert len(share["seconds"]) == 1 and share["tokens_per_step"] == 2 * 16
