"""``sdp plan`` of local steps: anchors in the peak, means over a round, and DiLoCo next to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sdp.engine.config.load import load_config
from sdp.engine.config.method import Masking
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.placement.layout import Layout
from sdp.engine.tracing.messages import Messages
from sdp.tests.support import models
from sdp.tests.support.cases import Case, native
from sdp.tests.support.ranks import RankPool
from sdp.tools.cli import main

pytestmark = pytest.mark.usefixtures("traced_once")

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart_local.json"
SMALL = ["model.hidden_size=48", "model.intermediate_size=64", "model.num_hidden_layers=4", "data.sequence_length=32",
         "model.max_position_embeddings=32", "data.vocab_size=256"]  # fmt: skip


def _plan(capsys: pytest.CaptureFixture[str], *settings: str) -> dict:
    assert main(["plan", str(QUICKSTART), "--json", "--set", *SMALL, *settings]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_of_local_steps(capsys: pytest.CaptureFixture[str]) -> None:
    every_step, local, late, on_host = (
        _plan(capsys, f"sdp.sync={sync}")
        for sync in (
            "null", '{"every": 16}', '{"every": 16, "fragments": 4, "overlap": 2}', '{"every": 16, "offload": "cpu"}',
        )
    )  # fmt: skip
    ours, plain = local["plan"], every_step["plan"]
    first, of_plain = ours["ranks"][0], plain["ranks"][0]
    assert first["outer"] == 2 * first["parameters"], "anchors and momentum"
    assert first["peak"] >= of_plain["peak"] + first["outer"]
    assert late["plan"]["ranks"][0]["peak"] > first["peak"]
    assert on_host["plan"]["ranks"][0]["outer_on_host"] == first["outer"]
    assert on_host["plan"]["ranks"][0]["peak"] < first["peak"]
    between = sum(one["sent_bytes"] for one in of_plain["collectives"] if one["scope"] == "between groups")
    assert sum(one["sent_bytes"] for one in first["averages_of_a_round"]) == between, "what one step sent, once a round"
    assert not [one for one in first["collectives"] if one["scope"] == "between groups"]


def test_the_table_says_what_a_round_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(QUICKSTART), "--set", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "in a round of 16 steps, averages of weights" in printed
    assert "anchors and outer state" in printed
    assert "The first 16 steps average gradients in every step" in printed
    assert "in the busiest step" not in printed, "there is only one average in a round"
    assert main(["plan", str(QUICKSTART), "--set", *SMALL, "sdp.sync.fragments=4"]) == 0
    assert "of these, in the busiest step" in capsys.readouterr().out


def test_a_plan_with_a_service(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ['sdp.sync={"every": 16, "service": {}}', "training.save_every=0"]
    found = _plan(capsys, *settings, "--inter-node", "100mbit")["plan"]
    held = sum(rank["parameters"] * len(rank["groups_alike"]) for rank in found["ranks"])
    service, slowest = found["service"], found["slowest"]["seconds"]
    assert service["receives"] == service["sends"] == held
    assert service["seconds"] == pytest.approx(2 * held / 12.5e6)
    assert slowest["outer"] == pytest.approx(service["seconds"] / 16)
    assert slowest["step"] == pytest.approx(slowest["compute"] + slowest["outer"])
    groups, each = service["groups"], service["seconds"] / found["mesh"]["sdp"]
    assert (groups - 1) * each <= 16 * slowest["compute"] < groups * each
    assert not found["slowest"]["averages_of_a_round"]
    small = _plan(capsys, 'sdp.sync={"every": 16, "compression": "bf16", "service": {}}', settings[1])["plan"][
        "service"
    ]
    assert (small["receives"], small["sends"]) == (held / 2, held), "every unit has two holders"
    assert main(["plan", str(QUICKSTART), "--set", *SMALL, *settings]) == 0
    assert "In a round, the service receives" in capsys.readouterr().out


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("masking", ["forward", "backward"])
def test_the_busiest_step_of_a_round_is_the_one_that_sends_most(
    ranks: RankPool, overlap: int, masking: Masking
) -> None:
    sync = f'{{"every": 8, "fragments": 4, "overlap": {overlap}}}'
    case = Case(2, 1, model="llama-tied", masking=masking, sync=sync, steps=16)
    config = load_config(case.config())
    messages = Messages(Layout.of(models.build(case.model), config, Mesh(2, 1)), config)
    for rank, result in enumerate(native(ranks, case)):
        steps = result.traffic[-8:]
        sent = [sum(nbytes for kind, nbytes in step.items() if kind.startswith("between")) for step in steps]
        assert messages.in_busiest_step(rank) == max(sent) > min(sent)


def test_fit_counts_anchors_and_outer_state(capsys: pytest.CaptureFixture[str]) -> None:
    """In the memory between both peaks, a rank holds its group only with averages in every step."""
    peaks = [_plan(capsys, f"sdp.sync={sync}")["plan"]["ranks"][0]["peak"] for sync in ("null", '{"every": 16}')]
    assert peaks[1] > 1.1 * peaks[0]
    printed = []
    for sync in ("null", '{"every": 16}'):
        options = ["--fit", "--device-memory", f"{sum(peaks) // 2}B", "--world", "4"]
        settings = [*SMALL, f"sdp.sync={sync}", "activation_checkpointing.mode=none"]
        assert main(["plan", str(QUICKSTART), *options, "--set", *settings]) == 0
        printed.append(capsys.readouterr().out)
    tried = "1 rank per group (fsdp 1 × tp 1), ZeRO stage 0, activation checkpointing none: "
    assert f"{tried}fits" in printed[0]
    assert f"{tried}does not fit" in printed[1]
