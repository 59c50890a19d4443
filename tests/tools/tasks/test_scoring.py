"""Log-likelihoods from streamed units equal those of the whole model."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.engine.errors import ModelError
from sdp.tests.support import models
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step
from sdp.tests.support.ranks import RankPool
from sdp.tools.tasks.scoring import FullModel, Request, Score, Scorer
from torch import nn

TABLE = [
    (Case(2, 1, 0, model="llama-tied-meta"), "fsdp2"),
    (Case(2, 2, 3, model="llama-meta", placement="profile"), "fsdp2"),
    (Case(4, 1, 0, placement="cyclic", model="llama"), "fsdp2"),
    (Case(2, 2, 1, model="llama", masking="backward"), "fsdp2"),
    (Case(2, 1, 0, model="even-llama", tp=2), "fsdp2"),
    (Case(2, 1, 0, model="llama", neurons=2), "fsdp2"),
    (Case(2, 1, 0, model="llama", sync='{"every": 2}'), "fsdp2"),
    (Case(2, 2, 3, model="llama"), "deepspeed"),
]


def requests(count: int = 45) -> list[Request]:
    """More than one batch of every rank, of different lengths."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        length = draw.randrange(2, 8)
        ids = [draw.randrange(models.VOCABULARY) for _ in range(length)]
        found.append(Request(ids, draw.randrange(1, length)))
    return found


def score(case: Case, kind: str) -> tuple[list[Score], Any]:
    engine = engine_of(case, kind)
    one_step(engine, case, 0, data_rank=data_rank_of(case))
    engine.step()
    scorer = Scorer(FullModel.of_engine(engine))
    results = []
    for _ in range(2):  # in a second use, nothing of the first is left
        if dist.get_rank() == 0:
            results = scorer.lead(
                lambda: [*scorer.score(requests(45)[:3]), *scorer.score(requests()), *scorer.score([])]
            )
        else:
            scorer.follow()
    one_step(engine, case, 1, data_rank=data_rank_of(case))  # training goes on
    return results, engine.full_state_dict()


def expected(model: nn.Module) -> list[Score]:
    found = []
    with torch.no_grad():
        for request in requests():
            ids = torch.tensor([request.ids])
            likely = model(ids)[0, :-1].log_softmax(-1)[-request.scored :]
            wanted = ids[0, -request.scored :]
            total = likely.gather(1, wanted[:, None]).sum().item()
            found.append(Score(total, bool((likely.argmax(-1) == wanted).all())))
    return [*found[:3], *found]


def check(scores: list[Score], state: dict[str, torch.Tensor], case: Case) -> None:
    model = models.build(case.model)
    if next(model.parameters()).is_meta:
        model.to_empty(device="cpu")
        if "tied" in case.model:
            model.lm_head.weight = model.model.embed_tokens.weight  # type: ignore[union-attr]
    model.load_state_dict(state)
    wanted = expected(model)
    assert [each.log_likelihood for each in scores] == pytest.approx([each.log_likelihood for each in wanted], rel=1e-5)
    assert [each.is_greedy for each in scores] == [each.is_greedy for each in wanted]


@pytest.mark.parametrize(("case", "kind"), TABLE, ids=str)
def test_scores_equal_those_of_the_whole_model(case: Case, kind: str, ranks: RankPool) -> None:
    if kind == "deepspeed":
        pytest.importorskip("deepspeed")
    (scores, state), *others = ranks.run(score, case, kind, world=case.world)
    assert all(found == [] for found, _ in others)
    check(scores, state, case)


def fail_on_rank_0() -> str:
    engine = engine_of(Case(2, 1, 0, model="llama"))
    scorer = Scorer(FullModel.of_engine(engine))
    if dist.get_rank() > 0:
        scorer.follow()
        return "released"

    def work() -> None:
        scorer.score(requests(3))
        raise ValueError("the harness failed")

    with pytest.raises(ValueError, match="the harness failed"):
        scorer.lead(work)
    return "raised"


def test_a_failure_of_the_harness_releases_the_other_ranks(ranks: RankPool) -> None:
    assert ranks.run(fail_on_rank_0, world=2) == ["raised", "released"]


def test_a_model_without_logits_is_refused() -> None:
    class Silent(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids.float()

    module = Silent()
    model = FullModel(
        module, lambda batches, _: next(module(**batch) for batch in batches).item(), 8, 2, torch.device("cpu")
    )
    with pytest.raises(ModelError, match="has no logits of shape"):
        Scorer(model).score([Request([1, 2, 3], 1)])
