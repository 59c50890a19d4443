"""Connects a backend to the groups that are alive now."""

from __future__ import annotations

from collections.abc import Mapping

from ...config.masking import Masking
from ...distributed.process_groups import Communicators
from ...placement.layout import Layout
from .backend import FSDP2Backend


def reconnect(backend: FSDP2Backend, phases: Mapping[Masking, Layout], communicators: Communicators) -> None:
    """Connect the backend to other groups. Nothing changes inside its own group.

    Frozen copies are not refreshed. The caller does that with ``enter_phase``.

    Args:
        backend: the backend, between two steps and without gradients.
        phases: the layouts of the living groups, by masking.
        communicators: the process groups of this rank. Their ``rank`` is its number in the layouts.
    """
    backend.disconnect()
    backend.rank, backend.communicators = communicators.rank, communicators
    backend.phases = dict(phases)
    backend.layout = phases[backend.layout.masking]
    backend.at = backend.layout.mesh.coordinates(communicators.rank)
    backend.connect(phases.get("backward", backend.layout))
    if backend.local is not None:
        backend.local.reconnect()
