"""What a checkpoint says of a run besides its tensors: the content of ``state.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..optim.schedules import keep_shared_state
from .settings import settings_to_save
from .state import SavedState


def run_state(engine: Any, share: SavedState, rates: Mapping[str, float], client: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of ``state.json`` without the hashes of the files.

    Args:
        engine: The engine (:class:`~sdp.engine.engine.SDPEngine`).
        share: This rank's share of the checkpoint.
        rates: The learning rate of each parameter of the full model.
        client: The JSON values of the caller's own state.
    """
    groups, scaler, schedule = engine.groups, engine.loss_scaler, None
    if engine.lr_scheduler is not None:
        schedule = engine.lr_scheduler.state_dict()
        if groups.context.user_groups is not None:  # its groups depend on the units that this rank holds
            schedule = keep_shared_state(schedule)
    return {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "loss_scale": scaler.state_dict() if scaler is not None else None,
        "mesh": share.mesh_shape(),
        "placement": engine.layout.placement.to_json(),
        "learning_rates": dict(rates),
        "settings": settings_to_save(engine.config, engine.optimizer, groups.names_of_param_groups()),
        "scheduler": schedule,
        "loader": engine.loader.state_dict() if engine.loader is not None else None,
        "client_state": client,
        "spikes": engine.spikes.state_dict(),
        "sync": engine.local_training.state_dict(engine.global_steps),
    }
