"""``sdp advise``: every way is planned, and the answer follows from plans and measured losses."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from sdp.engine.config.load import load_config
from sdp.engine.config.schema import Config
from sdp.tests.support.small_runs import make_corpus
from sdp.tools.advise.candidate import Candidate
from sdp.tools.advise.candidates import candidates, with_groups
from sdp.tools.advise.evidence import FILE, Evidence, Gap, ManyEpochs, Setting
from sdp.tools.advise.verdict import Verdict, decide, extrapolations
from sdp.tools.cli import main
from sdp.tools.plan.machine import Machine

pytestmark = pytest.mark.usefixtures("traced_once")

ROOT = Path(__file__).parents[3]
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "model": {"name": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8,
              "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8},
    "data": {"sequence_length": 8, "tokenizer": "bytes"},
    "training": {"steps": 100},
    "sdp": {"groups": 2, "capacity": 0.5, "lr_scale": 0.5},
}  # fmt: skip
NAMES = [
    "DDP", "FSDP (ZeRO-3)", "largest dense at SDP's peak", "smaller dense", "DiLoCo",
    "smaller dense, DiLoCo", "SDP, forward, then backward", "SDP, backward",
    "SDP, forward", "SDP, backward, local steps", "SDP, forward, local steps",
]  # fmt: skip


def _machine(between: float) -> Machine:
    """Two nodes of one slow device each."""
    return Machine((1, 1), 1e12, 1.0, between, between)


def _evidence(**gaps: float) -> Evidence:
    """Evidence with a gap for each method in every step, 0.1 nats more with local steps."""
    found = {"dense": 0.0, "smaller_dense": 0.1, "forward": 0.3, "backward": 0.2, "forward,_then_backward": 0.15} | gaps
    entries = [
        Gap(method=method.replace("_", " "), every=every, groups=2, capacity=capacity, gap=gap + more, spread=0.0,
            tokens_per_parameter=0.05, seeds=3, source="page")
        for method, gap in found.items()
        for every, more in ((1, 0.0), (32, 0.1))
        for capacity in ((1.0,) if method == "dense" else (0.25, 0.5))
    ]  # fmt: skip
    setting = Setting(parameters=(50_000, 50_000), groups=(2, 2), tokens_of_group=16, tokens_per_parameter=(0.01, 0.1))
    epochs = ManyEpochs(epochs=50, seeds=3, source="page", losses={"dense": (1.0, 0.1)})
    curve = [(0.01, 5.0), (0.1, 5.0 - 0.2 * math.log2(10))]  # 0.2 nats for twice the steps
    curves = {method.replace("_", " "): curve for method in found}
    return Evidence(setting=setting, curves=curves, curves_source="page", gaps=entries, many_epochs=epochs)


@pytest.fixture(scope="module")
def fast() -> list[Candidate]:
    found, _ = candidates(load_config(CONFIG), _machine(1e15), 2)
    return found


@pytest.fixture(scope="module")
def slow() -> list[Candidate]:
    found, _ = candidates(load_config(CONFIG), _machine(1e5), 2)
    return found


def test_all_ways_are_planned_in_the_order_of_simplicity(fast: list[Candidate]) -> None:
    assert [one.name for one in fast] == NAMES
    by_name = {one.name: one for one in fast}
    assert by_name["smaller dense"].parameters < by_name["DDP"].parameters == by_name["SDP, forward"].parameters
    assert by_name["SDP, forward"].peak < by_name["SDP, backward"].peak < by_name["DDP"].peak
    assert by_name["SDP, forward, then backward"].peak == by_name["SDP, backward"].peak
    seconds = [by_name[f"SDP, {masking}"].seconds for masking in ("forward", "backward")]
    assert by_name["SDP, forward, then backward"].seconds == pytest.approx(sum(seconds) / 2)


def test_the_smaller_model_is_the_largest_that_a_group_could_hold(fast: list[Candidate]) -> None:
    by_name = {one.name: one for one in fast}
    layout = by_name["SDP, forward"].plans[0][1].layout
    most = max(sum(info.numel for info in layout.held(group)) for group in range(2))
    layer = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    assert by_name["smaller dense"].parameters <= most < by_name["smaller dense"].parameters + layer


def test_on_a_fast_link_the_answer_is_the_dense_model(fast: list[Candidate]) -> None:
    verdict = decide(fast, None, _evidence(smaller_dense=0.5, forward=0.9))
    assert verdict.best is not None and verdict.best.name == "DDP"
    assert "So the answer is not SDP." in verdict.reasons


def test_on_a_slow_link_fewer_bytes_win_if_they_cost_little(slow: list[Candidate]) -> None:
    verdict = decide(slow, None, _evidence(smaller_dense=2.0, forward=0.01))
    assert verdict.best is not None and verdict.best.name == "SDP, forward, local steps"
    assert not any("not SDP" in reason for reason in verdict.reasons)
    best = next(one for one in verdict.estimates if one.candidate is verdict.best)
    assert best.at_equal_time == pytest.approx(0.11 - 0.2 * math.log2(best.steps)) and best.steps > 32


def test_what_does_not_fit_is_not_advised(fast: list[Candidate]) -> None:
    by_name = {one.name: one for one in fast}
    memory = by_name["SDP, forward"].peak
    verdict = decide(fast, memory, _evidence(smaller_dense=0.5))
    assert verdict.best is by_name["SDP, forward"] and "The dense model does not fit" in verdict.reasons[0]
    verdict = decide(fast, 1.0, _evidence())
    assert verdict.best is None and "Nothing that was planned fits" in verdict.reasons[0]


def test_what_cannot_be_told_apart_goes_to_the_simplest(fast: list[Candidate]) -> None:
    sure = _evidence(forward=-0.4)
    unsure = sure.model_copy(update={"gaps": [gap.model_copy(update={"spread": 1.0}) for gap in sure.gaps]})
    # The other gaps are those from the dense model, so its own gap has no deviation.
    gaps = [gap.model_copy(update={"spread": 0.0}) if gap.method == "dense" else gap for gap in unsure.gaps]
    unsure = unsure.model_copy(update={"gaps": gaps})
    certain, open_ = decide(fast, None, sure).best, decide(fast, None, unsure)
    assert certain is not None and certain.name.startswith("SDP, forward")
    assert open_.best is not None and open_.best.name == "DDP"
    assert any("Not told apart" in reason for reason in open_.reasons)


def test_local_steps_are_no_evidence_for_averages_in_every_step(fast: list[Candidate]) -> None:
    evidence = _evidence()
    only_local = evidence.model_copy(update={"gaps": [gap for gap in evidence.gaps if gap.every > 1]})
    by_name = {one.name: one for one in fast}
    assert only_local.nearest(by_name["SDP, forward"]) is None
    near = evidence.nearest(by_name["SDP, forward"])
    assert near is not None and near.capacity == 0.5


def test_the_figure_with_the_nearest_number_of_groups_is_used(fast: list[Candidate]) -> None:
    few = _evidence()
    more = [gap.model_copy(update={"groups": 32, "gap": gap.gap / 2}) for gap in few.gaps]
    evidence = few.model_copy(update={"gaps": [*more, *few.gaps]})
    forward = next(one for one in fast if one.name == "SDP, forward")
    for groups, measured in ((2, 2), (7, 2), (9, 32), (100, 32)):
        near = evidence.nearest(dataclasses.replace(forward, groups=groups))
        assert near is not None and (near.groups, near.capacity) == (measured, 0.5)


def test_the_figure_of_the_nearest_length_of_training_is_used(fast: list[Candidate]) -> None:
    short = _evidence()
    longer = [gap.model_copy(update={"tokens_per_parameter": 200.0, "gap": 2 * gap.gap}) for gap in short.gaps]
    evidence = short.model_copy(update={"gaps": [*longer, *short.gaps]})
    forward = next(one for one in fast if one.name == "SDP, forward")
    for length, gap in ((0.1, 0.3), (100.0, 0.6)):
        near = evidence.nearest(forward, length)
        assert near is not None and (near.gap, near.capacity) == (gap, 0.5)
        verdict = decide(fast, None, evidence, length * forward.parameters)
        used = next(one.gap for one in verdict.estimates if one.candidate is forward)
        assert used == near


def test_groups_and_length_of_training_count_alike(fast: list[Candidate]) -> None:
    """Eight times the groups is nearer than 100 times the length, whichever would come first."""
    few = _evidence()
    short = [gap.model_copy(update={"groups": 2, "tokens_per_parameter": 0.1}) for gap in few.gaps]
    longer = [gap.model_copy(update={"groups": 16, "tokens_per_parameter": 10.0}) for gap in few.gaps]
    forward = next(one for one in fast if one.name == "SDP, forward")
    for gaps in ([*short, *longer], [*longer, *short]):
        evidence = few.model_copy(update={"gaps": gaps})
        for length, groups in ((0.1, 2), (10.0, 16), (0.3, 2)):
            near = evidence.nearest(forward, length)
            assert near is not None and near.groups == groups
        near = evidence.nearest(dataclasses.replace(forward, groups=16), 0.1)
        assert near is not None and near.groups == 2  # of the same length, with an eighth of the groups


def test_figures_of_another_length_of_training_are_called_an_extrapolation(slow: list[Candidate]) -> None:
    evidence = _evidence()
    setting = evidence.setting.model_copy(update={"tokens_per_parameter": (0.01, 200.0)})
    curves = {method: [(0.01, 5.0), (10_000.0, 4.0)] for method in evidence.curves}
    evidence = evidence.model_copy(update={"setting": setting, "curves": curves})
    verdict, config = decide(slow, None, evidence), load_config(CONFIG)
    parameters = verdict.reference.parameters
    assert _lines(verdict, evidence, config, 16, 0.1 * parameters) == []
    (line,) = _lines(verdict, evidence, config, 16, 20.0 * parameters)
    assert line.startswith("tokens per parameter: 20 here, 0.05 where the losses of these were measured: ")
    assert "SDP, forward, local steps" in line and "DDP" not in line
    line, _ = _lines(verdict, evidence, config, 16, 5000.0 * parameters)  # and the steps
    assert line == "tokens per parameter: 5,000 here, 0 to 200 where losses were measured"


def test_a_run_unlike_the_measured_ones_is_called_an_extrapolation(fast: list[Candidate]) -> None:
    evidence = _evidence()
    verdict = decide(fast, None, evidence)
    parameters = verdict.reference.parameters
    config = load_config(CONFIG)
    assert _lines(verdict, evidence, config, 16, 0.05 * parameters) == []
    many = config.model_copy(update={"sdp": config.sdp.model_copy(update={"groups": 64})})
    far = _lines(verdict, evidence, many, 4096, 20.0 * parameters)
    assert [line.partition(":")[0] for line in far] == [
        "groups",
        "tokens of a group in a step",
        "tokens per parameter",
        "steps",
    ]


def _lines(verdict: Verdict, evidence: Evidence, config: Config, tokens_of_group: float, tokens: float) -> list[str]:
    """What is called an extrapolation, without what was measured at another capacity: the largest
    dense models have capacities of their own.
    """
    lines = extrapolations(verdict, evidence, config, tokens_of_group, tokens)
    return [line for line in lines if not line.startswith("capacity")]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"sdp": {"profile": "uniform"}}, "sdp.profile: uniform here, depth where losses were measured"),
        ({"sdp": {"lr_scale": "none"}}, "sdp.lr_scale: none here, 0.5 where losses with averages in every step"),
        ({"sdp": {"granularity": "neuron", "neuron_groups": 2}}, "sdp.granularity: neuron here, block where"),
        ({"optimizer": {"type": "SGD"}}, "optimizer: SGD here, AdamW where losses were measured"),
    ],
)
def test_another_recipe_is_called_an_extrapolation(
    fast: list[Candidate], change: dict[str, dict[str, Any]], line: str
) -> None:
    evidence = _evidence()
    config = load_config(CONFIG | {key: CONFIG[key] | value for key, value in change.items()})
    verdict = decide(fast, None, evidence)
    found = _lines(verdict, evidence, config, 16, 0.05 * verdict.reference.parameters)
    assert len(found) == 1 and found[0].startswith(line)


def test_figures_of_another_number_of_groups_or_capacity_are_named(fast: list[Candidate]) -> None:
    evidence = _evidence()
    gaps = [gap.model_copy(update={"groups": 16}) for gap in evidence.gaps if gap.capacity != 0.5]
    evidence = evidence.model_copy(
        update={"gaps": gaps, "setting": evidence.setting.model_copy(update={"groups": (2, 16)})}
    )
    verdict = decide(fast, None, evidence)
    lines = extrapolations(verdict, evidence, load_config(CONFIG), 16, 0.05 * verdict.reference.parameters)
    groups, *_, capacity = [line for line in lines if "of these were measured" in line]
    assert (
        groups.startswith("groups: 2 here, 16 where the losses of these were measured: ") and "SDP, forward" in groups
    )
    assert capacity.startswith("capacity: ") and "0.25 where the losses of these were measured" in capacity


def test_more_steps_count_as_they_did_for_the_method_and_the_length() -> None:
    curves = {"dense": [(10.0, 3.0), (50.0, 2.0), (200.0, 1.5)], "forward": [(10.0, 3.0), (50.0, 2.5), (200.0, 2.6)]}
    evidence = _evidence().model_copy(update={"curves": curves})
    assert evidence.change("dense", 10.0, 5.0) == pytest.approx(-1.0)
    assert evidence.change("dense", 50.0, 1 / 5) == pytest.approx(1.0)
    assert evidence.change("dense", 10.0, 20.0) == pytest.approx(-1.5)
    assert evidence.change("dense", 200.0, 4.0) == pytest.approx(-0.5), "the last line goes on"
    assert evidence.change("dense", 2.0, 5.0) == pytest.approx(-1.0), "and so does the first"
    assert evidence.change("forward", 50.0, 4.0) == 0.0, "longer training did not help"
    assert evidence.change("forward", 10.0, 20.0) == pytest.approx(-0.5)
    assert evidence.change("dense", 10.0, 1.0) == 0.0
    assert evidence.lengths == (10.0, 200.0)


def test_sdp_with_the_lowest_expectation_is_named_if_a_simpler_way_is_chosen(fast: list[Candidate]) -> None:
    evidence = _evidence(forward=-0.4)
    gaps = [gap.model_copy(update={"spread": 0.0 if gap.method == "dense" else 1.0}) for gap in evidence.gaps]
    verdict = decide(fast, None, evidence.model_copy(update={"gaps": gaps}))
    assert verdict.best is not None and verdict.best.name == "DDP"
    assert any(reason.startswith("SDP, forward") and "lowest expectation" in reason for reason in verdict.reasons)
    assert "SDP is not shown to be better." in verdict.reasons
    assert "So the answer is not SDP." not in verdict.reasons


def test_a_dense_configuration_gets_groups_and_is_told_so() -> None:
    dense = load_config(CONFIG | {"sdp": {}})
    config, notes = with_groups(dense, _machine(1e9), 2)
    assert config.sdp.groups == 2 and config.sdp.capacity == 0.5 and "dense" in notes[0]
    assert with_groups(load_config(CONFIG), _machine(1e9), 2)[1] == []
    whole = load_config(CONFIG | {"sdp": {"groups": 2, "capacity": [1.0, 1.0]}})
    assert with_groups(whole, _machine(1e9), 2)[0].sdp.capacity == 0.5
    parallel = dense.model_copy(update={"tensor_parallel": dense.tensor_parallel.model_copy(update={"autotp_size": 2})})
    assert with_groups(parallel, Machine((8,), 1e12, 1.0, 1e9, 1e9), 8)[0].sdp.groups == 4


def test_an_engine_that_is_not_planned_gives_way_to_fsdp2_and_is_named() -> None:
    config, notes = with_groups(
        load_config(CONFIG | {"sdp": CONFIG["sdp"] | {"engine": "vectorized"}}), _machine(1e9), 2
    )
    assert config.sdp.engine == "fsdp2" and notes == [
        'sdp.engine "vectorized" is not planned. All ways are planned for "fsdp2".'
    ]


def test_if_sdp_cannot_be_planned_the_answer_says_so_and_smaller_models_stay() -> None:
    """Three ranks do not make two groups."""
    found, notes = candidates(load_config(CONFIG), Machine((3,), 1e12, 1.0, 1e9, 1e9), 3)
    assert [one.name for one in found] == ["DDP", "FSDP (ZeRO-3)", "smaller dense"]
    assert sum("SDP, forward; SDP, backward" in note for note in notes) == 1, "one line for one reason"
    reasons = decide(found, None, _evidence()).reasons
    assert "SDP could not be planned, and so was not compared; see below." in reasons


def test_the_largest_dense_model_has_at_most_the_peak_of_backward_masking(fast: list[Candidate]) -> None:
    by_name = {one.name: one for one in fast}
    largest, backward = by_name["largest dense at SDP's peak"], by_name["SDP, backward"]
    assert largest.peak <= backward.peak
    assert by_name["smaller dense"].parameters < largest.parameters < by_name["DDP"].parameters
    assert largest.capacity == pytest.approx(largest.parameters / by_name["DDP"].parameters)


def _json(path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """What ``sdp advise --json`` prints."""
    assert main(["advise", str(path), "--json", *more]) == 0
    return capsys.readouterr().out


def test_the_command_prints_a_table_and_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my.json"
    path.write_text(json.dumps(CONFIG))
    assert main(["advise", str(path), "--gpus-per-node", "1", "--inter-node", "1mbit"]) == 0
    text = capsys.readouterr().out
    assert "Expected to be best: " in text and "- This extrapolates:\n  - groups: 2 here, " in text
    lines = text.splitlines()[3 : 3 + len(NAMES)]
    assert all(line[2:].startswith(f"{name}  ") for line, name in zip(lines, NAMES, strict=True))
    assert "tokens/parameter" in lines[2]
    parameters = json.loads(_json(path, capsys))["candidates"][0]["parameters"]
    lengths = []
    for length in (9, 200):
        report = json.loads(_json(path, capsys, "--tokens", str(length * parameters)))
        by_name = {one["name"]: one for one in report["candidates"]}
        lengths.append(by_name["SDP, forward"]["evidence"]["tokens_per_parameter"])
    assert lengths[0] < lengths[1] == 200
    assert main(["advise", str(path), "--json", "--device-memory", "1kB"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["best"] is None and not any(one["fits"] for one in report["candidates"])


def test_the_largest_dense_model_that_fits_is_named(
    fast: list[Candidate], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The full dense model does not fit in replicas then."""
    peak = {one.name: one.peak for one in fast}
    memory = peak["largest dense at SDP's peak"]
    assert memory < peak["DDP"]
    path = tmp_path / "my.json"
    path.write_text(json.dumps(CONFIG))
    words = ["advise", str(path), "--gpus-per-node", "1", "--device-memory", f"{memory}B"]
    assert main(words) == 0
    named = re.search(r"largest dense that fits: ([\d,]+) of ([\d,]+) parameters", capsys.readouterr().out)
    assert named is not None
    fits, full = (int(number.replace(",", "")) for number in named.groups())
    smaller = next(one for one in fast if one.name == "smaller dense")
    assert smaller.parameters < fits < full
    assert main([*words[:-1], f"{max(peak.values())}B"]) == 0
    assert "largest dense that fits" not in capsys.readouterr().out


def test_noise_of_a_run_without_noise_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, run = tmp_path / "my.json", tmp_path / "run"
    path.write_text(json.dumps(CONFIG))
    run.mkdir()
    (run / "config.json").write_text(json.dumps(CONFIG))
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert main(["advise", str(path), "--noise", str(run)]) == 2
    assert "has no noise scale" in capsys.readouterr().err
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "noise_scale": 400.0}\n')
    assert main(["advise", str(path), "--noise", str(run)]) == 0
    assert "A step has 4 (2 of each group), far below it: noise dominates." in capsys.readouterr().out


def test_data_that_are_read_many_times_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, corpus = tmp_path / "my.json", make_corpus(tmp_path)
    tokens = json.loads((corpus / "index.json").read_text())["splits"]["train"]["tokens"]
    path.write_text(json.dumps(CONFIG | {"data": CONFIG["data"] | {"path": str(corpus)}}))
    assert main(["advise", str(path), "--tokens", str(2 * tokens)]) == 0
    assert "reads its data" not in capsys.readouterr().out
    assert main(["advise", str(path), "--tokens", str(40 * tokens)]) == 0
    text = capsys.readouterr().out
    assert "This run reads its data 40 times" in text and "docs/results/digits.md" in text
    (corpus / "index.json").write_text("{}")
    assert main(["advise", str(path), "--tokens", str(40 * tokens)]) == 2
    assert "index.json" in capsys.readouterr().err


def test_the_evidence_is_that_of_the_result_pages() -> None:
    spec = importlib.util.spec_from_file_location("evidence", ROOT / "docs" / "evidence.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert json.loads(FILE.read_text()) == module.evidence(), "run python docs/evidence.py"
    for gap in Evidence.read().gaps:
        assert (ROOT / gap.source).is_file()
