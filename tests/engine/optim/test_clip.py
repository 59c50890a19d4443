"""Clipping against torch's own, above and below the norm, and the norm of local shards."""

import math

import pytest
import torch
from sdp.engine.optim.clip import clip_, squared_norm


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 1e6])
def test_clipping_is_torchs(max_norm: float):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(7, 5)), torch.nn.Parameter(torch.randn(3))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    ours = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    norm = math.sqrt(squared_norm(ours, torch.device("cpu")).item())
    expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    clip_(ours, norm, max_norm)
    for parameter, gradient in zip(parameters, ours, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=1e-7)


def test_no_gradients_have_norm_zero():
    assert squared_norm([], torch.device("cpu")).item() == 0
