"""MFU counts the operations of each group's own subnetwork."""

from types import SimpleNamespace

import pytest
import torch
from sdp.engine.placement.placement import Placement
from sdp.models.llama import Llama, LlamaConfig
from sdp.tools.train.loop.meter import Utilisation, mean_flops_per_token

FLOPS = {"layers.0": 10.0, "layers.1": 20.0, "shared": 5.0}
BLOCKS = Placement(2, ("layers.0", "layers.1"), ((0,), (0, 1)), (7, 7))


def test_blocks_count_for_their_holders() -> None:
    assert mean_flops_per_token(FLOPS, BLOCKS, keeps_frozen=False) == 5 + 10 / 2 + 20
    assert mean_flops_per_token(FLOPS, BLOCKS, keeps_frozen=True) == pytest.approx(5 + (10 + 10 * 2 / 3) / 2 + 20)


def test_neurons_count_by_their_share_of_the_layer() -> None:
    names = ("layers.0.mlp.neurons.0", "layers.0.mlp.neurons.1", "layers.1.mlp.neurons.0")
    neurons = Placement(2, names, ((0,), (0, 1), (0, 1)), (3, 1, 4))
    assert mean_flops_per_token(FLOPS, neurons, keeps_frozen=False) == 5 + 10 * (1 + 1 / 4) / 2 + 20


def engine(
    monkeypatch: pytest.MonkeyPatch, name: str, device: str = "cuda", precision: str = "bfloat16", groups: int = 1
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    model = Llama(
        LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    )
    names = ("model.layers.0", "model.layers.1")
    holders = ((0,), (0,)) if groups == 1 else ((0,), (1,))
    layout = SimpleNamespace(placement=Placement(groups, names, holders, (1, 1)))
    return SimpleNamespace(
        module=model,
        device=torch.device(device),
        config=SimpleNamespace(precision=precision, sdp=SimpleNamespace(maskings=("forward", "backward"))),
        layout=layout,
        world_size=2,
    )


def test_every_phase_of_a_schedule_has_its_own_utilisation(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine(monkeypatch, "NVIDIA H200", groups=2)
    flops = one.module.flops_per_token(32)
    blocks = sum(cost for name, cost in flops.items() if name != "shared")
    found = Utilisation(one, 32)  # type: ignore[arg-type]
    for masking, share in (("forward", 1 / 2), ("backward", (2 + 1 / 2) / 3)):
        rate = (flops["shared"] + share * blocks) * 1e9 / 2
        expected = {"mfu": rate / 989.4e12, "flops_per_second": rate}
        assert found.of(1e9, masking) == pytest.approx(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "device", "precision"),
    [("NVIDIA H200", "cpu", "bfloat16"), ("Unknown", "cuda", "bfloat16"), ("NVIDIA H200", "cuda", "float32")],
)
def test_an_unknown_peak_gives_no_utilisation(monkeypatch: pytest.MonkeyPatch, name: str, device: str, precision: str):
    assert Utilisation(engine(monkeypatch, name, device, precision), 32).of(1e9, "forward") == {}  # type: ignore[arg-type]
