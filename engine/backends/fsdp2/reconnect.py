"""Connects a backend to the groups that are alive now."""

from __future__ import annotations

from ...distributed.process_groups import Communicators
from ...placement.layout import Layout
from .backend import FSDP2Backend


def reconnect(backend: FSDP2Backend, layout: Layout, communicators: Communicators) -> None:
    """Average with other groups from now on. What is inside the group stays as it is.

    Args:
        backend: the backend, between two steps and without gradients.
        layout: the layout of the living groups.
        communicators: the process groups of this rank. ``rank`` is its number in ``layout``.
    """
    backend.rank, backend.communicators = communicators.rank, communicators
    backend.at = layout.mesh.coordinates(communicators.rank)
    backend.layout, backend.phases = layout, {layout.masking: layout}
    backend.ready()
