"""``sdp.branch_scale``: what a unit adds, times groups / holders or its inverse."""

from typing import Any

import pytest
import torch
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError
from sdp.tests.support import models
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step, oracle_of, said
from sdp.tests.support.ranks import RankPool

HOLDERS = [[0], [0, 1], [0, 1], [1]]  # of "mixed" placements of blocks


def scaled_mlp(batch: dict[str, torch.Tensor], held: list[int], factors: dict[int, float], state: Any) -> torch.Tensor:
    """By hand: blocks in ``held``, each with what it adds times its factor."""
    model = models.mlp()
    model.load_state_dict(state)
    hidden = model.stem(batch["x"])
    for index in held:
        hidden = hidden + factors.get(index, 1.0) * (model.layers[index](hidden) - hidden)
    return ((model.head(hidden) - batch["y"]) ** 2).mean()


def scaled_llama(batch: dict[str, torch.Tensor], group: int | None, case: Case, state: Any) -> torch.Tensor:
    """By hand: columns times 0 or a factor. ``group`` None: the full model."""
    layout = oracle_of(case).layout
    model = models.build(case.model)
    model.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
    parameters = dict(model.named_parameters())
    for unit, holders in zip(layout.units, layout.placement.holders, strict=True):
        for part in unit.slices:
            if part.dim == 1:
                share = len(holders) / case.groups
                factor = 1 / share if case.branch_scale == "train" and group is not None else 1.0
                factor = share if case.branch_scale == "eval" and group is None else factor
                ((first, last),) = part.ranges
                held = group is None or group in holders
                parameters[part.parameter].data[:, first:last] *= factor if held else 0.0
    return model(**batch)


CASES = [
    Case(2, 1, branch_scale="train"),
    Case(2, 2, 3, branch_scale="eval", accumulation=3, optimizer="adamw", checkpointing="full"),
    Case(2, 2, 3, branch_scale="train", model="even-llama-tied-meta", neurons=3),
    Case(2, 1, branch_scale="eval", model="even-llama", neurons=3),
]


def _run(case: Case) -> dict[str, Any]:
    """Two steps; losses of training, of the full model and of the groups' own, and the weights."""
    engine, data_rank = engine_of(case), data_rank_of(case)
    seen: dict[str, Any] = {"start": engine.full_state_dict()}
    for step in range(2):
        one_step(engine, case, step, data_rank=data_rank)
        engine.step()
        seen[f"loss {step}"] = engine.get_loss()
    seen["after"] = engine.full_state_dict()
    held_out = models.micro_batch(case.model, 9, 0, data_rank)
    seen["full"], seen["own"] = engine.evaluate([held_out]), engine.evaluate_subnetworks([held_out])
    return seen


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_are_those_by_hand(ranks: RankPool, case: Case) -> None:
    expected, *others = ranks.run(_run, case, world=case.world)
    assert all(found[key] == expected[key] for found in others for key in ("loss 0", "loss 1", "full", "own"))

    def by_hand(batch: dict[str, torch.Tensor], group: int | None, state: Any) -> float:
        if case.neurons:
            return scaled_llama(batch, group, case, state).item()
        held = [index for index, holders in enumerate(HOLDERS) if group is None or group in holders]
        training = {0: 2.0, 3: 2.0} if case.branch_scale == "train" else {}
        whole = {0: 0.5, 3: 0.5} if case.branch_scale == "eval" else {}
        return scaled_mlp(batch, held, whole if group is None else training, state).item()

    first = [
        by_hand(models.micro_batch(case.model, 0, micro, worker), worker // case.fsdp, expected["start"])
        for worker in range(case.data_ranks)
        for micro in range(case.accumulation)
    ]
    assert expected["loss 0"] == pytest.approx(sum(first) / len(first), rel=1e-5)
    rows = models.rows_of_all(case.model, 9, 0, case.data_ranks)
    assert expected["full"] == pytest.approx(by_hand(rows, None, expected["after"]), rel=1e-5)
    own = [
        [
            by_hand(models.micro_batch(case.model, 9, 0, group * case.fsdp + f), group, expected["after"])
            for f in range(case.fsdp)
        ]
        for group in range(case.groups)
    ]
    if (
        not case.neurons or case.fsdp == 1
    ):  # the mean over ranks is weighted by targets, of which token batches have unequal numbers
        assert expected["own"] == pytest.approx([sum(losses) / len(losses) for losses in own], rel=1e-5)


def test_where_it_has_no_meaning() -> None:
    with pytest.raises(ConfigError, match=r'sdp\.branch_scale: "train" has no meaning with sdp\.masking "backward"'):
        load_config({"sdp": {"groups": 2, "branch_scale": "train", "masking": "backward"}})
    with pytest.raises(
        ConfigError,
        match=r'sdp\.branch_scale: "eval" is not available in this version together with sdp\.engine "deepspeed"',
    ):
        load_config(
            {"sdp": {"groups": 2, "branch_scale": "eval", "engine": "deepspeed"}, "zero_optimization": {"stage": 1}}
        )
    with pytest.raises(ConfigError, match=r"sdp\.branch_scale"):
        load_config({"sdp": {"groups": 2, "branch_scale": "sometimes"}})


def _said() -> str:
    with said() as lines:
        engine_of(Case(2, 1, placement="full", branch_scale="train"))
    return "\n".join(lines)


def test_it_says_where_it_has_no_effect(ranks: RankPool) -> None:
    assert 'sdp.branch_scale "train" has no effect: every group holds every unit' in ranks.run(_said, world=2)[0]
