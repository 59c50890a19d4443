"""``sdp advise``: every way is planned, and the answer follows from plans and measured losses."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
from sdp.engine.config.load import load_config
from sdp.engine.config.sync import SyncSection
from sdp.tests.support.small_runs import make_corpus
from sdp.tests.tools.advise.made_up import CONFIG, machine_with_link, made_up_evidence
from sdp.tools.advise.candidate import Candidate
from sdp.tools.advise.candidates import candidates, with_groups
from sdp.tools.advise.dense_models import SmallerModels
from sdp.tools.advise.verdict import decide
from sdp.tools.cli import main
from sdp.tools.plan.machine import Machine

pytestmark = pytest.mark.usefixtures("traced_once")

ROOT = Path(__file__).parents[3]
NAMES = [
    "DDP", "FSDP (ZeRO-3)", "largest dense at SDP's peak", "smaller dense", "DiLoCo",
    "smaller dense, DiLoCo", "SDP, forward, then backward", "SDP, backward",
    "SDP, forward", "SDP, backward, local steps", "SDP, forward, local steps",
]  # fmt: skip


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
    verdict = decide(fast, None, made_up_evidence(smaller_dense=0.5, forward=0.9))
    assert verdict.best is not None and verdict.best.name == "DDP"
    assert "So the answer is not SDP." in verdict.reasons


def test_on_a_slow_link_fewer_bytes_win_if_they_cost_little(slow: list[Candidate]) -> None:
    verdict = decide(slow, None, made_up_evidence(smaller_dense=2.0, forward=0.01))
    assert verdict.best is not None and verdict.best.name == "SDP, forward, local steps"
    assert not any("not SDP" in reason for reason in verdict.reasons)
    best = next(one for one in verdict.estimates if one.candidate is verdict.best)
    assert best.at_equal_time == pytest.approx(0.11 - 0.2 * math.log2(best.steps)) and best.steps > 32


def test_what_does_not_fit_is_not_advised(fast: list[Candidate]) -> None:
    by_name = {one.name: one for one in fast}
    memory = by_name["SDP, forward"].peak
    verdict = decide(fast, memory, made_up_evidence(smaller_dense=0.5))
    assert verdict.best is by_name["SDP, forward"] and "The dense model does not fit" in verdict.reasons[0]
    verdict = decide(fast, 1.0, made_up_evidence())
    assert verdict.best is None and "Nothing that was planned fits" in verdict.reasons[0]


def test_what_cannot_be_told_apart_goes_to_the_simplest(fast: list[Candidate]) -> None:
    sure = made_up_evidence(forward=-0.4)
    unsure = sure.model_copy(update={"gaps": [gap.model_copy(update={"spread": 1.0}) for gap in sure.gaps]})
    # The other gaps are those from the dense model, so its own gap has no deviation.
    gaps = [gap.model_copy(update={"spread": 0.0}) if gap.method == "dense" else gap for gap in unsure.gaps]
    unsure = unsure.model_copy(update={"gaps": gaps})
    certain, open_ = decide(fast, None, sure).best, decide(fast, None, unsure)
    assert certain is not None and certain.name.startswith("SDP, forward")
    assert open_.best is not None and open_.best.name == "DDP"
    assert any("Not told apart" in reason for reason in open_.reasons)
    assert any("no other way is shown to learn more" in reason for reason in open_.reasons)
    alone = decide(
        fast, None, made_up_evidence(smaller_dense=0.9, forward=0.9, backward=0.9, **{"forward,_then_backward": 0.9})
    )
    assert any("no other way is expected to learn more" in reason for reason in alone.reasons)


def test_local_steps_are_no_evidence_for_averages_in_every_step(fast: list[Candidate]) -> None:
    evidence = made_up_evidence()
    only_local = evidence.model_copy(update={"gaps": [gap for gap in evidence.gaps if gap.every > 1]})
    by_name = {one.name: one for one in fast}
    assert only_local.nearest(by_name["SDP, forward"]) is None
    near = evidence.nearest(by_name["SDP, forward"])
    assert near is not None and near.capacity == 0.5


def test_the_figure_with_the_nearest_number_of_groups_is_used(fast: list[Candidate]) -> None:
    few = made_up_evidence()
    more = [gap.model_copy(update={"groups": 32, "gap": gap.gap / 2}) for gap in few.gaps]
    evidence = few.model_copy(update={"gaps": [*more, *few.gaps]})
    forward = next(one for one in fast if one.name == "SDP, forward")
    for groups, measured in ((2, 2), (7, 2), (9, 32), (100, 32)):
        near = evidence.nearest(dataclasses.replace(forward, groups=groups))
        assert near is not None and (near.groups, near.capacity) == (measured, 0.5)


def test_the_figure_of_the_nearest_length_of_training_is_used(fast: list[Candidate]) -> None:
    short = made_up_evidence()
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
    few = made_up_evidence()
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


def test_more_steps_count_as_they_did_for_the_method_and_the_length() -> None:
    curves = {"dense": [(10.0, 3.0), (50.0, 2.0), (200.0, 1.5)], "forward": [(10.0, 3.0), (50.0, 2.5), (200.0, 2.6)]}
    evidence = made_up_evidence().model_copy(update={"curves": curves})
    assert evidence.change("dense", 10.0, 5.0) == pytest.approx(-1.0)
    assert evidence.change("dense", 50.0, 1 / 5) == pytest.approx(1.0)
    assert evidence.change("dense", 10.0, 20.0) == pytest.approx(-1.5)
    assert evidence.change("dense", 200.0, 4.0) == pytest.approx(-0.5), "the last line goes on"
    assert evidence.change("dense", 2.0, 5.0) == pytest.approx(-1.0), "and so does the first"
    assert evidence.change("forward", 50.0, 4.0) == 0.0, "longer training did not help"
    assert evidence.change("forward", 10.0, 20.0) == pytest.approx(-0.5)
    assert evidence.change("dense", 10.0, 1.0) == 0.0
    assert evidence.lengths == (10.0, 200.0)


def test_each_way_has_the_curve_of_its_own_method(slow: list[Candidate]) -> None:
    evidence = made_up_evidence()
    curves = {**evidence.curves, "forward": [(10.0, 3.0), (50.0, 2.5), (200.0, 2.4)]}
    evidence = evidence.model_copy(update={"curves": curves})
    forward = next(one for one in slow if one.name == "SDP, forward")
    for length in (10.0, 100.0):
        verdict = decide(slow, None, evidence, length * forward.parameters)
        estimate = next(one for one in verdict.estimates if one.candidate is forward)
        assert estimate.steps > 1 and estimate.at_equal_steps is not None
        change = evidence.change("forward", length, estimate.steps)
        assert estimate.at_equal_time == pytest.approx(estimate.at_equal_steps + change)
        assert abs(change - evidence.change("backward", length, estimate.steps)) > 0.01


def test_sdp_with_the_lowest_expectation_is_named_if_a_simpler_way_is_chosen(fast: list[Candidate]) -> None:
    evidence = made_up_evidence(forward=-0.4)
    gaps = [gap.model_copy(update={"spread": 0.0 if gap.method == "dense" else 1.0}) for gap in evidence.gaps]
    verdict = decide(fast, None, evidence.model_copy(update={"gaps": gaps}))
    assert verdict.best is not None and verdict.best.name == "DDP"
    assert any(reason.startswith("SDP, forward") and "lowest expectation" in reason for reason in verdict.reasons)
    assert "SDP is not shown to be better." in verdict.reasons
    assert "So the answer is not SDP." not in verdict.reasons


def test_a_dense_configuration_gets_groups_and_is_told_so() -> None:
    dense = load_config(CONFIG | {"sdp": {}})
    config, notes = with_groups(dense, machine_with_link(1e9), 2)
    assert config.sdp.groups == 2 and config.sdp.capacity == 0.5 and "dense" in notes[0]
    assert with_groups(load_config(CONFIG), machine_with_link(1e9), 2)[1] == []
    whole = load_config(CONFIG | {"sdp": {"groups": 2, "capacity": [1.0, 1.0]}})
    assert with_groups(whole, machine_with_link(1e9), 2)[0].sdp.capacity == 0.5
    parallel = dense.model_copy(update={"tensor_parallel": dense.tensor_parallel.model_copy(update={"autotp_size": 2})})
    assert with_groups(parallel, Machine((8,), 1e12, 1.0, 1e9, 1e9), 8)[0].sdp.groups == 4


def test_an_engine_that_is_not_planned_gives_way_to_fsdp2_and_is_named() -> None:
    config, notes = with_groups(
        load_config(CONFIG | {"sdp": CONFIG["sdp"] | {"engine": "reference"}}), machine_with_link(1e9), 2
    )
    assert config.sdp.engine == "fsdp2" and notes == [
        'sdp.engine "reference" is not planned. All ways are planned for "fsdp2".'
    ]


def test_one_rank_has_neither_sdp_nor_diloco() -> None:
    config, notes = with_groups(load_config(CONFIG | {"sdp": {}}), Machine((1,), 1e12, 1.0, 1e9, 1e9), 1)
    assert notes == []
    found, notes = candidates(config, Machine((1,), 1e12, 1.0, 1e9, 1e9), 1)
    assert [one.name for one in found] == ["DDP", "FSDP (ZeRO-3)", "smaller dense"]
    assert "SDP and DiLoCo need at least two groups" in notes


def test_a_group_that_holds_everything_has_no_smaller_model(fast: list[Candidate]) -> None:
    """Nor is there one of a model whose size has no key."""
    sync, machine = SyncSection(every=32), machine_with_link(1e9)
    config = load_config(CONFIG)
    forward = next(one for one in fast if one.name == "SDP, forward")
    (_, plan), *_ = forward.plans
    config = config.model_copy(update={"sdp": config.sdp.model_copy(update={"capacity": [1.0, 0.5]})})
    models = SmallerModels(config, machine, 2, sync, 1e12)
    dense = [one for one in fast if one.method == "dense"]
    whole = dataclasses.replace(forward, plans=((1.0, dataclasses.replace(plan, layout=dense[0].plans[0][1].layout)),))
    assert models.planned([*dense, whole]) == [] and models.notes == ["smaller dense: a group holds the whole model"]
    unknown = config.model_copy(update={"model": {**config.model, "name": "swin_t"}})
    models = SmallerModels(unknown, machine, 2, sync, 1e12)
    assert models.planned(dense) == [] and len(models.notes) == 1


def test_if_sdp_cannot_be_planned_the_answer_says_so_and_smaller_models_stay() -> None:
    """Three ranks do not make two groups."""
    found, notes = candidates(load_config(CONFIG), Machine((3,), 1e12, 1.0, 1e9, 1e9), 3)
    assert [one.name for one in found] == ["DDP", "FSDP (ZeRO-3)", "smaller dense"]
    names = "SDP, forward; SDP, forward, local steps; SDP, backward; SDP, backward, local steps: "
    assert sum(note.startswith(names) for note in notes) == 1, "one line for one reason"
    reasons = decide(found, None, made_up_evidence()).reasons
    assert "Could not be planned, and so was not compared (see below): SDP." in reasons


def test_the_smaller_model_has_the_fastest_layout_that_fits(fast: list[Candidate]) -> None:
    """Two nodes of two ranks, and a slow link between them."""
    config, machine, sync = load_config(CONFIG), Machine((2, 2), 1e12, 1.0, 1e12, 1e6), SyncSection(every=32)
    smaller = SmallerModels(config, machine, 4, sync).planned(fast)[0]
    assert smaller.layout == "HSDP"
    tight = SmallerModels(config, machine, 4, sync, smaller.peak - 1).planned(fast)[0]
    assert tight.layout == "FSDP (ZeRO-3)" and tight.peak < smaller.peak and tight.seconds > smaller.seconds


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
    assert (
        "Expected to be best: " in text
        and "- This extrapolates:\n  - tokens of a group in a step: 16 here, 128 where " in text
    )
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
