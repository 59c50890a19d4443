"""Modules that a forward pass applies several times, and forward passes with one backward pass."""

from __future__ import annotations

import pytest
import sdp
import torch
import torch.nn.functional as F
from sdp.tests.spec.test_partly_used_parameters import assert_equal_to_plain_torch
from sdp.tests.support import models
from sdp.tests.support.cases import Case, assert_bytes_as_planned, assert_same_run, native, reference
from sdp.tests.support.ranks import RankPool
from torch.utils.checkpoint import checkpoint

MODEL = "mlp-three-times"
CASES = [
    Case(2, fsdp, stage=stage, accumulation=2, model=MODEL, masking=masking)
    for fsdp, stage in ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3))
    for masking in ("forward", "backward")
]


# Each kind of sharding under either masking, but not both.
@pytest.mark.parametrize(
    "case",
    [
        case if (case.masking == "backward") == (case.stage in (1, 3)) else pytest.param(case, marks=pytest.mark.slow)
        for case in CASES
    ],
    ids=str,
)
def test_native_equals_the_reference_and_plain_torch(ranks: RankPool, case: Case) -> None:
    ours = native(ranks, case)
    assert_same_run(ours, reference(case), case)
    assert_equal_to_plain_torch(ours[0], case)
    if case.stage < 3:  # stage 3 gathers a block for each of its uses
        assert_bytes_as_planned(ours)


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 3])
def test_bf16_native_equals_plain_torch(ranks: RankPool, stage: int) -> None:
    case = Case(2, 2, stage=stage, accumulation=2, model=MODEL, bf16=True)
    assert_equal_to_plain_torch(native(ranks, case)[0], case)


def train(engine_name: str, stage: int, bf16: bool, kind: str) -> dict[str, torch.Tensor] | None:
    """Take two steps of losses that need two forward passes, on two groups of two ranks.

    Kinds: "sum" of two losses; "discarded", where the first loss is not used; "kept", where it is
    not used and its graph lives on.
    """
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "sdp": {"groups": 2, "group_sizes": [2, 2], "capacity": 0.5, "engine": engine_name},
    }
    if engine_name != "reference":
        del config["sdp"]["group_sizes"]
    engine = sdp.initialize(model=models.build(MODEL), config=config)[0]
    kept = []
    for step in range(2):
        losses = []
        for micro in range(2):
            if engine_name == "reference":
                rows = models.rows_of_all("mlp", step, micro, 4)
            else:
                rows = models.micro_batch("mlp", step, micro, engine.global_rank)
            losses.append(engine(rows))
        if kind == "kept":
            kept += losses
        loss = sum(losses) if kind == "sum" else losses[1]
        del losses
        engine.backward(loss)
        engine.step()
    return engine.full_state_dict()


@pytest.mark.parametrize("kind", ["sum", "discarded", "kept"])
@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (0, True), (1, False), (2, False), (3, False)])
def test_several_forward_passes_share_a_backward_pass(ranks: RankPool, stage: int, bf16: bool, kind: str) -> None:
    expected, found = train("reference", 0, False, kind), ranks.run(train, "fsdp2", stage, bf16, kind, world=4)[0]
    before = models.build(MODEL).state_dict()
    assert expected is not None
    for name, value in expected.items():
        update = (value - before[name]).norm().item()
        error = (found[name] - value).norm().item()
        assert error <= (2e-2 * update if bf16 else 1e-5 * value.norm().item()), (name, error, update)


class Checkpointed(models.Mlp):
    """Runs blocks inside reentrant checkpoints: one twice, one once, and one also outside.

    It leaves out the last block.
    """

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](self.stem(x))
        for index in (0, 1, 2, 1):
            hidden = checkpoint(self.layers[index], hidden, use_reentrant=True)
        return F.mse_loss(self.head(hidden).float(), y.float())


def train_checkpointed(engine_name: str, stage: int, bf16: bool) -> tuple[dict[str, torch.Tensor] | None, list[float]]:
    """Take two steps of two micro-batches on two groups of two ranks. The weights, and the norms of
    gradients.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Checkpointed()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "sdp": {"groups": 2, "placement": dict(zip(models.unit_names("mlp"), [[0, 1], [0, 1], [0], [1]], strict=True))},
    }
    config["sdp"] |= {"engine": "reference", "group_sizes": [2, 2]} if engine_name == "reference" else {}
    engine, norms = sdp.initialize(model=model, config=config)[0], []
    for step in range(2):
        for micro in range(2):
            if engine_name == "reference":
                rows = models.rows_of_all("mlp", step, micro, 4)
            else:
                rows = models.micro_batch("mlp", step, micro, engine.global_rank)
            engine.backward(engine(rows))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return engine.full_state_dict(), norms


@pytest.mark.parametrize(("stage", "bf16"), [(0, True), (1, False), (2, False), (3, False), (1, True)])
def test_repeated_uses_inside_reentrant_checkpoints(ranks: RankPool, stage: int, bf16: bool) -> None:
    """FSDP2 sees the end of the first use in backward only. It would leave out the others."""
    expected, norms = train_checkpointed("reference", 0, False)
    found, found_norms = ranks.run(train_checkpointed, "fsdp2", stage, bf16, world=4)[0]
    before = models.build("mlp").state_dict()
    assert expected is not None and found_norms == pytest.approx(norms, rel=2e-2 if bf16 else 1e-5)
    for name, value in expected.items():
        update, error = (value - before[name]).norm().item(), (found[name] - value).norm().item()
        assert error <= (2e-2 * update if bf16 else 1e-5 * value.norm().item()), (name, error, update)


def refuse_at_stage_0() -> str:
    with pytest.raises(sdp.ModelError) as caught:
        train_checkpointed("fsdp2", 0, False)
    return str(caught.value)


def test_repeated_uses_inside_reentrant_checkpoints_are_refused_at_stage_0(ranks: RankPool) -> None:
    """Without FSDP2, autograd reports a gradient as complete after each of the uses."""
    for message in ranks.run(refuse_at_stage_0, world=4):
        assert message.endswith("pass use_reentrant=False to torch.utils.checkpoint.checkpoint")
        assert "\n" not in message
