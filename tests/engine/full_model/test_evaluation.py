"""Evaluation of the full model by streamed units, and of every group's own subnetwork."""

import time
import weakref
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sdp.engine.errors import ConfigError, DataError
from sdp.engine.full_model.evaluation import Lockstep, StreamedEvaluation
from sdp.engine.subnetwork.carve import pass_throughs
from sdp.tests.support import models
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step, oracle, oracle_of
from sdp.tests.support.ranks import RankPool
from torch import nn

TABLE = [
    Case(2, 1, 0, model="llama-tied-meta"),
    pytest.param(Case(2, 2, 1, model="llama"), marks=pytest.mark.slow),
    Case(2, 1, 3, model="even-llama-meta", tp=2),
    Case(4, 1, 0, placement="cyclic", masking="backward"),
    Case(2, 2, 3, model="llama-tied-meta", masking="backward"),
    Case(2, 1, 0, model="even-llama", tp=2, masking="backward"),
]


def _batches(case: Case, rank: int) -> list[Any]:
    """1 to 11 by rank, which is more than one chunk of lockstep passes; rows and labels differ."""
    return [
        models.micro_batch(case.model, 500 + index, index, rank, rows=1 + (index + rank) % 3)
        for index in range(1 + 5 * (rank % 3))
    ]


def _evaluate(case: Case) -> tuple[float, list[float], Any, list[str]]:
    engine = engine_of(case)
    one_step(engine, case, 0, data_rank=data_rank_of(case))
    engine.step()
    batches = _batches(case, data_rank_of(case))
    full, own = engine.evaluate(iter(batches)), engine.evaluate_subnetworks(batches)
    return full, own, engine.full_state_dict(), [name for name, _ in engine.module.named_parameters()]


def _expected(case: Case, state: dict[str, torch.Tensor], ranks: range, held: Any = None) -> float:
    """The token-weighted mean loss of the full model here, or with only the units in ``held``."""
    model = models.build(case.model)
    if next(model.parameters()).is_meta:
        model.to_empty(device="cpu")
        if "tied" in case.model:
            model.lm_head.weight = model.model.embed_tokens.weight  # type: ignore[union-attr]
    model.load_state_dict(state)
    layers: Any = model.layers if case.model.startswith("mlp") else model.model.layers  # type: ignore[union-attr]
    for index in range(4):
        if held is not None and index not in held:
            layers[index] = _Skip()
    total = weight = 0.0
    with torch.no_grad():
        for rank in ranks:
            for batch in _batches(case, rank):
                if "labels" in batch:
                    tokens = int((batch["labels"][:, 1:] != -100).sum())
                else:
                    tokens = batch["y"].numel()
                total, weight = total + model(**batch).item() * tokens, weight + tokens
    return total / weight


class _Skip(nn.Module):
    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        return x


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_evaluate_is_the_loss_of_the_full_model(ranks: RankPool, case: Case) -> None:
    results = ranks.run(_evaluate, case, world=case.world)
    state = results[0][2]
    expected = _expected(case, state, range(case.data_ranks))
    assert [result[0] for result in results] == pytest.approx([expected] * case.world, rel=1e-6)
    holders = oracle_of(case).layout.placement
    for group in range(case.groups):
        held = {unit for unit in range(4) if holders.holds(group, unit) or case.masking == "backward"}
        own = _expected(case, state, range(group * case.fsdp, (group + 1) * case.fsdp), held)
        assert [result[1][group] for result in results] == pytest.approx([own] * case.world, rel=1e-6), f"group {group}"
    if case.placement != "full":
        assert abs(results[0][1][0] - expected) > 1e-4, "a subnetwork's loss is not the full model's"


def _train_with_evaluations(case: Case) -> Any:
    """As ``cases.train``, with evaluations between steps and in the middle of accumulation."""
    engine = engine_of(case)
    frozen = engine.module.get_submodule("model.layers.1").eval()  # as a user does who freezes statistics
    for step in range(case.steps):
        for micro in range(case.accumulation):
            engine.backward(engine(models.micro_batch(case.model, step, micro, dist.get_rank())))
            assert engine.module.training and not frozen.training
            engine.evaluate(_batches(case, dist.get_rank())[:2])
            engine.evaluate_subnetworks(_batches(case, dist.get_rank())[:2])
            engine.step()
            engine.evaluate(_batches(case, dist.get_rank())[:2])
            assert engine.full_state_dict() is None or dist.get_rank() == 0
    assert all("forward" not in vars(stand_in) for stand_in in pass_throughs(engine.module))
    return engine.full_state_dict()


@pytest.mark.parametrize(("stage", "masking"), [(0, "forward"), (3, "backward")])
def test_training_goes_on_as_if_nothing_was_evaluated(ranks: RankPool, stage: int, masking: Any) -> None:
    case = Case(2, 2 if stage else 1, stage, 2, model="llama-tied", optimizer="adamw", masking=masking)
    state = ranks.run(_train_with_evaluations, case, world=case.world)[0]
    expected = oracle(case).after
    assert expected is not None
    for name, weight in expected.items():
        torch.testing.assert_close(state[name], weight, rtol=0, atol=1e-5 * weight.abs().max().item())


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Embedding(16, 13)
        self.layers = nn.ModuleList(models.Block() for _ in range(4))
        self.head = nn.Linear(13, 16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100)


def make_tagger() -> Tagger:
    torch.manual_seed(0)
    return Tagger()


def labelled(count: int, seed: int) -> dict[str, torch.Tensor]:
    """A batch of four rows, whose first ``count`` positions have a label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.full((4, 8), -100)
    labels[:, :count] = torch.randint(16, (4, count), generator=generator)
    return {"input_ids": torch.randint(16, (4, 8), generator=generator), "labels": labels}


def expected_mean(counts: list[int], weights: list[float]) -> float:
    model = make_tagger()
    with torch.no_grad():
        losses = [model(**labelled(count, seed)).item() for seed, count in enumerate(counts)]
    return sum(w * loss for w, loss in zip(weights, losses, strict=True) if w) / sum(weights)


TAGGER = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("counts", [(8, 8), (8, 2), (8, 1), (0, 8)])
def test_batches_weigh_as_many_labels_as_the_loss_counts(counts: tuple[int, int]) -> None:
    engine = sdp.initialize(model=make_tagger(), config=TAGGER)[0]
    batches = [labelled(count, seed) for seed, count in enumerate(counts)]
    assert engine.evaluate(batches) == pytest.approx(expected_mean(list(counts), list(counts)), rel=1e-6)
    assert engine.evaluate(batches, [1, 3]) == pytest.approx(expected_mean(list(counts), [1, 3]), rel=1e-6, nan_ok=True)
    assert engine.evaluate(batches, iter([0, 2.5])) == pytest.approx(expected_mean(list(counts), [0, 1]), rel=1e-6)


@pytest.mark.usefixtures("one_rank")
def test_weights_that_cannot_be_honoured_are_one_line() -> None:
    engine = sdp.initialize(model=make_tagger(), config=TAGGER)[0]
    with pytest.raises(ConfigError, match=r"^evaluate: 2 weights for 1 batches; give one for each batch$"):
        engine.evaluate([labelled(8, 0)], [1, 2])
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="must be finite and not negative; give the number"):
            engine.evaluate([labelled(8, 0)], [weight])
    with pytest.raises(DataError, match=r"^evaluate: no batch of any rank has a label that counts"):
        engine.evaluate([labelled(0, 0)])


def _weighted(masking: str) -> tuple[float, float]:
    rank = dist.get_rank()
    section = {"groups": 2, "capacity": 0.5, "masking": masking}
    engine = sdp.initialize(model=make_tagger(), config=TAGGER | {"sdp": section})[0]
    batches = [labelled(count, 2 * rank + index) for index, count in enumerate([(8, 1), (2,)][rank])]
    return engine.evaluate(batches), engine.evaluate(batches, [(0, 3), (2,)][rank])


@pytest.mark.parametrize("masking", ["forward", "backward"])
def test_weights_of_all_ranks_make_one_mean(ranks: RankPool, masking: str) -> None:
    for by_labels, given in ranks.run(_weighted, masking, world=2):
        assert by_labels == pytest.approx(expected_mean([8, 1, 2], [8, 1, 2]), rel=1e-6)
        assert given == pytest.approx(expected_mean([8, 1, 2], [0, 3, 2]), rel=1e-6)


class Noisy(nn.Module):
    """A residual block that behaves otherwise in training: dropout and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.drop = nn.Dropout(0.5)
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))


class NoisyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.layers = nn.ModuleList(Noisy() for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x[:, :3], y)


def _evaluate_noisy(case: Case) -> tuple[float, float, Any, Any]:
    torch.manual_seed(0)
    engine = sdp.initialize(model=NoisyModel(), config=case.config())[0]
    for step in range(3):
        engine.backward(engine(models.micro_batch("mlp", step, 0, dist.get_rank(), rows=8)))
        engine.step()
    batch = models.micro_batch("mlp", 99, 0, 0, rows=8)
    losses = engine.evaluate([batch]), engine.evaluate([batch])
    here = {name: buffer.cpu().clone() for name, buffer in engine.module.named_buffers()}
    return *losses, engine.full_state_dict(), here


@pytest.mark.parametrize("case", [Case(2, 1), Case(2, 2, 3), Case(2, 2, 3, masking="backward")], ids=str)
def test_evaluation_mode_and_statistics_of_one_model(ranks: RankPool, case: Case) -> None:
    """Statistics are those of the full state, though each rank tracked its own."""
    results = ranks.run(_evaluate_noisy, case, world=case.world)
    model = NoisyModel().eval()
    model.load_state_dict(results[0][2])
    expected = model(**models.micro_batch("mlp", 99, 0, 0, rows=8)).item()
    for first, second, _, here in results:
        assert first == second == pytest.approx(expected, rel=1e-5)
        assert here
        assert all(torch.equal(buffer, results[0][2][name]) for name, buffer in here.items())


def _live_guests(stage: int) -> tuple[int, int]:
    """Guest units that were assembled, and the most of them that were alive at one time."""
    case = Case(4, 1, stage, model="llama", placement="profile")
    engine = engine_of(case)
    guests: list[list[weakref.ref[torch.Tensor]]] = []
    peak, original = 0, StreamedEvaluation.assemble_guest

    def assemble(self: StreamedEvaluation, *args: Any) -> dict[str, torch.Tensor]:
        nonlocal peak
        made = original(self, *args)
        guests.append([weakref.ref(tensor) for tensor in made.values()])
        peak = max(peak, sum(any(reference() is not None for reference in guest) for guest in guests))
        return made

    StreamedEvaluation.assemble_guest = assemble  # type: ignore[method-assign]
    try:
        engine.evaluate(_batches(case, dist.get_rank()))
    finally:
        StreamedEvaluation.assemble_guest = original  # type: ignore[method-assign]
    return len(guests), peak


@pytest.mark.parametrize("stage", [0, 3])
def test_one_or_two_guests_are_in_memory(ranks: RankPool, stage: int) -> None:
    found = ranks.run(_live_guests, stage, world=4)
    assert sum(guests for guests, _ in found) > 8
    assert max(peak for _, peak in found) <= 2, found


def _failing(case: Case) -> list[str]:
    engine = engine_of(case)
    good = models.micro_batch(case.model, 0, 0, dist.get_rank())
    bad = {**good, "x": torch.randn(2, models.IN + 1)}
    messages = []
    before = engine.evaluate([good])
    for batches in ([good] * 8 + [bad, good], [] if dist.get_rank() == 1 else [good]):
        try:
            engine.evaluate(batches)
        except (RuntimeError, DataError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    assert engine.module.training
    assert engine.evaluate([good]) == before
    return messages


@pytest.mark.parametrize("case", [Case(2, 1), Case(2, 2, 3)], ids=str)
def test_errors_come_out_and_the_engine_lives_on(ranks: RankPool, case: Case) -> None:
    start = time.monotonic()
    for messages in ranks.run(_failing, case, world=case.world, timeout=240):
        assert len(messages) == 2
        assert messages[0].startswith("RuntimeError: ")
        assert messages[1] == "DataError: evaluate: a rank has no batch; give every rank at least one"
    assert time.monotonic() - start < 200, "ranks waited for a collective that never came"


def test_passes_of_a_model_that_take_different_paths_are_refused() -> None:
    lockstep: Lockstep[None] = Lockstep(torch.device("cpu"), lambda: None)
    with pytest.raises(RuntimeError, match=r"different orders: .* before a, the end$"):
        lockstep.run([lambda: lockstep.stop("a"), lambda: None], lambda _: None)


def _gradients_with_an_evaluation_between(evaluates: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    engine = sdp.initialize(model=NoisyModel(), config=Case(2, 1).config())[0]
    batch = models.micro_batch("mlp", 0, 0, dist.get_rank(), rows=4)
    loss = engine(batch)
    if evaluates:
        engine.evaluate([batch])
    engine.backward(loss)
    return {name: p.grad.clone() for name, p in engine.parameters_here.items() if p.grad is not None}


def test_an_evaluation_between_forward_and_backward_changes_no_gradient(ranks: RankPool) -> None:
    without, with_one = (
        ranks.run(_gradients_with_an_evaluation_between, evaluates, world=2) for evaluates in (False, True)
    )
    for before, after in zip(without, with_one, strict=True):
        assert before
        assert all(torch.equal(before[name], after[name]) for name in before)
