"""The loss in chunks of tokens against torch's cross-entropy of all logits, and what it spares."""

import pytest
import torch
import torch.nn.functional as F
from sdp.engine.accounting.memory_probe import peak_tensor_bytes
from sdp.models.layers import IGNORE_INDEX, LanguageModelHead, linear_cross_entropy
from sdp.models.llama import Llama, LlamaConfig
from torch import Tensor, nn

TOKENS, HIDDEN, VOCABULARY = 30, 12, 53


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    targets[torch.rand(TOKENS, generator=generator) < 0.3] = IGNORE_INDEX
    return hidden, weight, targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    logits = F.linear(hidden, weight).float()
    squares = logits.logsumexp(-1).square()[targets != IGNORE_INDEX]
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX) + z_loss * squares.mean()


def relative(mine: Tensor, other: Tensor) -> float:
    return ((mine - other).abs().max() / other.abs().max()).item()


@pytest.mark.parametrize("z_loss", [0.0, 0.05])
@pytest.mark.parametrize("chunk", [1, 7, 10, TOKENS, 1000])
def test_loss_and_gradients_equal_those_of_all_logits(chunk: int, z_loss: float) -> None:
    hidden, weight, targets = inputs()
    expected = plain(hidden, weight, targets, z_loss)
    wanted = torch.autograd.grad(expected * 0.3, (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, targets, chunk, z_loss=z_loss)
    gradients = torch.autograd.grad(loss * 0.3, (hidden, weight))
    assert loss.shape == () and loss.dtype == torch.float32
    assert relative(loss, expected) <= 1e-6
    for mine, other in zip(gradients, wanted, strict=True):
        assert relative(mine, other) <= 1e-6
    with torch.no_grad():
        assert relative(linear_cross_entropy(hidden, weight, targets, chunk, z_loss=z_loss), expected) <= 1e-6


def test_the_z_loss_is_for_training_alone() -> None:
    hidden, weight, targets = inputs()
    head = LanguageModelHead(HIDDEN, VOCABULARY, chunk_tokens=7, z_loss=0.05)
    head.weight = nn.Parameter(weight.detach())
    labels = F.pad(targets[:-1], (1, 0), value=IGNORE_INDEX)[None]  # the head shifts them back
    targets = F.pad(targets[:-1], (0, 1), value=IGNORE_INDEX)
    for training, z_loss in ((True, 0.05), (False, 0.0)):
        assert relative(head.train(training)(hidden[None], labels), plain(hidden, weight, targets, z_loss)) <= 1e-6


def test_in_bfloat16_it_is_no_further_from_the_exact_gradients_than_all_logits_at_once() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    wanted = torch.autograd.grad(F.cross_entropy(F.linear(*exact), targets), exact)
    whole = torch.autograd.grad(plain(hidden, weight, targets), (hidden, weight))
    mine = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, 7), (hidden, weight))
    for one, other, truth in zip(mine, whole, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - truth).norm() <= 1.1 * (other - truth).norm()


def test_under_autocast_it_is_the_loss_of_operands_in_its_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, table = torch.randn(12, 8, generator=generator), torch.randn(20, 8, generator=generator)
    targets = torch.randint(20, (12,), generator=generator)
    found = []
    for autocast in (True, False):
        hidden, weight = rows.clone().requires_grad_(), table.clone().requires_grad_()
        operands = (hidden, weight) if autocast else (hidden.bfloat16(), weight.bfloat16())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = linear_cross_entropy(*operands, targets, 5)
        loss.backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    for under, plain in zip(*found, strict=True):
        assert under.dtype == torch.float32
        assert torch.equal(under, plain)


def test_nothing_to_predict_is_no_number_with_a_zero_gradient() -> None:
    hidden, weight, targets = inputs()
    targets.fill_(IGNORE_INDEX)
    for loss in (
        plain(hidden, weight, targets),
        linear_cross_entropy(hidden, weight, targets, 7),
        linear_cross_entropy(hidden, weight, targets, 7, z_loss=0.05),
    ):
        assert loss.isnan()
        assert all(not gradient.any() for gradient in torch.autograd.grad(loss, (hidden, weight)))


def test_a_head_that_is_not_trained_gets_no_gradient() -> None:
    hidden, weight, targets = inputs()
    weight.requires_grad_(False)
    linear_cross_entropy(hidden, weight, targets, 7).backward()
    expected = torch.autograd.grad(plain(hidden, weight, targets), hidden)[0]
    assert weight.grad is None and hidden.grad is not None
    assert relative(hidden.grad, expected) <= 1e-6


def test_a_second_backward_is_refused() -> None:
    hidden, weight, targets = inputs()
    loss = linear_cross_entropy(hidden, weight, targets, 7)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_gives_the_same_loss_and_gradients_whatever_the_chunk(tied: bool) -> None:
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }  # fmt: skip
    ids = torch.randint(VOCABULARY, (3, 11))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, IGNORE_INDEX)
    for chunk in (None, 5):
        torch.manual_seed(0)
        model = Llama(LlamaConfig(**shape, tie_word_embeddings=tied, loss_chunk_tokens=chunk))
        logits = model(ids)
        model(ids, labels).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad()
        F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
        for name, parameter in model.named_parameters():
            mine, other = gradients[name], parameter.grad
            assert mine is not None and other is not None
            assert relative(mine, other) <= 2e-6, name


class PlainHead(LanguageModelHead):
    """As it was: all logits, then their loss."""

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        return plain(input.flatten(0, 1), self.weight, targets.flatten())


def test_the_peak_of_a_step_does_not_contain_the_logits() -> None:
    vocabulary, tokens, rows, hidden = 32_000, 512, 2, 16
    logits = rows * tokens * vocabulary * 4
    peaks = {}
    for kind in (LanguageModelHead, PlainHead):
        model = Llama(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=hidden,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
            )
        )
        model.lm_head = kind(hidden, vocabulary, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ids = torch.randint(vocabulary, (rows, tokens))
        peaks[kind] = peak_tensor_bytes(lambda: step(model, optimizer, ids), model, optimizer, torch.device("cpu"))  # noqa: B023
    assert peaks[PlainHead] > 2 * logits  # what the test would see
    assert peaks[LanguageModelHead] < 0.25 * logits
    # The default keeps 64 MiB of logits, in and out of the softmax.
    assert LanguageModelHead(hidden, vocabulary).chunk_tokens * vocabulary * 4 <= 64 * 2**20
    assert LanguageModelHead(2048, vocabulary).chunk_tokens == 2048


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    model(ids, ids).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_autocast_leaves_float64_alone() -> None:
    hidden, weight, targets = (
        torch.randn(4, 8, dtype=torch.float64),
        torch.randn(5, 8, dtype=torch.float64),
        torch.tensor([0, 1, 2, 3]),
    )
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, 4)
    torch.testing.assert_close(loss, linear_cross_entropy(hidden, weight, targets, 4), rtol=0, atol=0)
