"""Tensor parallelism: the loss on parts of a vocabulary, and what cannot be cut."""

from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sdp.engine.config.load import load_config
from sdp.engine.distributed.collectives import TensorRanks, Traffic, scatter_sequence, vocabulary_embedding
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.distributed.process_groups import tensor_group
from sdp.engine.distributed.tensor_parallel import parameter_cuts
from sdp.engine.errors import ModelError
from sdp.engine.model_interface import Column, Gather, Row, Style, Vocabulary, Whole
from sdp.engine.placement.layout import Layout
from sdp.models.layers import linear_cross_entropy
from sdp.tests.support import models
from sdp.tests.support.cases import Case, data_rank_of, engine_of, full_gradients
from sdp.tests.support.ranks import RankPool
from torch import nn

RELATIVE = 1e-5


def _ranks_of_all() -> TensorRanks:
    group = tensor_group(Mesh(1, 1, dist.get_world_size()))
    assert group is not None
    return TensorRanks(group, dist.get_world_size(), dist.get_rank(), Traffic())


def _inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Hidden states, the head's weight, and targets of which some are ignored. The logits are so
    large that an exponential without
    their maximum overflows. They are multiples of a quarter, so that no product is rounded, in an
    order that is the processor's own: of logits as large as these an error in the last place is
    many times the tolerance.
    """
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(20, 6, generator=generator).mul_(40).round_().div_(4)
    weight = torch.randn(12, 6, generator=generator).mul_(6).round_()
    targets = torch.randint(12, (20,), generator=generator)
    targets[::5] = -100
    return [hidden.to(dtype), weight.to(dtype), targets]


def _loss_of_parts(dtype: torch.dtype, z_loss: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ranks = _ranks_of_all()
    hidden, weight, targets = _inputs(dtype)
    part = weight.chunk(ranks.size)[ranks.index].clone().requires_grad_()
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, part, targets, 7, ranks, z_loss)
    (3 * loss).backward()
    assert hidden.grad is not None and part.grad is not None and part.grad.dtype == dtype
    with torch.no_grad():
        return loss.detach(), hidden.grad, part.grad, linear_cross_entropy(hidden, part, targets, 7, ranks, z_loss)


@pytest.mark.parametrize(("dtype", "z_loss"), [(torch.float32, 0.0), (torch.float32, 0.01), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("world", [2, 3])
def test_cross_entropy_of_parts_equals_that_of_the_whole(
    ranks: RankPool, world: int, dtype: torch.dtype, z_loss: float
) -> None:
    hidden, weight, targets = _inputs(dtype)
    wholes = [hidden.requires_grad_(), weight.requires_grad_()]
    logits = F.linear(hidden, weight).float()
    expected = F.cross_entropy(logits, targets) + z_loss * logits.logsumexp(-1)[targets >= 0].square().mean()
    (3 * expected).backward()
    answers = ranks.run(_loss_of_parts, dtype, z_loss, world=world)
    exact = RELATIVE if z_loss else 1e-6  # the z-loss multiplies by numbers that are no quarters
    tolerance = {torch.float32: exact, torch.bfloat16: 2e-2}[dtype]
    for loss, _, _, without_gradient in answers:
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
        assert torch.equal(loss, without_gradient)
    gradients = [sum(answer[1].float() for answer in answers), torch.cat([answer[2] for answer in answers]).float()]
    for mine, tensor in zip(gradients, wholes, strict=True):
        assert tensor.grad is not None
        assert (mine - tensor.grad).abs().max() <= tolerance * tensor.grad.abs().max()


def _no_targets() -> float:
    return linear_cross_entropy(torch.zeros(4, 3), torch.zeros(5, 3), torch.full((4,), -100), 2, _ranks_of_all()).item()


def test_the_mean_over_no_targets_is_no_number_as_of_the_whole(ranks: RankPool) -> None:
    assert all(loss != loss for loss in ranks.run(_no_targets, world=2))


def _outside() -> list[str]:
    ranks, messages = _ranks_of_all(), []
    for action in (
        lambda: vocabulary_embedding(torch.tensor([[0, 12]]), torch.zeros(6, 2), ranks),
        lambda: vocabulary_embedding(torch.tensor([[0, -1]]), torch.zeros(6, 2), ranks),
        lambda: linear_cross_entropy(torch.zeros(1, 2), torch.zeros(6, 2), torch.tensor([12]), 1, ranks),
    ):
        try:
            action()
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def test_ids_outside_the_vocabulary_do_not_pass(ranks: RankPool) -> None:
    for messages in ranks.run(_outside, world=2):
        assert ["a token id is outside the vocabulary of 12" in message for message in messages] == [True] * 3


def _whole_logits(stage: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits without labels, and the gradients of a loss that the user makes of them."""
    case = Case(1, 2, stage, placement="full", model="even-llama", tp=2)
    engine = engine_of(case)
    batch = models.micro_batch(case.model, 0, 0, data_rank_of(case))
    logits = engine({"input_ids": batch["input_ids"]})
    labels = batch["input_ids"].to(engine.device)
    engine.backward(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
    return logits.detach().cpu(), {name: gradient.cpu() for name, gradient in full_gradients(engine).items()}


@pytest.mark.parametrize("stage", [0, 3])
def test_logits_and_gradients_equal_hugging_face(ranks: RankPool, stage: int) -> None:
    transformers = pytest.importorskip("transformers")
    ours = models.build("even-llama")
    fields = ours.config.model_dump()  # type: ignore[union-attr]
    theta = fields.pop("rope_theta")
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**fields, rope_parameters={"rope_type": "default", "rope_theta": theta})
    )
    theirs.load_state_dict(ours.state_dict(), strict=True)
    answers = ranks.run(_whole_logits, stage, world=4)
    for data_rank in range(2):
        ids = models.micro_batch("even-llama", 0, 0, data_rank)["input_ids"]
        output = theirs(ids, labels=ids)
        (output.loss / 2).backward()
        for logits, _ in answers[2 * data_rank : 2 * data_rank + 2]:
            torch.testing.assert_close(logits, output.logits, rtol=RELATIVE, atol=RELATIVE)
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        for _, gradients in answers:
            torch.testing.assert_close(
                gradients[name], parameter.grad, rtol=0, atol=RELATIVE * parameter.grad.abs().max().item()
            )


def _frozen_norms() -> tuple[list[str], dict[str, int]]:
    case = Case(2, 1, model="even-llama", tp=2)
    model = models.build(case.model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)
    engine = sdp.initialize(model=model, config=case.config())[0]
    engine.backward(engine(models.micro_batch(case.model, 0, 0, data_rank_of(case))))
    gradients = list(full_gradients(engine))
    engine.step()
    return gradients, engine.traffic.by_kind()


def test_frozen_parameters_stay_frozen_and_unsent(ranks: RankPool) -> None:
    for gradients, counted in ranks.run(_frozen_norms, world=4):
        assert gradients
        assert not [name for name in gradients if "norm" in name]
        assert not [kind for kind in counted if kind.startswith("inside")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3},
            r"layers\.0\.self_attn\.q_proj\.weight: dimension 0 \(3 pieces of 6\)"),
        ({"num_key_value_heads": 1},
            r"layers\.0\.self_attn\.k_proj\.weight: dimension 0 \(1 pieces of 6\) .* choose a divisor of 1"),
        ({"intermediate_size": 13},
            r"layers\.0\.mlp\.gate_proj\.weight: dimension 0 \(size 13\) cannot be cut among .*autotp_size = 2"),
        ({"vocab_size": 37}, r"embed_tokens\.weight: dimension 0 \(size 37\) cannot be cut"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        parameter_cuts(models.even_llama(tied=True, **fields), 2)
    assert "\n" not in str(error.value)


def test_a_sequence_that_does_not_divide() -> None:
    ranks = TensorRanks(None, 2, 0, Traffic())
    with pytest.raises(
        ModelError, match=r"a sequence of 5 tokens cannot be cut among tensor_parallel\.autotp_size = 2 ranks"
    ):
        scatter_sequence(torch.zeros(1, 5, 4), ranks)


def test_a_model_without_a_plan() -> None:
    config = load_config(Case(2, 1, tp=2).config())
    with pytest.raises(
        ModelError, match=r"Mlp has no tensor_parallel_plan\(\), so it cannot be cut; set .*autotp_size to 1"
    ):
        Layout.of(models.mlp(), config, Mesh(2, 1, 2))


class Planned(nn.Module):
    """A user's model, with a plan that a test gives it."""

    def __init__(self, plan: dict[str, Style]) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(8, 4), nn.Linear(4, 6, bias=False), nn.Linear(6, 4)
        self.plan = plan

    def tensor_parallel_plan(self) -> dict[str, Style]:
        return self.plan


WORKING: dict[str, Style] = {"embed": Vocabulary(), "up": Column(), "down": Whole()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down": Row()}, r"down\.bias: input features of a layer with a bias cannot be cut"),
        (
            {"embde": Gather()},
            r"tensor_parallel_plan\(\): 'embde' matches no module of the model, did you mean embed\?",
        ),
        ({"up": None}, r"up\.weight: is not in tensor_parallel_plan\(\)"),
    ],
)
def test_plans_that_cannot_be_carried_out(change: dict[str, Any], message: str) -> None:
    plan = {path: style for path, style in {**WORKING, **change}.items() if style is not None}
    assert parameter_cuts(Planned(WORKING), 2) == {
        "embed.weight": 0, "up.weight": 0, "down.weight": None, "down.bias": None,
    }  # fmt: skip
    with pytest.raises(ModelError, match=message):
        parameter_cuts(Planned(plan), 2)


def test_an_embedding_with_a_padding_row_cannot_be_cut() -> None:
    model = Planned(WORKING)
    model.embed.padding_idx = 0
    with pytest.raises(ModelError, match="embed: an embedding with padding_idx cannot be cut"):
        parameter_cuts(model, 2)


def test_tied_weights_must_be_cut_alike() -> None:
    model = Planned({**WORKING, "down": Row()})
    model.embed = nn.Embedding(6, 4)
    model.up.weight = model.embed.weight
    model.down = nn.Linear(4, 6, bias=False)
    model.down.weight = model.embed.weight
    with pytest.raises(
        ModelError,
        match=r"embed\.weight: several modules share this weight, and tensor_parallel_plan\(\) cuts it along",
    ):
        parameter_cuts(model, 2)
