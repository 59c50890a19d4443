"""Shards in the host's memory: the same run, and messages through the device."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError
from sdp.engine.stores.fsdp2.store import DeviceMessages, ShardHome
from sdp.tests.support.cases import Case, assert_same_run, assert_state_as_predicted, native, oracle, train
from torch.distributed.fsdp import CPUOffloadPolicy


def train_offloaded(case: Case, section: str) -> Any:
    zero = {"stage": case.stage, section: {"device": "cpu", "pin_memory": True}}
    return train(case, zero_optimization=zero)


@pytest.mark.parametrize(
    ("case", "section"),
    [
        (Case(2, 2, 3, 3, optimizer="adamw", clip=True), "offload_param"),
        (Case(2, 2, 1, 1, optimizer="momentum"), "offload_optimizer"),
        (Case(2, 1, 0, 1, optimizer="adamw"), "offload_optimizer"),
        (Case(2, 2, 3, 1, masking="backward"), "offload_optimizer"),
        pytest.param(Case(2, 2, 2, 3, bf16=True), "offload_param", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_equals_the_one_without_offload(case: Case, section: str, ranks: Any) -> None:
    results = ranks.run(train_offloaded, case, section, world=case.world)
    expected = native(ranks, case)
    assert_state_as_predicted(results)
    assert results[0].after is not None and expected[0].after is not None
    if torch.cuda.is_available():  # not bit for bit: the host and the GPU may round differently
        assert results[0].losses == pytest.approx(expected[0].losses, rel=1e-6)
        assert results[0].norms == pytest.approx(expected[0].norms, rel=1e-6)
    else:
        assert results[0].losses == expected[0].losses
        assert results[0].norms == expected[0].norms
        for name, weight in expected[0].after.items():
            assert torch.equal(results[0].after[name], weight), name
    if not case.bf16:
        assert_same_run(results, oracle(case), case)


def test_fsdp2_offloads() -> None:
    config = load_config({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    home = ShardHome(config, torch.device("cpu"), sends=False)
    assert isinstance(home.policy(), CPUOffloadPolicy)
    cuda = ShardHome(config, torch.device("cuda", 0), sends=False)
    assert (cuda.device, cuda.policy()) == (torch.device("cpu"), CPUOffloadPolicy(pin_memory=True))
    several = ShardHome(config, torch.device("cuda", 0), sends=True)
    assert several.policy() == CPUOffloadPolicy(pin_memory=False), "what is averaged must be on the host at once"
    plain = ShardHome(load_config({}), torch.device("cuda", 0), sends=False)
    assert (plain.offloads, plain.device) == (False, torch.device("cuda", 0))


class FromAnotherDevice(DeviceMessages):
    """Messages of tensors that are always taken to be on another device."""

    def is_elsewhere(self, tensor: torch.Tensor) -> bool:
        return True


def send_through_another_device() -> list[float]:
    """Results of an average and a broadcast through copies, and the values before."""
    messages = FromAnotherDevice(torch.device("cpu"))
    group = dist.group.WORLD
    assert group is not None
    summed, sent = torch.full((3,), float(dist.get_rank() + 1)), torch.full((3,), float(dist.get_rank()))
    work = messages.all_reduce(summed, group)
    before = summed[0].item() - dist.get_rank()
    work.wait()
    messages.broadcast(sent, 1, group).wait()
    return [before, summed[0].item(), sent[2].item()]


def test_messages_of_the_host_go_through_the_device(ranks: Any) -> None:
    assert ranks.run(send_through_another_device, world=2) == [[1.0, 3.0, 1.0]] * 2


@pytest.mark.parametrize(
    ("section", "other"),
    [
        ({"sdp": {"sync": {"every": 2}}}, "sdp.sync"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size above 1"),
    ],
)
def test_offload_is_refused_where_shards_must_be_on_the_device(section: dict[str, Any], other: str) -> None:
    with pytest.raises(ConfigError, match=f'offload_param.device: "cpu" is not available .* together with {other}'):
        load_config({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, **section})
