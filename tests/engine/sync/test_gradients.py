"""Gradient averaging: the global order of buckets, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.engine.distributed.collectives import Traffic, cut_like
from sdp.engine.distributed.fake_world import fake_world
from sdp.engine.placement.placement import Bucket
from sdp.engine.stores.store import Messages
from sdp.engine.sync.gradients import GradientSync, PendingBucket
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

EVERYONE = (0, 1)


class Recorder(Messages):
    """An all-reduce that records its buffers; the other rank has equal gradients."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def all_reduce(self, tensor: torch.Tensor, group: Any) -> Recorder:
        self.sizes.append(tensor.numel())
        tensor.mul_(2)
        return self

    def wait(self) -> None:
        pass


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with fake_world(0, 2):
        yield


def _parameters(**sizes: int) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.ones(size)) for name, size in sizes.items()}


def _sync(parameters: dict[str, nn.Parameter], recorder: Recorder, traffic: Traffic) -> GradientSync:
    buckets = [Bucket(EVERYONE, (name,)) for name in parameters]
    return GradientSync(buckets, parameters, {EVERYONE: dist.group.WORLD}, traffic, messages=recorder)  # type: ignore[dict-item]


def test_buckets_are_launched_in_the_global_order() -> None:
    parameters, recorder, traffic = _parameters(first=1, second=2, third=3), Recorder(), Traffic()
    sync = _sync(parameters, recorder, traffic)
    sync.arm()
    for name, launched in (("third", []), ("first", [1]), ("second", [1, 2, 3])):
        (parameters[name] * 3).sum().backward()
        assert recorder.sizes == launched
    sync.finish()
    assert all(bool((parameter.grad == 3).all()) for parameter in parameters.values())
    assert sum(traffic.by_kind().values()) == 4 * (1 + 2 + 3)


def test_gradients_stay_on_the_host_if_the_mesh_is_on_another_device() -> None:
    """As with ``offload_optimizer`` on a GPU. The device "meta" takes the place of the GPU."""
    mesh = init_device_mesh("meta", (2,))
    weight = nn.Parameter(DTensor.from_local(torch.ones(2, 3, device="meta"), mesh, [Shard(0)]))
    weights = {"weight": nn.Parameter(cut_like(torch.ones(2, 3), weight)), "other": nn.Parameter(torch.ones(1))}
    for name, parameter in weights.items():
        parameter.grad = cut_like(torch.ones(2, 3), weight) if name == "weight" else torch.ones(1)
    recorder = Recorder()
    pending = PendingBucket(list(weights.values()), dist.group.WORLD, "between groups")  # type: ignore[arg-type]
    pending.arm()
    pending.mark_all_ready()
    pending.launch(recorder, Traffic())
    pending.wait()
    gradient = weights["weight"].grad
    assert isinstance(gradient, DTensor)
    assert (gradient.shape, gradient.placements) == ((4, 3), weight.placements)
    assert (recorder.sizes, gradient.to_local().device.type) == ([7], "cpu")
    assert torch.equal(gradient.to_local(), torch.ones(2, 3)), "it is a view of what was averaged"
