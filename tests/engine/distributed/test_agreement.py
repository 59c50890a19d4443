"""What every rank must have alike is compared before any waits for another."""

from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.distributed.agreement import Ranks, first_difference, normalise
from sdp.engine.errors import ConfigError, DataError
from sdp.tests.support import models
from sdp.tests.support.cases import Case
from sdp.tests.support.deepspeed_runs import needs_deepspeed
from sdp.tests.support.ranks import RankPool


def _start(kind: str, engine: str) -> str:
    """The error of a rank, of which the last differs in ``kind``."""
    last = dist.get_rank() == dist.get_world_size() - 1
    config = Case(2, 1, placement="cyclic", stage=int(kind == "offload" or engine == "deepspeed")).config(engine)
    changes: dict[str, dict[str, Any]] = {
        "optimizer": {"optimizer": {"type": "SGD", "params": {"lr": 0.2}}},
        "gradient_clipping": {"gradient_clipping": 0.5},
        "seed": {"training": {"seed": 1}},
        "micro-batch": {"train_micro_batch_size_per_gpu": 3},
        "placement": {"sdp": config["sdp"] | {"placement": {f"layers.{i}": [0, 1] for i in (3, 1, 2, 0)}}},
        "DeepSpeed's own": {"zero_optimization": {"stage": 1, "reduce_bucket_size": 500}},
        "offload": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
        "own affairs": {"steps_per_print": 3, "data": {"num_workers": 1}, "training": {"keep": 7}},
    }
    if kind == "placement":
        config["sdp"]["placement"] = {f"layers.{i}": [0, 1] for i in range(4)}
    config |= changes.get(kind, {}) if last else {}
    model = models.Mlp()
    if kind == "model" and last:
        model.head = torch.nn.Linear(models.WIDTH, models.OUT + 1)
    if kind == "frozen" and last:
        model.head.requires_grad_(False)
    samples = [{"x": torch.zeros(1)}] * (12 if kind == "data" and last else 24)
    given: dict[str, Any] = {"training_data": samples}
    if kind == "rate":
        given["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.2 if last else 0.1)
        del config["optimizer"], config["scheduler"]
    try:
        sdp.initialize(model=model, config=config, **given)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "optimizer",
            "optimizer.params.lr: rank 0 has 0.1, rank 1 has 0.2; start all ranks with the same configuration, model "
            "and data",
        ),
        ("gradient_clipping", "gradient_clipping: rank 0 has 0, rank 1 has 0.5; "),
        ("seed", "training.seed: rank 0 has 0, rank 1 has 1; "),
        ("micro-batch", "train_micro_batch_size_per_gpu: rank 0 has 2, rank 1 has 3; "),
        ("model", "the model's parameters.head.bias.shape: rank 0 has [3], rank 1 has [4]; "),
        ("frozen", "the model's parameters.head.bias.is trained: rank 0 has true, rank 1 has false; "),
        ("rate", "the learning rate of stem.weight: ranks have different values, from 0.1 to 0.2; "),
        ("data", "the samples of training_data: rank 0 has 24, rank 1 has 12; "),
        ("offload", 'zero_optimization.offload_optimizer.device: rank 0 has "none", rank 1 has "cpu"; '),
        ("placement", ""),  # in another order
        ("own affairs", ""),
        pytest.param(
            "DeepSpeed's own",
            "zero_optimization.reduce_bucket_size: rank 0 has nothing, rank 1 has 500; ",
            marks=needs_deepspeed,
        ),
    ],
)
def test_a_rank_that_differs_stops_all(ranks: RankPool, kind: str, message: str) -> None:
    answers = ranks.run(_start, kind, "deepspeed" if "DeepSpeed" in kind else "fsdp2", world=2, timeout=60)
    assert answers[0] == answers[1]
    assert answers[0].startswith(message)
    assert bool(answers[0]) == bool(message)


def _own_groups() -> tuple[int, dict[str, float]]:
    """Train with one parameter group a parameter: ranks have different numbers of groups."""
    config = Case(2, 1).config("fsdp2")
    del config["optimizer"], config["scheduler"]
    config["sdp"]["placement"] = {"layers.0": [0], "layers.1": [0], "layers.2": [0, 1], "layers.3": [0, 1]}

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": 0.1 if p.ndim > 1 else 0.05} for p in parameters], lr=0.1)

    engine = sdp.initialize(model=models.Mlp(), optimizer=optimizer, config=config)[0]
    return len(engine.get_lr()), engine.rates_of_parameters()


def test_ranks_may_have_groups_of_their_own(ranks: RankPool) -> None:
    (first, rates), (second, others) = ranks.run(_own_groups, world=2)
    assert first > second
    assert rates == others
    assert rates.keys() == {name for name, _ in models.Mlp().named_parameters()}
    assert all(rate == (0.1 if models.Mlp().get_parameter(name).ndim > 1 else 0.05) for name, rate in rates.items())


def test_how_a_number_is_written_is_no_difference() -> None:
    assert normalise({"weight_decay": 0, "betas": [0.9, 1.0]}) == normalise({"betas": (0.9, 1), "weight_decay": 0.0})
    assert normalise(0) != normalise(False)
    assert first_difference("a", {"x": 1, "y": float("nan"), "z": 2}, {"x": 1, "y": float("nan"), "z": 3}) == (
        "a.z",
        "2",
        "3",
    )
    assert first_difference("a", {"x": 1}, {"x": True}) == ("a.x", "1", "true")


def _work_together() -> tuple[list[str], str, Any]:
    """What a rank sees of an action that succeeds, of one that fails, and of values."""
    ranks, here = Ranks(alone=False), dist.get_rank()

    def act(*, fails: bool) -> str:
        if fails:
            raise DataError(f"rank {here} has no data")
        return f"done by {here}"

    done = [ranks.all_or_none(lambda: act(fails=False))]
    try:
        ranks.all_or_none(lambda: act(fails=here == 1))
        problem = "none"
    except DataError as error:
        problem = str(error)
    return done, problem, ranks.first(None if here == 0 else here)


def test_all_ranks_succeed_or_raise_the_first_error(ranks: RankPool) -> None:
    for rank, (done, problem, first) in enumerate(ranks.run(_work_together, world=2)):
        assert done == [f"done by {rank}"]
        assert (problem, first) == ("rank 1 has no data", 1)


def test_a_process_alone_raises_its_own_error() -> None:
    def act() -> None:
        raise DataError("no data")

    with pytest.raises(DataError, match="no data"):
        Ranks(alone=True).all_or_none(act)
    assert Ranks(alone=True).all_or_none(lambda: 3) == 3
