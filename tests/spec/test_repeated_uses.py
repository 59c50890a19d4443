"""Modules that a forward pass applies several times, forward passes with one backward pass, and
parameters that only some micro-batches use: experts, and one of several heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import sdp
import torch
import torch.nn.functional as F
from sdp.tests.support import models
from sdp.tests.support.cases import Case, Result, assert_same_run, assert_state_as_predicted, native, oracle, oracle_for
from sdp.tests.support.foreign.plain_torch import train_plainly
from sdp.tests.support.oracle import Oracle
from sdp.tests.support.ranks import RankPool
from torch.utils.checkpoint import checkpoint

MODEL = "mlp-three-times"
STAGE_0_ONLY = "use zero_optimization.stage 0, and pass use_reentrant=False to torch.utils.checkpoint.checkpoint"


@pytest.mark.parametrize("masking", ["forward", "backward"])
@pytest.mark.parametrize("fsdp", [1, 2])
def test_fsdp2_equals_the_oracle_and_plain_torch(ranks: RankPool, fsdp: int, masking: str) -> None:
    case = Case(2, fsdp, accumulation=2, model=MODEL, masking=masking)
    ours = native(ranks, case)
    assert_same_run(ours, oracle(case), case)
    assert_equal_to_plain_torch(ours[0], case)
    assert_state_as_predicted(ours)


BF16 = [(1, "experts"), (3, "experts-by-rank")]
SLOW = [*((stage, "experts") for stage in (0, 2, 3)), (0, "experts-by-rank")]


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 2, 0, 2, model="experts"),
        Case(2, 2, 3, 2, model="experts-by-rank"),
        Case(2, 2, 0, 2, model=MODEL, bf16=True),
        Case(2, 1, 3, 1, model=MODEL, bf16=True),
        *(Case(2, 2, stage, 2, model=model, bf16=True) for stage, model in BF16),
        *(pytest.param(Case(2, 2, stage, 2, model=model, bf16=True), marks=pytest.mark.slow) for stage, model in SLOW),
    ],
    ids=str,
)
def test_native_equals_plain_torch(ranks: RankPool, case: Case) -> None:
    assert_equal_to_plain_torch(native(ranks, case)[0], case)


def assert_equal_to_plain_torch(ours: Result, case: Case) -> None:
    """Compare weights in float32 to 1e-5, and in bf16 to 2 % of what training changed in each.

    bfloat16 keeps 8 bits, so each operation rounds by up to 0.2 %. A gradient goes through about
    ten of them, whose errors add up like random numbers: 0.6 %.
    """
    assert ours.before is not None and ours.after is not None
    for name, expected in train_plainly(case, ours.rates).items():
        update = (expected - ours.before[name]).norm().item()
        error = (ours.after[name] - expected).norm().item()
        assert error <= (2e-2 * update if case.bf16 else 1e-5 * expected.norm().item()), (name, error, update)
        assert update > 0, name


def configuration(stage: int, bf16: bool, accumulation: int, **section: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 8 * accumulation,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "sdp": {"groups": 2, **section},
    }


def rows_of(engine: Any, step: int, micro: int) -> dict[str, torch.Tensor]:
    return models.micro_batch("mlp", step, micro, engine.global_rank)


def train(stage: int, bf16: bool, kind: str) -> dict[str, torch.Tensor] | None:
    """Take two steps of losses that need two forward passes, on two groups of two ranks.

    Kinds: "sum" of two losses; "discarded", where the first loss is not used; "kept", where it is
    not used and its graph lives on.
    """
    config = configuration(stage, bf16, 1, capacity=0.5)
    engine = sdp.initialize(model=models.build("mlp" if stage else MODEL), config=config)[0]
    kept = []
    for step in range(2):
        losses = [engine(rows_of(engine, step, micro)) for micro in range(2)]
        if kind == "kept":
            kept += losses
        loss = sum(losses) if kind == "sum" else losses[1]
        del losses
        engine.backward(loss)
        engine.step()
    return engine.full_state_dict()


def oracle_without_checkpoints(
    stage: int, micros: Sequence[int], rate: float, **section: Any
) -> tuple[Oracle, list[float]]:
    """The oracle after two steps on some micro-batches, and the norms of gradients."""
    oracle = oracle_for(models.build("mlp" if stage else MODEL), configuration(0, False, 1, **section), 4)
    norms = []
    for step in range(2):
        batches = [[models.micro_batch("mlp", step, micro, rank) for rank in range(4)] for micro in micros]
        norms.append(oracle.step(batches, rate).norm)
    return oracle, norms


UNUSED = ("discarded", "kept")
SEVERAL = [*((0, bf16, "sum") for bf16 in (False, True)), *((at, False, kind) for at in (0, 1, 3) for kind in UNUSED)]
SLOWER = [(*at, kind) for at in ((0, True), (2, False)) for kind in UNUSED]


@pytest.mark.parametrize(
    ("stage", "bf16", "kind"), [*SEVERAL, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOWER)]
)
def test_several_forward_passes_before_a_backward_pass(ranks: RankPool, stage: int, bf16: bool, kind: str) -> None:
    micros, rate = ([0, 1], 0.2) if kind == "sum" else ([1], 0.1)  # the sum is twice the mean
    expected = oracle_without_checkpoints(stage, micros, rate, capacity=0.5)[0].state_dict()
    found = ranks.run(train, stage, bf16, kind, world=4)[0]
    assert_trained_alike(found, expected, bf16)


def assert_trained_alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bf16: bool) -> None:
    before = models.build("mlp").state_dict()
    for name, value in expected.items():
        update, error = (value - before[name]).norm().item(), (found[name] - value).norm().item()
        assert error <= (2e-2 * update if bf16 else 1e-5 * value.norm().item()), (name, error, update)


class Checkpointed(models.Mlp):
    """Runs blocks inside reentrant checkpoints, and leaves out none."""

    order = (0, 1, 2, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(x)
        if self.order[0]:
            hidden = self.layers[0](hidden)
        for index in self.order:
            hidden = checkpoint(self.layers[index], hidden, use_reentrant=True)
        return F.mse_loss(self.head(hidden).float(), y.float())


class CheckpointedTwice(Checkpointed):
    """Uses one of the blocks in two checkpoints."""

    order = (0, 1, 2, 3, 1)


class AlsoOutside(Checkpointed):
    """Uses the first block inside a checkpoint and outside."""

    order = (1, 0, 2, 3)


PLACEMENT = dict(zip(models.unit_names("mlp"), [[0, 1], [0, 1], [0], [1]], strict=True))


def train_checkpointed(
    stage: int, bf16: bool, kind: type[models.Mlp]
) -> tuple[dict[str, torch.Tensor] | None, list[float]]:
    """Two steps of two micro-batches: the weights, and the norms of gradients."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind()
    config = configuration(stage, bf16, 2, placement=PLACEMENT)
    engine, norms = sdp.initialize(model=model, config=config)[0], []
    for step in range(2):
        for micro in range(2):
            engine.backward(engine(rows_of(engine, step, micro)))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return engine.full_state_dict(), norms


@pytest.mark.parametrize(("stage", "bf16"), [(0, True), (1, False), (2, False), (3, False), (1, True)])
def test_one_use_inside_a_reentrant_checkpoint(ranks: RankPool, stage: int, bf16: bool) -> None:
    oracle, norms = oracle_without_checkpoints(1, [0, 1], 0.1, placement=PLACEMENT)
    found, found_norms = ranks.run(train_checkpointed, stage, bf16, Checkpointed, world=4)[0]
    assert found_norms == pytest.approx(norms, rel=2e-2 if bf16 else 1e-5)
    assert_trained_alike(found, oracle.state_dict(), bf16)


def refused(kind: type[models.Mlp] | str, stage: int, bf16: bool) -> str:
    """The error of a run whose gradients FSDP2 or the layer between groups would take too early."""
    with pytest.raises(sdp.ModelError) as caught:
        if kind == MODEL:
            engine = sdp.initialize(model=models.build(MODEL), config=configuration(stage, bf16, 2))[0]
            for micro in range(2):
                engine.backward(engine(rows_of(engine, 0, micro)))
                engine.step()
        elif isinstance(kind, str):
            train(stage, bf16, kind)
        else:
            train_checkpointed(stage, bf16, kind)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "stage", "bf16"),
    [
        *((kind, stage, stage == 2) for kind in ("sum", MODEL, CheckpointedTwice, AlsoOutside) for stage in (1, 2, 3)),
        # Without FSDP2, autograd reports a gradient as complete after each of the uses.
        *((kind, 0, bf16) for kind in (CheckpointedTwice, AlsoOutside) for bf16 in (False, True)),
    ],
)
def test_repeated_uses_are_refused(ranks: RankPool, kind: type[models.Mlp] | str, stage: int, bf16: bool) -> None:
    for message in ranks.run(refused, kind, stage, bf16, world=4):
        assert message.endswith(STAGE_0_ONLY if stage else STAGE_0_ONLY.partition("and ")[2])
        assert kind != MODEL or message.startswith("layers.3 is used several times in one backward pass")
        assert "\n" not in message
