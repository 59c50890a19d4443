"""What a checkpoint says of a run besides its tensors: the content of ``state.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backend import Backend, StateToSave
from .settings import settings_to_save


def run_state(
    engine: Any, backend: Backend, own: StateToSave, rates: Mapping[str, float], client: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of ``state.json`` without the hashes of the files.

    Args:
        engine: The engine (:class:`~sdp.engine.engine.SDPEngine`).
        backend: Its backend.
        own: This rank's share of the checkpoint.
        rates: The learning rate of each parameter of the full model.
        client: The JSON values of the caller's own state.
    """
    scheduler = engine.lr_scheduler
    return {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "loss_scale": backend.loss_scale_state(),
        "mesh": own.mesh_shape(),
        "placement": engine.layout.placement.to_json(),
        "learning_rates": dict(rates),
        "settings": settings_to_save(engine.config, engine.optimizer, backend.names_of_param_groups()),
        "scheduler": scheduler and backend.shared_schedule(scheduler.state_dict()),
        "loader": engine.loader.state_dict() if engine.loader is not None else None,
        "client_state": client,
        "spikes": engine.spikes.state_dict(),
        "sync": engine.local_training.state_dict(engine.global_steps),
    }
