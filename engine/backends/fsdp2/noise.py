"""Gradient noise on the native backend: what is measured of the gradients that it averages."""

from __future__ import annotations

from ...distributed.process_groups import make_replicas
from ...full_model.backend_view import SubnetworkBackend
from ...sync.gradients import GradientSync
from ...sync.noise import SecondMoments
from ...sync.own_gradients import OwnGradients


def make_noise(backend: SubnetworkBackend, sync: GradientSync) -> OwnGradients:
    """Make what measures the noise of the gradients that ``sync`` averages. Collective."""
    moments = SecondMoments(backend.basic_optimizer)
    sync.own = OwnGradients(
        backend.layout,
        backend.parameters,
        backend.at,
        backend.device,
        backend.traffic,
        lambda name: moments.of(backend.stepped.get(name)),
        inside=make_replicas(backend.layout.mesh) if backend.shards == 1 else None,
        tensor_ranks=backend.tensor_ranks,
        sharded=backend.shards > 1,
    )
    return sync.own
